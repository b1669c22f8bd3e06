"""Refuses `import horovod.tensorflow` with a sentence."""

raise ImportError(
    "Regroup has Horovod's API for PyTorch only, so `horovod.tensorflow` cannot be imported. Use horovod.torch, or another "
    "framework's own way to train on several workers."
)
