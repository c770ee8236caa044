"""Long loops: `for step in steps(n)` runs to its end, or is cut short to see how long it would take.

Every loop that may take minutes (searches, trainings, rehearsals) is written with `steps`. Within `sampled()` each of them
does a few steps only, and the time of the others is extrapolated. What such a run computes is of no use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

FEW = 3  # steps of a loop that are done; the first one, which warms up, is not timed
ENOUGH = 0.25  # CPU seconds after which no further step is done


@dataclass
class Sample:
    """CPU seconds that a run would take if no loop were cut short."""

    skipped: float = 0.0  # of steps that were left out
    shared: float = 0.0  # spent and skipped in loops that do not grow with the number of victims
    _depth: int = 0

    def clock(self) -> float:
        return time.process_time() + self.skipped

    def loop(self, total: int, done: Callable[[], float] | None, shared: bool) -> Iterator[int]:
        begun, before, timed = self.clock(), 0.0, 0.0
        self._depth += shared
        try:
            for step in range(total):
                yield step
                now, units = self.clock(), done() if done else step + 1.0
                if step + 1 >= FEW or now - begun > ENOUGH:
                    self.skipped += (now - begun) / max(units - before, 1e-9) * max(0.0, total - units)
                    break
                if step == 0:
                    timed, begun, before = now - begun, now, units
        finally:
            self._depth -= shared
            if shared and not self._depth:
                self.shared += self.clock() - begun + timed


_SAMPLE: ContextVar[Sample | None] = ContextVar("sample", default=None)


def is_sampled() -> bool:
    """Whether loops are cut short now, so that nothing may be kept of what they compute."""
    return _SAMPLE.get() is not None


@contextmanager
def sampled() -> Iterator[Sample]:
    """Cut long loops short within this block."""
    sample = Sample()
    token = _SAMPLE.set(sample)
    try:
        yield sample
    finally:
        _SAMPLE.reset(token)


def steps(total: int, *, done: Callable[[], float] | None = None, shared: bool = False) -> Iterator[int]:
    """The numbers of the steps of a long loop.

    Args:
        done: says how much is done where steps differ; `total` is then what is expected in all.
        shared: whether the loop takes as long for one victim as for many.
    """
    sample = _SAMPLE.get()
    return iter(range(total)) if sample is None else sample.loop(total, done, shared)
