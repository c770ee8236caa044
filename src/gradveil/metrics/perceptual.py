"""LPIPS (Zhang et al. 2018), version 0.1: weighted distance between the features of an ImageNet network.

Both images go through AlexNet (or VGG16) in [−1, 1]; after five of its layers the features are scaled to unit length
over channels, and the squared differences weighted by a learned head, averaged over the image and summed over layers.
The weights are read from `$GRADVEIL_DATA/lpips`; without them the value is None, never a guess.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.types import Tensors
from gradveil.metrics.pixel import pair
from gradveil.metrics.registry import metric

Net = Literal["alex", "vgg"]

SMALLEST = 64  # AlexNet's strides leave nothing of a 28-pixel image
CHUNK = 64  # pairs at a time, to bound memory
EPSILON = 1e-10

# ImageNet mean and deviation, as they are after pixels were moved to [−1, 1].
SHIFT = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
SCALE = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)


class Stage(NamedTuple):
    """Layers up to a tap: perhaps a max-pool of this width (stride 2), then convolutions each with a ReLU."""

    convolutions: tuple[int, ...]  # their places in the network's `features`
    pool: int | None = None
    stride: int = 1
    padding: int = 1


class Network(NamedTuple):
    trunk: str
    head: str
    stages: tuple[Stage, ...]


NETWORKS: dict[Net, Network] = {
    "alex": Network(
        "alexnet_features_imagenet.safetensors",
        "lpips_v0.1_lin_alex.safetensors",
        (
            Stage((0,), stride=4, padding=2),
            Stage((3,), pool=3, padding=2),
            Stage((6,), pool=3),
            Stage((8,)),
            Stage((10,)),
        ),
    ),
    "vgg": Network(
        "vgg16_features_imagenet_fp16.safetensors",
        "lpips_v0.1_lin_vgg.safetensors",
        (
            Stage((0, 2)),
            Stage((5, 7), pool=2),
            Stage((10, 12, 14), pool=2),
            Stage((17, 19, 21), pool=2),
            Stage((24, 26, 28), pool=2),
        ),
    ),
}


def lpips_available(net: Net = "alex") -> bool:
    """Are the weights on hand?"""
    return _files(net) is not None


def lpips_size(height: int, width: int) -> tuple[int, int]:
    """The size at which images are compared: their own, or enlarged so that the short side has 64 pixels."""
    grow = max(1.0, SMALLEST / min(height, width))
    return round(height * grow), round(width * grow)


@torch.no_grad()
@metric("lpips")
def lpips(truth: Tensor, reconstruction: Tensor, net: Net = "alex") -> Tensor | None:
    """Perceptual distance of each image (n), 0 for an exact match; None without weights, or if neither grey nor RGB."""
    x, y = pair(truth, reconstruction)
    files = _files(net)
    if files is None or x.shape[1] not in (1, 3):
        return None
    weights = {name: w.to(x.device) for name, w in _load(*files).items()}
    chunks = zip(x.float().split(CHUNK), y.float().split(CHUNK), strict=True)
    return torch.cat([_distance(_prepare(a), _prepare(b), NETWORKS[net], weights) for a, b in chunks]).double()


def _files(net: Net) -> tuple[Path, Path] | None:
    root = os.environ.get("GRADVEIL_DATA")
    if not root:
        return None
    trunk, head = (Path(root) / "lpips" / name for name in NETWORKS[net][:2])
    return (trunk, head) if trunk.is_file() and head.is_file() else None


@lru_cache(maxsize=2)
def _load(trunk: Path, head: Path) -> Tensors:
    try:
        return {name: tensor.float() for path in (trunk, head) for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise UserError(f"the LPIPS weights in {trunk.parent} cannot be read: {error}.") from None


def _prepare(images: Tensor) -> Tensor:
    """Grey to three channels, small to 64 pixels, [0, 1] to [−1, 1], then ImageNet's normalisation."""
    images = images.expand(-1, 3, -1, -1)
    size = lpips_size(*images.shape[-2:])
    if size != tuple(images.shape[-2:]):
        images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return (2 * images - 1 - SHIFT.to(images.device)) / SCALE.to(images.device)


def _distance(x: Tensor, y: Tensor, network: Network, weights: Tensors) -> Tensor:
    total = x.new_zeros(len(x))
    both = torch.cat([x, y])
    for tap, stage in enumerate(network.stages):
        if stage.pool:
            both = F.max_pool2d(both, stage.pool, stride=2)
        for place in stage.convolutions:
            kernel, bias = weights[f"features.{place}.weight"], weights[f"features.{place}.bias"]
            both = F.conv2d(both, kernel, bias, stride=stage.stride, padding=stage.padding).relu()
        unit = both / (both.norm(dim=1, keepdim=True) + EPSILON)
        a, b = unit.chunk(2)
        total += ((a - b).square() * weights[f"lin{tap}.weight"]).sum(dim=1).mean(dim=(1, 2))
    return total
