"""Fully connected networks: two of PRECODE, and the one on which Balunović et al. break PRECODE."""

from typing import ClassVar

from torch import nn

from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network, classifier_on


@MODELS.register("smlp")
@settings
class SMLP(Network):
    """The shallow network of PRECODE: two hidden layers of 1,024 ReLU units.

    Example: gradveil audit --model smlp
    """

    hidden: ClassVar[tuple[int, ...]] = (1024,) * 2  # widths of the hidden layers

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        return classifier_on({}, input_shape, num_classes, hidden=self.hidden, name=self.name)


@MODELS.register("dmlp")
@settings
class DMLP(SMLP):
    """The deep network of PRECODE: four hidden layers of 1,024 ReLU units.

    Example: gradveil audit --model dmlp
    """

    hidden = (1024,) * 4


@MODELS.register("ffn")
@settings
class FFN(SMLP):
    """Balunović et al. 2022: hidden layers of 500 (five), 256 and 500 units, without the bottleneck of PRECODE.

    Example: gradveil audit --model ffn
    """

    hidden = (*(500,) * 5, 256, 500)
