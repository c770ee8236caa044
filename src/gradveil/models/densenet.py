"""DenseNet-121 (Huang et al. 2017) in its CIFAR form: a 3×3 stem without pooling, growth 32, compression one half."""

import torch
from torch import Tensor, nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on, kaiming_

BLOCKS = (6, 12, 24, 16)
GROWTH = 32


class DenseLayer(nn.Module):
    """Appends `GROWTH` channels, computed from all earlier channels by a 1×1 and a 3×3 convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, 4 * GROWTH, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * GROWTH)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.relu2(self.bn2(self.conv1(self.relu1(self.bn1(x))))))
        return torch.cat([x, new], dim=1)


@MODELS.register("densenet121")
@settings
class DenseNet121(Network):
    """Four dense blocks of 6, 12, 24 and 16 layers with batch norm; needs images of at least 8 pixels.

    Example: gradveil audit --model densenet121
    """

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        channels = 2 * GROWTH
        layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(input_shape[0], channels, 3, padding=1, bias=False)}
        for i, count in enumerate(BLOCKS, start=1):
            layers[f"block{i}"] = nn.Sequential(*(DenseLayer(channels + n * GROWTH) for n in range(count)))
            channels += count * GROWTH
            layers[f"bn{i}"] = nn.BatchNorm2d(channels)
            layers[f"relu{i}"] = nn.ReLU()
            if i < len(BLOCKS):  # transition: half the channels, half the side
                layers[f"shrink{i}"] = nn.Conv2d(channels, channels // 2, 1, bias=False)
                layers[f"pool{i}"] = nn.AvgPool2d(2)
                channels //= 2
        layers["average"] = nn.AdaptiveAvgPool2d(1)
        model = classifier_on(layers, input_shape, num_classes, name=self.name)
        kaiming_(model, nn.Conv2d)
        return model
