"""The base of the registered networks: settings that build a module for an image shape and a number of classes.

Attacks and defenses rely on these properties of every network: no in-place activation, every layer with parameters
called once per pass, parameters only in linear, convolution and norm layers, and a linear classifier `fc` at the
end. The exception is `vit`, with its positions, class token and attention.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import nn

from gradveil.core.errors import UserError, shape_text
from gradveil.core.settings import Registry
from gradveil.core.types import Shape


class Network(ABC):
    """Base of the registered networks. Weights come from the global stream of torch, which `models.build` seeds."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        """A module that maps images n × C × H × W to scores n × classes."""


MODELS: Registry[Network] = Registry("model", package="gradveil.models")


def classifier_on(
    layers: Mapping[str, nn.Module], input_shape: Shape, num_classes: int, *, hidden: Sequence[int] = (), name: str
) -> nn.Sequential:
    """The layers, flattened, then hidden ReLU layers `fc1`, `fc2` … of these widths, and the classifier `fc`."""
    features = nn.Sequential(OrderedDict(layers, flatten=nn.Flatten()))
    with torch.no_grad():
        try:
            width = features.eval()(torch.zeros(1, *input_shape)).shape[1]
        except RuntimeError:  # a kernel or a pooling window is larger than the feature map
            width = 0
    if not width:
        raise UserError(f"images of {shape_text(input_shape)} are too small for the model '{name}'.")
    head: dict[str, nn.Module] = {}
    for i, units in enumerate(hidden, start=1):
        head[f"fc{i}"] = nn.Linear(width, units)
        head[f"fc{i}_relu"] = nn.ReLU()
        width = units
    head["fc"] = nn.Linear(width, num_classes)
    return nn.Sequential(OrderedDict([*features.named_children(), *head.items()])).train()


def kaiming_(module: nn.Module, *kinds: type[nn.Conv2d | nn.Linear], mode: Literal["fan_in", "fan_out"] = "fan_in") -> None:
    """He et al. 2015, for layers of these kinds: normal weights scaled for ReLU, biases zero."""
    for layer in module.modules():
        if isinstance(layer, kinds):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
