"""The registry of odd networks, and parts that several of them use."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

SIDE, CLASSES = 12, 3
NETS: dict[str, Callable[[], nn.Module]] = {}


def net(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        NETS[name] = make
        return make

    return register


def patches(x: Tensor, size: int = 4) -> Tensor:
    """Images as rows of square patches: images × patches × pixels."""
    return F.unfold(x, size, stride=size).mT


class Written(nn.Module):
    """A network whose forward pass is one function of its parts and the images."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | Tensor):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def conv(*layers: nn.Module, width: int = 4 * 16) -> nn.Sequential:
    """A strided convolution (4 × 4 × 4), the layers, and a classifier of `width` features."""
    return nn.Sequential(nn.Conv2d(1, 4, 5, 2, 1), nn.Sigmoid(), *layers, nn.Flatten(), nn.Linear(width, CLASSES))


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 5, 2, 1), nn.Sigmoid())


def classifier(width: int) -> nn.Linear:
    return nn.Linear(width, CLASSES)
