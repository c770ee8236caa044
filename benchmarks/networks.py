"""Networks of benchmarks, in a module that defines nothing else: workers import it by name."""

from __future__ import annotations

from torch import nn


def group_norm() -> nn.Module:
    """A convolutional network as people write them today: GroupNorm, GELU, pooled at the end."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(8, after), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
