"""The ConvNet of Geiping et al. 2020 (inversefed), which Soteria, ATS and DCS2 use too."""

from pydantic import Field
from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on


@MODELS.register("convnet")
@settings
class ConvNet(Network):
    """Eight 3×3 convolutions with batch norm, as in inversefed, Soteria, ATS and DCS2.

    The paper has nine convolutions; the published code lists one of them twice under the same name.

    Args: width: channels of the first convolution; 64 in inversefed, Soteria and ATS, 32 in DCS2.
    Example: gradveil audit --model convnet:width=32
    """

    width: int = Field(default=64, ge=1)

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        layers: dict[str, nn.Module] = {}
        channels = input_shape[0]
        for i, factor in enumerate((1, 2, 2, 4, 4, 4, 4, 4), start=1):
            layers[f"conv{i}"] = nn.Conv2d(channels, factor * self.width, 3, padding=1)
            layers[f"bn{i}"] = nn.BatchNorm2d(factor * self.width)
            layers[f"relu{i}"] = nn.ReLU()
            if i in (6, 8):
                layers[f"pool{i}"] = nn.MaxPool2d(3)
            channels = factor * self.width
        return classifier_on(layers, input_shape, num_classes, name=self.name)
