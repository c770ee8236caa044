"""VGG-16 (Simonyan and Zisserman 2015) in its CIFAR form: batch norm, and one linear layer in place of three."""

from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


@MODELS.register("vgg16")
@settings
class VGG16(Network):
    """Thirteen 3×3 convolutions with batch norm in five stages; needs images of at least 32 pixels.

    Example: gradveil audit --model vgg16
    """

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        layers: dict[str, nn.Module] = {}
        channels = input_shape[0]
        for stage, (width, count) in enumerate(STAGES, start=1):
            for i in range(1, count + 1):
                layers[f"conv{stage}_{i}"] = nn.Conv2d(channels, width, 3, padding=1)
                layers[f"bn{stage}_{i}"] = nn.BatchNorm2d(width)
                layers[f"relu{stage}_{i}"] = nn.ReLU()
                channels = width
            layers[f"pool{stage}"] = nn.MaxPool2d(2)
        layers["average"] = nn.AdaptiveAvgPool2d(1)
        return classifier_on(layers, input_shape, num_classes, name=self.name)
