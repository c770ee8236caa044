"""Replies that a server must not add up: clients that failed, and updates that are broken or absurd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from gradveil.core.types import Tensors, Update

ABSURD = 1e6  # times the median norm of the others


@dataclass(frozen=True)
class Reply:
    """What a client answers in a round: its update, and the buffers that its training changed."""

    client: int
    update: Update
    buffers: Tensors = field(default_factory=dict)
    cosine: float | None = None  # between what was sent and the undefended update, where it was measured

    def sent(self) -> Tensors:
        return {**self.update.tensors, **self.buffers}


@dataclass(frozen=True)
class Failure:
    """A client that has no answer, and why."""

    client: int
    what: str


def too_late(limit: float) -> str:
    return f"took more than the {limit:g} s it had"


def screen(
    replies: Sequence[Reply | Failure], parameters: Tensors, buffers: Tensors
) -> tuple[list[Reply], list[Failure]]:
    """The replies that can be added up, in the order of clients, and for each other one what is wrong with it."""
    sound: list[Reply] = []
    failures: list[Failure] = []
    for reply in sorted(replies, key=lambda r: r.client):
        if isinstance(reply, Failure):
            failures.append(reply)
        elif fault := _fault(reply, parameters, buffers):
            failures.append(Failure(reply.client, fault))
        else:
            sound.append(reply)
    norms = [_norm(s.update.tensors) for s in sound]
    kept = []
    for i, one in enumerate(sound):
        others = norms[:i] + norms[i + 1 :]
        usual = median(others) if others else 0.0
        if usual > 0 and norms[i] > ABSURD * usual:
            what = f"sent an update of norm {norms[i]:.3g}; the others' median is {usual:.3g}"
            failures.append(Failure(one.client, what))
        else:
            kept.append(one)
    return kept, sorted(failures, key=lambda f: f.client)


def _fault(reply: Reply, parameters: Tensors, buffers: Tensors) -> str | None:
    tensors = reply.update.tensors
    if wrong := set(tensors) ^ set(parameters):
        return f"sent wrong tensors: '{min(wrong)}' is {'missing' if min(wrong) in parameters else 'not in the model'}"
    if wrong := set(reply.buffers) - set(buffers):
        return f"sent wrong tensors: '{min(wrong)}' is no statistic of the model"
    for name, value in reply.sent().items():
        expected = parameters[name] if name in parameters else buffers[name]
        if value.shape != expected.shape:
            return f"sent '{name}' as {_shape(value)}; the model's is {_shape(expected)}"
        if not bool(torch.isfinite(value).all()):
            return f"sent values that are not finite in '{name}'"
    if reply.update.examples < 1:
        return f"claims {reply.update.examples} examples"
    return None


def _shape(value: torch.Tensor) -> str:
    return "×".join(map(str, value.shape)) or "a single number"


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors.values()))
