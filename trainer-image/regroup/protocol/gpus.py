"""Choice of the GPUs that a process may see, by CUDA_VISIBLE_DEVICES. Agent, library and command line read it."""

from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The GPUs that a process sees; empty: none. `regroup run` sets it for each worker, by slot."""
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The user's. 1: NCCL lets several ranks share a GPU, so that nothing here refuses it."""


def visible(text: str) -> tuple[str, ...]:
    """Return the names in CUDA_VISIBLE_DEVICES, as CUDA reads them: it stops at an empty or negative one. "NoDevFiles" and NVIDIA's
    "none" and "void" name no GPU, too."""
    names = []
    for name in (part.strip() for part in text.split(",")):
        if not name or name.startswith("-") or name.lower() in ("nodevfiles", "none", "void"):
            break
        names.append(name)
    return tuple(names)


def may_share(environment: Mapping[str, str]) -> bool:
    """Return whether several ranks may compute on one GPU: NCCL is told to allow it (NCCL 2.30 or newer)."""
    return environment.get(MULTI_RANK) == "1"
