"""The sigmoid networks of deep leakage: three (or four) 5×5 convolutions of 12 channels and one linear layer.

Zhu et al. 2019 (DLG) introduce it and draw every weight and bias from U(−0.5, 0.5), which makes gradients easy to
invert. iDLG, DCS2 (MNIST) and PRECODE use it too. The DLG test of Soteria and CPL add a fourth convolution.
"""

from typing import ClassVar, Literal

from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on

WIDTH = 12


@MODELS.register("lenet")
@settings
class LeNet(Network):
    """Three sigmoid convolutions of 12 channels, as in DLG and iDLG; the easiest to attack.

    Args: init: `published` draws from U(−0.5, 0.5), `default` is the initialization of torch.
    Example: gradveil audit --model lenet:init=default
    """

    strides: ClassVar[tuple[int, ...]] = (2, 2, 1)
    init: Literal["published", "default"] = "published"

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


@MODELS.register("lenet4")
@settings
class LeNet4(LeNet):
    """LeNet with a fourth convolution, as in CPL and in the DLG test of Soteria.

    Args: init: as for `lenet`.
    Example: gradveil audit --model lenet4
    """

    strides = (2, 2, 1, 1)
