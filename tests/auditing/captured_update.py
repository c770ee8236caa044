"""A network of the user and the update of one of its training steps, as plain PyTorch code makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.metrics import match, psnr

SHAPE, MEAN, STD, LABEL = (1, 12, 12), 0.5, 0.25, 2

FACTORY = """
import torch
from torch import nn

def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(432, 4))
"""


def network() -> nn.Module:
    scope: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        exec(FACTORY, scope)
        module: nn.Module = scope["network"]()
    return module


def gradient(module: nn.Module, x: Tensor, labels: list[int]) -> dict[str, Tensor]:
    """As anybody's training script has it after `backward`."""
    module.zero_grad()
    F.cross_entropy(module((x - MEAN) / STD), torch.tensor(labels)).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def quality(rebuilt: gv.captured.Rebuilt, x: Tensor) -> float:  # type: ignore[name-defined]
    images = rebuilt.by_attack[rebuilt.best].images
    return float(psnr(x, images[match(x, images)]).min())


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(UserError) as told:
        work()
    assert "\n" not in str(told.value)
    return str(told.value)


KNOWN: dict[str, Any] = {"input_shape": SHAPE, "mean": [MEAN], "std": [STD]}
