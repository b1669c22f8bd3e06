"""Batch normalization over the batches of all ranks. Unlike Horovod's it also runs on CPUs."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from regroup.horovod import differentiable, world
from regroup.horovod.operations import Sum


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Normalizes by mean and variance of the inputs of all ranks while it trains. Batches may differ in size."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input. All ranks must call this while the module trains."""
        self._check_input_dim(input)
        if world.size() == 1 or not (self.training or not self.track_running_stats):
            return super().forward(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = torch.full((1,), float(input.numel() // input.shape[1]), dtype=wide.dtype, device=input.device)
        sums = _sum_of_all(torch.cat([wide.sum(dims), count]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        shape = [1, -1] + [1] * (input.dim() - 2)
        # The variance is summed around the common mean, since a difference of squares loses digits.
        centered = wide - mean.reshape(shape)
        variance = _sum_of_all((centered * centered).sum(dims)) / total
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = variance * (total / (total - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        result = centered * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.affine:
            result = result * self.weight.reshape(shape) + self.bias.reshape(shape)
        return result.to(input.dtype)


def _sum_of_all(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks. Its gradient is the sum of the gradients of all ranks."""
    return cast(Any, differentiable).allreduce(tensor, op=Sum)  # type: ignore[no-any-return]
