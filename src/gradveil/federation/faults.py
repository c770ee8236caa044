"""Replies that a server must not average: clients that failed, and updates that are broken or absurdly large."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

from gradveil.core.errors import one_line, shape_text
from gradveil.core.types import Tensors, Update

ABSURD = 1e6  # times the median norm of the other updates


@dataclass(frozen=True)
class Reply:
    """What a client sends in one round: its update, and the buffers that its training changed."""

    client: int
    update: Update
    buffers: Tensors = field(default_factory=dict)
    cosine: float | None = None  # between the update and the undefended one, where it was measured

    def sent(self) -> Tensors:
        return {**self.update.tensors, **self.buffers}


@dataclass(frozen=True)
class Failure:
    """A client that sends nothing usable in one round, and the reason."""

    client: int
    reason: str


def raised(error: BaseException) -> str:
    """The reason of a client whose code raised an exception."""
    return f"raised {type(error).__name__}: {one_line(error)}"


def too_late(limit: float) -> str:
    """The reason of a client that exceeded its time limit in seconds."""
    return f"took more than the {limit:g} s it had"


class OutOfTime(BaseException):
    """Not an Exception, because a client's code may catch those."""


@contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """Interrupt work that takes longer. Only Unix has the alarm, in the main thread, and it acts between steps of Python."""
    alarm = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not alarm:
        yield
        return

    def interrupt(*_: object) -> None:
        raise OutOfTime(too_late(seconds))

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def screen(replies: Sequence[Reply | Failure], parameters: Tensors, buffers: Tensors) -> tuple[list[Reply], list[Failure]]:
    """The replies that can be averaged, and one failure for each of the others; both in the order of clients."""
    valid: list[Reply] = []
    failures: list[Failure] = []
    for reply in sorted(replies, key=lambda r: r.client):
        if isinstance(reply, Failure):
            failures.append(reply)
        elif fault := _fault(reply, parameters, buffers):
            failures.append(Failure(reply.client, fault))
        else:
            valid.append(reply)
    norms = [_norm(reply.update.tensors) for reply in valid]
    usable = []
    for i, reply in enumerate(valid):
        others = norms[:i] + norms[i + 1 :]
        usual = median(others) if others else 0.0
        if usual > 0 and norms[i] > ABSURD * usual:
            reason = f"sent an update of norm {norms[i]:.3g}; the others' median is {usual:.3g}"
            failures.append(Failure(reply.client, reason))
        else:
            usable.append(reply)
    return usable, sorted(failures, key=lambda f: f.client)


def _fault(reply: Reply, parameters: Tensors, buffers: Tensors) -> str | None:
    if wrong := set(reply.update.tensors) ^ set(parameters):
        return f"sent wrong tensors: '{min(wrong)}' is {'missing' if min(wrong) in parameters else 'not in the model'}"
    if wrong := set(reply.buffers) - set(buffers):
        return f"sent wrong tensors: '{min(wrong)}' is no statistic of the model"
    expected = {**buffers, **parameters}
    for name, value in reply.sent().items():
        if value.shape != expected[name].shape:
            return f"sent '{name}' as {shape_text(value.shape)}; the model's is {shape_text(expected[name].shape)}"
        if not value.is_floating_point():
            return f"sent '{name}' as {value.dtype}, not as real floating point numbers"
        if not bool(torch.isfinite(value.to(expected[name].dtype)).all()):
            return f"sent values that are not finite in '{name}'"
    return f"claims {reply.update.examples} examples" if reply.update.examples < 1 else None


def _norm(tensors: Tensors) -> float:
    return float(sum((t.double() ** 2).sum() for t in tensors.values()) ** 0.5)
