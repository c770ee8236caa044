"""The sigmoid networks of deep leakage: three (or four) 5×5 convolutions of 12 channels and one linear layer.

Zhu et al. 2019 (DLG) bring it in and draw every weight and bias from U(−0.5, 0.5), which makes gradients easy to
invert; iDLG, DCS2 (MNIST) and PRECODE take it over. Soteria's DLG test and CPL add a fourth convolution.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on

WIDTH = 12


class _LeNet(Network):
    strides: ClassVar[tuple[int, ...]]
    init: Literal["published", "default"]

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        layers: dict[str, nn.Module] = {}
        channels = input_shape[0]
        for i, stride in enumerate(self.strides, start=1):
            layers[f"conv{i}"] = nn.Conv2d(channels, WIDTH, 5, stride=stride, padding=2)
            layers[f"act{i}"] = nn.Sigmoid()
            channels = WIDTH
        model = classifier_on(layers, input_shape, num_classes, name=self.name)
        if self.init == "published":
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5)
        return model


@MODELS.register("lenet")
@settings
class LeNet(_LeNet):
    """Three sigmoid convolutions of 12 channels, as in DLG and iDLG; the easiest to attack."""

    strides: ClassVar[tuple[int, ...]] = (2, 2, 1)
    init: Literal["published", "default"] = "published"  # published: U(−0.5, 0.5); default: torch's own


@MODELS.register("lenet4")
@settings
class LeNet4(_LeNet):
    """LeNet with a fourth convolution, as in Soteria's DLG test and CPL."""

    strides: ClassVar[tuple[int, ...]] = (2, 2, 1, 1)
    init: Literal["published", "default"] = "published"
