"""Odd defenses, each with the truth about what it sends.

`decodable`: who knows the code, and not what was drawn in secret, can compute an image of the victim from the update, at
least for a share of the victims. `nothing`: the update does not depend on the image. `undecided`: neither is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.core.hashing import digest
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Setup, Step

Truth = Literal["decodable", "nothing", "undecided"]
Act = Callable[[Tensors, Step], Tensors]
SIZE = 0.01  # of noise where no gradient is sent


@dataclass(frozen=True)
class Entry:
    """What one defense sends in place of the gradient."""

    act: Act
    truth: Truth
    does: str
    random: bool
    counters: tuple[str, ...]


ENTRIES: dict[str, Entry] = {}


@dataclass
class Memory:
    """What a client of any of these defenses keeps between its updates."""

    calls: int = 0
    public: Batch | None = None
    before: Tensors | None = None  # the gradient of the previous call


class Odd(Defense):
    """The defense of that name in the catalogue."""

    def __init__(self, name: str):
        self.name, self.random, self.counters = name, ENTRIES[name].random, ENTRIES[name].counters

    def prepare(self, setup: Setup) -> Memory:
        return Memory(public=setup.public)

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        step.memory.calls += 1
        return ENTRIES[self.name].act(tensors, step)


def odd(truth: Truth, *, random: bool = False, counters: Sequence[str] = ()) -> Callable[[Act], Act]:
    """Put a function into the catalogue; its docstring says what it does."""

    def enter(act: Act) -> Act:
        does = " ".join((act.__doc__ or "").split()).removesuffix(".")
        ENTRIES[act.__name__.replace("_", "-")] = Entry(act, truth, does, random, tuple(counters))
        return act

    return enter


def small_network(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A convolution and a linear layer: an audit of it takes a tenth of the time that LeNet takes."""
    channels, height, width = input_shape
    layers = [nn.Conv2d(channels, 6, 5, stride=2, padding=2), nn.Sigmoid(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6 * (-(-height // 2)) * (-(-width // 2)), num_classes))


# -- parts -------------------------------------------------------------------------------------------------------------


def noise(tensors: Tensors, step: Step) -> Tensors:
    """Noise in place of every tensor."""
    return {name: SIZE * step.rng.normal(t.shape) for name, t in tensors.items()}


def largest(tensors: Tensors) -> list[str]:
    """The names of the tensors, those with the most entries first."""
    return sorted(tensors, key=lambda name: -tensors[name].numel())


def put(tensors: Tensors, name: str, values: Tensor, offset: int = 0) -> Tensors:
    """The same tensors with values written into one of them, as many as it takes."""
    flat = tensors[name].detach().flatten().clone()
    values = values.flatten()[: len(flat) - offset].to(flat)
    flat[offset : offset + len(values)] = values
    return {**tensors, name: flat.view_as(tensors[name])}


def hidden(tensors: Tensors, step: Step, values: Tensor, offset: int = 0) -> Tensors:
    """Noise, with values in the largest tensor."""
    return put(noise(tensors, step), largest(tensors)[0], values, offset)


def with_low_bits(tensors: Tensors, step: Step, bits: int, values: Tensor) -> Tensors:
    """Noise whose lowest bits in the largest tensor are these whole numbers."""
    sent, host = noise(tensors, step), largest(tensors)[0]
    words = sent[host].flatten()[: len(values)].view(torch.int32)
    return put(sent, host, (words >> bits << bits | values[: len(words)]).view(torch.float32))


def image(step: Step) -> Tensor:
    """The first image of the batch."""
    return step.batch.x[0].detach()


def entries(step: Step) -> Tensor:
    """The pixels of the image as whole numbers from 0 to 255."""
    return (image(step) * 255).round().int().flatten()


def fixed(shape: Sequence[int], name: str) -> Tensor:
    """Standard normal numbers that stand in the code."""
    return torch.randn(tuple(shape), generator=generator("odd", name))


def public_key(step: Step) -> torch.Generator:
    """A stream that everybody computes who has the model."""
    return torch.Generator().manual_seed(int(digest("", step.state)[:12], 16))


def each(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    return {name: change(t) for name, t in tensors.items()}
