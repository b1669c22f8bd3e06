"""Refuses `import horovod.spark` with a sentence."""

raise ImportError(
    "Regroup has Horovod's API for PyTorch only, so `horovod.spark` cannot be imported. Use horovod.torch, or another "
    "framework's own way to train on several workers."
)
