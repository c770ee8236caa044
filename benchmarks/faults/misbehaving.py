"""Defenses that misbehave, each in one way; in a file of its own, because Ray's actors import it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense
from gradveil.defenses.base import Step

ANSWER = 0.5  # every entry of an answer that may leave; no training gives such an update
HANG = 600  # seconds: far beyond every deadline


class Hostile(Tensor):
    """Says that everything is in order, and shows other values than it holds."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return torch.tensor(True)

    def detach(self) -> Tensor:
        return torch.zeros(3)

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("no")


def answers(tensors: Tensors) -> Tensors:
    return {name: torch.full_like(t, ANSWER) for name, t in tensors.items()}


def in_place(tensors: Tensors) -> Tensors:
    for tensor in tensors.values():
        tensor.fill_(ANSWER)
    return tensors


def raising(error: BaseException) -> Callable[[Tensors, Step], object]:
    def act(tensors: Tensors, step: Step) -> object:
        raise error

    return act


def quoting(tensors: Tensors, step: Step) -> object:
    raise ValueError(f"the first values are {next(iter(tensors.values())).flatten()[:3].tolist()}")


def emptied(tensors: Tensors, step: Step) -> object:
    """Spoils its input, then returns nothing: what it was handed must not leave in the answer's place."""
    in_place(tensors)
    return {}


def slow(tensors: Tensors, step: Step) -> object:
    for _ in range(10 * HANG):
        time.sleep(0.1)
    return tensors


def swapped(tensors: Tensors) -> Tensors:
    return {name: torch.zeros(*t.shape, 2)[..., 0].fill_(ANSWER) for name, t in tensors.items()}


FAULTS: dict[str, Callable[[Tensors, Step], object]] = {
    "raises an error": raising(RuntimeError("out of\nmemory")),
    "raises an error that quotes the gradient": quoting,
    "raises a BaseException": raising(GeneratorExit()),
    "calls sys.exit": lambda t, step: sys.exit(1),
    "hangs": slow,
    "returns None": lambda t, step: None,
    "returns {}": lambda t, step: {},
    "changes its input and returns {}": emptied,
    "returns a generator": lambda t, step: (pair for pair in t.items()),
    "returns lists": lambda t, step: {n: v.tolist() for n, v in t.items()},
    "leaves one tensor out": lambda t, step: dict(list(answers(t).items())[1:]),
    "adds a tensor": lambda t, step: {**answers(t), "more": torch.zeros(3)},
    "returns another client's tensors (other names)": lambda t, step: {f"other.{n}": v for n, v in answers(t).items()},
    "returns another client's tensors (other shapes)": lambda t, step: {n: torch.zeros(7, 7) for n in t},
    "returns one more dimension": lambda t, step: {n: v[None] for n, v in answers(t).items()},
    "returns NaN": lambda t, step: {n: v * math.nan for n, v in t.items()},
    "returns infinity": lambda t, step: {n: v + math.inf for n, v in t.items()},
    "returns 1e300": lambda t, step: {n: torch.full_like(v, 1e300, dtype=torch.double) for n, v in t.items()},
    "returns complex numbers": lambda t, step: {n: v.to(torch.complex64) for n, v in t.items()},
    "returns whole numbers": lambda t, step: {n: (v * 100).long() for n, v in t.items()},
    "returns sparse tensors": lambda t, step: {n: v.to_sparse() for n, v in t.items()},
    "returns tensors without values (meta)": lambda t, step: {n: v.to("meta") for n, v in t.items()},
    "returns a hostile subclass of Tensor": lambda t, step: {n: v.as_subclass(Hostile) for n, v in t.items()},
    "answers in half precision": lambda t, step: {n: v.half() for n, v in answers(t).items()},
    "answers in place": lambda t, step: in_place(t),
    "answers with tensors that are not contiguous": lambda t, step: swapped(t),
    "answers with tensors that require gradients": lambda t, step: {n: v.requires_grad_() for n, v in answers(t).items()},
    "answers with views of the weights": lambda t, step: {n: step.state[n].view_as(v) for n, v in t.items()},
}


@settings
class Misbehaving(Defense):
    """One fault, or one per call where `folder` counts the calls."""

    faults: tuple[str, ...]
    folder: str = ""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        turn = 0
        if self.folder:
            turn = len(list(Path(self.folder).iterdir()))
            (Path(self.folder) / str(turn)).touch()
        return FAULTS[self.faults[turn]](tensors, step)  # type: ignore[return-value]
