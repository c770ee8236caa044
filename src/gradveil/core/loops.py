"""Long loops: `for step in Loop(n)` runs to its end, is cut short to see how long it would take, or is resumed.

Every loop that may take minutes (searches, trainings, rehearsals) is a `Loop`. Who runs loops is set for a block of code by
`run_by`. Within `sampled()` each loop does a few steps only, and the time of the others is extrapolated. What such a run
computes is of no use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FEW = 7  # steps of a loop that are done; the first one, which warms up, is not timed if there is a second
ENOUGH = 0.25  # CPU seconds after which no further step is done, if one was timed
LONG = 2.0  # CPU seconds of a first step after which there is no second
State = dict[str, Any]  # as torch declares the state of modules and optimizers


class Stateful(Protocol):
    """A part of a loop that has a state: a module, an optimizer, a schedule, a `Snapshot`."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> object: ...


Part = Stateful | torch.Generator


class Snapshot:
    """What changes along a loop. All attributes are stored: tensors, numbers, and lists or dicts of these."""

    def state_dict(self) -> State:
        return dict(vars(self))

    def load_state_dict(self, state: State, /) -> None:
        vars(self).update(state)


class Runner(Protocol):
    """Decides which steps of a loop are done."""

    def loop(self, loop: Loop, /) -> Iterator[int]: ...


_RUNNER: ContextVar[Runner | None] = ContextVar("runner", default=None)


class Loop:
    """The numbers of the steps of a long loop, to be iterated over once."""

    def __init__(self, total: int, *parts: Part, done: Callable[[], float] | None = None, shared: bool = False):
        """
        Args:
            total: number of steps.
            parts: all that a step changes; with it the loop can be resumed.
            done: says how much is done where steps differ; `total` is then what is expected in all.
            shared: whether the loop takes as long for one victim as for many.
        """
        self.total, self.parts, self.done, self.shared = total, parts, done, shared
        self.stopped = False

    def stop(self) -> None:
        """The step that is being done is the last one."""
        self.stopped = True

    def __iter__(self) -> Iterator[int]:
        runner = _RUNNER.get()
        return self.plain() if runner is None else runner.loop(self)

    def plain(self, begin: int = 0) -> Iterator[int]:
        for step in range(begin, self.total):
            yield step
            if self.stopped:
                return


@contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """Within this block the runner runs all loops."""
    token = _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.reset(token)


@dataclass
class Sample:
    """CPU seconds that a run would take if no loop were cut short."""

    skipped: float = 0.0  # of steps that were left out
    shared: float = 0.0  # spent and skipped in loops that do not grow with the number of victims
    _depth: int = 0

    def clock(self) -> float:
        return time.process_time() + self.skipped

    def loop(self, loop: Loop) -> Iterator[int]:
        begun = now = self.clock()
        units, per_unit = 0.0, list[float]()  # seconds of a unit, in every step that was timed
        self._depth += loop.shared
        try:
            for step in loop.plain():
                yield step
                before, now, done = now, self.clock(), loop.done() if loop.done else step + 1.0
                per_unit = [*per_unit[step == 1 :], (now - before) / max(done - units, 1e-9)]
                units = done
                if loop.stopped or step + 1 >= FEW or now - begun > (ENOUGH if step else LONG):
                    break
            if not loop.stopped and per_unit:
                self.skipped += statistics.median(per_unit) * max(0.0, loop.total - units)
        finally:
            self._depth -= loop.shared
            if loop.shared and not self._depth:
                self.shared += self.clock() - begun


def is_sampled() -> bool:
    """Whether loops are cut short now, so that nothing may be kept of what they compute."""
    return isinstance(_RUNNER.get(), Sample)


@contextmanager
def sampled() -> Iterator[Sample]:
    """Cut long loops short within this block."""
    sample = Sample()
    with run_by(sample):
        yield sample
