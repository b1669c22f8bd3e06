"""FLOPs: those that a GPT needs for a token, and those that a GPU can do. Pure."""

PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""FLOP/s of a GPU with bfloat16 or float16 inputs, dense, by words of its name, the longer name first: NVIDIA's data sheets."""


def peak_flops(gpu: str, precision: str) -> float | None:
    """Return the FLOP/s that a GPU of this name can do at most; None: it is not known. Pure."""
    if precision == "float32":  # full float32 or TF32, as torch is set
        return None
    words = f" {gpu.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def flops_per_token(parameters: int, layers: int, width: int, length: int) -> float:
    """Return the FLOPs of forward and backward for a token: 6 N + 12 L H Q T. Pure.

    Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B. N: parameters that take part in matrix
    products, so not those of a position embedding; L layers; H heads times Q width of a head = width; T length of a sample. What
    activation checkpointing computes again does not count, nor that half of the attention is masked.
    """
    return 6.0 * parameters + 12.0 * layers * width * length
