"""FLOPs that a GPT needs for a token, and FLOP/s that a GPU can do. Pure."""

PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense FLOP/s with bfloat16 or float16 inputs from NVIDIA's data sheets, by words of the GPU's name, longer names first."""


def peak_flops(gpu: str, precision: str) -> float | None:
    """Return the highest FLOP/s of a GPU with this name, or None if it is not known. Pure."""
    if precision == "float32":  # full float32 or TF32, which is a setting of torch
        return None
    words = f" {gpu.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def flops_per_token(parameters: int, layers: int, width: int, length: int) -> float:
    """Return the FLOPs of forward and backward for a token: 6 N + 12 L H Q T. Pure.

    N parameters take part in matrix products, so those of a position embedding do not count. There are L layers, H heads times Q
    width of a head give `width`, and T is the length of a sample. Recomputation and the masked half of attention are left out.
    The formula is from Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.
    """
    return 6.0 * parameters + 12.0 * layers * width * length
