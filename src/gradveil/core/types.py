"""The vocabulary: the private images of a client, what it does with them in a round, and what it sends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Shape = tuple[int, int, int]  # channels, height, width
Level = Literal["realistic", "paper", "upper-bound"]
Kind = Literal["gradient", "delta"]
Mode = Literal["train", "eval"]
BatchSampling = Literal["shuffled", "poisson"]  # how a client draws the mini-batches of its local training


_WIDER = {torch.bool: torch.uint8, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.float64}


def widened(tensor: Tensor) -> Tensor:
    """The same values in a kind of number that torch can compute with: it can store more kinds than that."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.float()
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def hard_labels(labels: Tensor, *, soft_ndim: int = 2) -> Tensor:
    """Class numbers; of soft labels (tensors of `soft_ndim` dimensions, the last over classes) the largest class."""
    return labels.argmax(-1) if labels.ndim == soft_ndim else labels


@dataclass(frozen=True)
class Batch:
    """Private images (n × C × H × W, in [0, 1]) and labels (n class numbers, or n × classes when soft).

    Where the loss takes no classes, a label is the row of numbers that is the image's target.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 4 or len(self.x) != len(self.y):
            raise ValueError(f"images are {tuple(self.x.shape)}, labels {tuple(self.y.shape)}")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: slice | Tensor | list[int]) -> Batch:
        return Batch(self.x[index], self.y[index])

    @property
    def hard_labels(self) -> Tensor:
        """Class numbers; of soft labels the largest."""
        return hard_labels(self.y)

    @property
    def image_shape(self) -> Shape:
        channels, height, width = self.x.shape[1:]
        return channels, height, width


class Noise(NamedTuple):
    """Noise that a defense adds to every entry of an update, as its settings say."""

    std: float
    law: Literal["gaussian", "laplace"] = "gaussian"
    relative: bool = False  # `std` is a share of the root mean square of the update's entries before the noise


@dataclass(frozen=True)
class Update:
    """What leaves the client: named tensors (a gradient, or weights after minus before), and how many examples.

    As the client sends it, `tensors` may hold anything. As attacks get it, `tensors` are those of the model's trained
    parameters, and everything else is in `others`.
    """

    tensors: Tensors
    kind: Kind = "gradient"
    examples: int = 1
    others: Tensors = field(default_factory=dict)  # sent too; of any name, shape and kind of number

    def __len__(self) -> int:
        return len(self.tensors)

    def received(self, parameters: Tensors) -> Update:
        """A copy as attacks get it, with tensors in the order of `parameters`, those of the model."""
        sent = {name: t.detach().clone() for name, t in {**self.tensors, **self.others}.items()}
        for name, like in parameters.items():
            if name not in sent:
                raise ValueError(f"the update has no tensor for the parameter '{name}'")
            if sent[name].shape != like.shape:
                shapes = f"{tuple(sent[name].shape)}, the model's is {tuple(like.shape)}"
                raise ValueError(f"the update's tensor for the parameter '{name}' is {shapes}")
        return replace(self, tensors={name: widened(sent.pop(name)) for name in parameters}, others=sent)
