"""Two tasks on scikit-learn's handwritten digits: a perceptron, and a CNN on digits enlarged to MNIST's format."""

import itertools
from typing import Any

import torch
from torch import nn

from regroup.train import sections

from .task import Chain, Task

TRAINED = 1437
"""Number of samples for training, of 1,797. The others are held out."""


class Classifier(Chain):
    """A row of blocks and a linear layer: [n, ...] -> scores [n, 10]."""

    def __init__(self, blocks: list[nn.Module], features: int) -> None:
        super().__init__({}, blocks, {"head": nn.Sequential(nn.Flatten(), nn.Linear(features, 10))})


class Block(nn.Sequential):
    """A layer with its norm and activation. It has a forward of its own, since torch.compile skips frames of torch's containers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last module's output."""
        for module in self:
            x = module(x)
        return x


def digits(settings: sections.Digits) -> Task:
    """Return the perceptron on [n, 64] in [0, 1]."""
    x, y = _digits()
    width = settings.width
    blocks: list[nn.Module] = [Block(nn.Linear(64, width), nn.ReLU()), Block(nn.Linear(width, width), nn.ReLU())]
    return _task(Classifier(blocks, width), x.flatten(1), y, _plans)


def _plans() -> list[dict[str, Any]]:
    """Return the tensor parallel plans of both hidden layers.

    The first layer is split by its outputs, the second by its inputs. So the second gives whole outputs to the last layer.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return [{"0": ColwiseParallel()}, {"0": RowwiseParallel()}]


def cnn(settings: sections.Cnn) -> Task:
    """Return the convolutional network on [n, 1, 28, 28] in [0, 1].

    It has GroupNorm, since reduction="exact" refuses BatchNorm. Strides take the place of pooling, which has no deterministic
    backward on some devices.
    """
    x, y = _digits()
    images = nn.functional.interpolate(x[:, None], size=(28, 28), mode="bilinear", align_corners=False)
    channels = [1, settings.width, 2 * settings.width, 4 * settings.width]
    blocks: list[nn.Module] = [
        Block(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU())
        for before, after in itertools.pairwise(channels)
    ]
    return _task(Classifier(blocks, channels[-1] * 4 * 4), images, y)


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [1797, 8, 8] in [0, 1] and labels [1797], in a fixed order without pattern."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.images, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


def _task(model: Chain, x: torch.Tensor, y: torch.Tensor, layers: Any = None) -> Task:
    return Task(model, (x[:TRAINED], y[:TRAINED]), (x[TRAINED:], y[TRAINED:]), layers=layers)
