"""Residual networks (He et al. 2016), with 1×1 convolutions as shortcuts: in their CIFAR form, or with ImageNet's stem."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on, kaiming_

Norm = Literal["batch", "group"]
Stem = Literal["cifar", "imagenet"]


def _norm(norm: Norm, channels: int) -> nn.Module:
    """A normalization of so many channels; groups of two channels, which stay two groups or more on narrow networks."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(max(1, channels // 2), channels)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = _norm(norm, after)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = _norm(norm, after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), _norm(norm, after))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        result: Tensor = self.relu2(self.bn2(self.conv2(out)) + self.shortcut(x))
        return result


@MODELS.register("resnet18")
@settings
class ResNet18(Network):
    """Four stages of two blocks, as in LODA and GGL.

    Every stage but the first doubles the width and halves the side; then average over the image, and the classifier.

    Args:
        width: channels of the first stage.
        norm: batch, or group (Hsieh et al. 2020, for clients whose data differ).
        stem: cifar, a 3×3 convolution; imagenet, 7×7 with stride 2 and pooling, as in torchvision, for images of 224 pixels.
    Example: gradveil audit --model resnet18:width=8,norm=group
    """

    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    width: int = Field(default=64, ge=1)
    norm: Norm = "batch"
    stem: Stem = "cifar"

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        side, stride = (3, 1) if self.stem == "cifar" else (7, 2)
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(input_shape[0], self.width, side, stride=stride, padding=side // 2, bias=False),
            "bn1": _norm(self.norm, self.width),
            "relu": nn.ReLU(),
        }
        if self.stem == "imagenet":
            layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
        before = self.width
        for stage, count in enumerate(self.blocks):
            after = self.width * 2**stage
            first = BasicBlock(before, after, 2 if stage else 1, self.norm)
            parts = [first, *(BasicBlock(after, after, 1, self.norm) for _ in range(count - 1))]
            layers[f"layer{stage + 1}"] = nn.Sequential(*parts)
            before = after
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        model = classifier_on(layers, input_shape, num_classes, name=self.name)
        kaiming_(model, nn.Conv2d, mode="fan_out")
        return model


@MODELS.register("resnet34")
@settings
class ResNet34(ResNet18):
    """Four stages of 3, 4, 6 and 3 blocks.

    Args:
        width: channels of the first stage.
        norm: batch, or group.
        stem: cifar or imagenet.
    Example: gradveil audit --model resnet34:width=8
    """

    blocks = (3, 4, 6, 3)


@MODELS.register("resnet20")
@settings
class ResNet20(ResNet18):
    """Three stages of three blocks.

    Args:
        width: channels of the first stage. He et al.: 16.
        norm: batch, or group.
        stem: cifar or imagenet.
    Example: gradveil audit --model resnet20:width=8
    """

    blocks = (3, 3, 3)
    width: int = Field(default=16, ge=1)


@MODELS.register("resnet20-4")
@settings
class ResNet20x4(ResNet20):
    """ResNet20 with four times the width; ATS calls it ResNet20.

    Args:
        width: channels of the first stage.
        norm: batch, or group.
        stem: cifar or imagenet.
    Example: gradveil audit --model resnet20-4:width=8
    """

    width: int = Field(default=64, ge=1)
