"""LPIPS (Zhang et al. 2018), version 0.1: weighted distance between the features of an ImageNet network.

Both images pass through AlexNet (or VGG16) in [−1, 1]. After five of its layers the features are scaled to unit length
over channels; the squared differences are weighted by a learned head, averaged over the image and summed over layers.
The weights are read from `$GRADVEIL_DATA/lpips`. Without them the value is None.
"""

import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.types import Tensors
from gradveil.metrics.pixel import pair
from gradveil.metrics.registry import metric
from gradveil.storage.tensor_file import read_tensors

Net = Literal["alex", "vgg"]

SMALLEST = 64  # pixels: the strides of AlexNet reduce a 28-pixel image to nothing
CHUNK = 64  # pairs at a time, to bound memory
EPSILON = 1e-10

# Mean and standard deviation of ImageNet for pixels in [−1, 1].
SHIFT = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
SCALE = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)


class Stage(NamedTuple):
    """The layers between two taps: a max-pool of width `pool` (stride 2) if set, then convolutions with a ReLU each."""

    convolutions: tuple[int, ...]  # their numbers in `features` of the network
    pool: int | None = None
    stride: int = 1
    padding: int = 1


class FeatureNetwork(NamedTuple):
    trunk: str
    head: str
    stages: tuple[Stage, ...]


_ALEX = (Stage((0,), None, 4, 2), Stage((3,), 3, 1, 2), Stage((6,), 3), Stage((8,)), Stage((10,)))
_VGG = (Stage((0, 2)), Stage((5, 7), 2), Stage((10, 12, 14), 2), Stage((17, 19, 21), 2), Stage((24, 26, 28), 2))
NETWORKS: dict[Net, FeatureNetwork] = {
    "alex": FeatureNetwork("alexnet_features_imagenet.safetensors", "lpips_v0.1_lin_alex.safetensors", _ALEX),
    "vgg": FeatureNetwork("vgg16_features_imagenet_fp16.safetensors", "lpips_v0.1_lin_vgg.safetensors", _VGG),
}


def lpips_size(height: int, width: int) -> tuple[int, int]:
    """The size at which images are compared; small images are enlarged so that the short side has 64 pixels.

    Args: height, width: of the images.
    """
    grow = max(1.0, SMALLEST / min(height, width))
    return round(height * grow), round(width * grow)


@torch.no_grad()
@metric("lpips")
def lpips(truth: Tensor, reconstruction: Tensor, net: Net = "alex") -> Tensor | None:
    """Perceptual distance per image (n), 0 for an exact match; None without weights, or if neither grey nor RGB.

    Args:
        truth, reconstruction: images n × C × H × W in [0, 1].
        net: `alex` or `vgg`.
    """
    x, y = pair(truth, reconstruction)
    files = _files(net)
    if files is None or x.shape[1] not in (1, 3):
        return None
    weights = {name: w.to(x.device) for name, w in _load(*files).items()}
    chunks = zip(x.float().split(CHUNK), y.float().split(CHUNK), strict=True)
    return torch.cat([_distance(imagenet_input(a), imagenet_input(b), NETWORKS[net], weights) for a, b in chunks]).double()


def _files(net: Net) -> tuple[Path, Path] | None:
    root = os.environ.get("GRADVEIL_DATA")
    if not root:
        return None
    trunk, head = (Path(root) / "lpips" / name for name in NETWORKS[net][:2])
    return (trunk, head) if trunk.is_file() and head.is_file() else None


@lru_cache(maxsize=2)
def _load(trunk: Path, head: Path) -> Tensors:
    return {name: tensor.float() for path in (trunk, head) for name, tensor in read_tensors(path).items()}


def imagenet_input(images: Tensor) -> Tensor:
    """Grey to three channels, small images to 64 pixels, [0, 1] to [−1, 1], then the normalization of ImageNet."""
    images = images.expand(-1, 3, -1, -1)
    size = lpips_size(*images.shape[-2:])
    if size != tuple(images.shape[-2:]):
        images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return (2 * images - 1 - SHIFT.to(images)) / SCALE.to(images)


def trunk_outputs(x: Tensor, network: FeatureNetwork, weights: Tensors) -> Iterator[Tensor]:
    """The outputs of all convolutions of a network, in order, before their ReLU."""
    for stage in network.stages:
        if stage.pool:
            x = F.max_pool2d(x, stage.pool, stride=2)
        for place in stage.convolutions:
            kernel, bias = (weights[f"features.{place}.{part}"].to(x) for part in ("weight", "bias"))
            x = F.conv2d(x, kernel, bias, stride=stage.stride, padding=stage.padding)
            yield x
            x = x.relu()


def _distance(x: Tensor, y: Tensor, network: FeatureNetwork, weights: Tensors) -> Tensor:
    total = x.new_zeros(len(x))
    outputs = trunk_outputs(torch.cat([x, y]), network, weights)
    for tap, stage in enumerate(network.stages):
        *_, last = islice(outputs, len(stage.convolutions))
        features = last.relu()
        a, b = (features / (features.norm(dim=1, keepdim=True) + EPSILON)).chunk(2)
        total += ((a - b).square() * weights[f"lin{tap}.weight"]).sum(dim=1).mean(dim=(1, 2))
    return total
