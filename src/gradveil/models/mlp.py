"""Fully connected networks: PRECODE's two, and the one on which Balunović et al. break PRECODE."""

from __future__ import annotations

from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on


@MODELS.register("smlp")
@settings
class SMLP(Network):
    """PRECODE's shallow network: two hidden layers of 1,024 ReLU."""

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        return classifier_on({}, input_shape, num_classes, hidden=[1024] * 2, name=self.name)


@MODELS.register("dmlp")
@settings
class DMLP(Network):
    """PRECODE's deep network: four hidden layers of 1,024 ReLU."""

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        return classifier_on({}, input_shape, num_classes, hidden=[1024] * 4, name=self.name)


@MODELS.register("ffn")
@settings
class FFN(Network):
    """Balunović et al. 2022: five layers of 500, one of 256, one of 500; PRECODE's bottleneck is not part of it."""

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        return classifier_on({}, input_shape, num_classes, hidden=[*[500] * 5, 256, 500], name=self.name)
