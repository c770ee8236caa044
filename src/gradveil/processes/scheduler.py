"""The one rule for jobs and workers.

A job starts when all that it needs has ended. A job whose worker dies or runs out of memory is tried once more, in a
fresh worker, and then given up with the reason. Whatever happens is told to a listener.
"""

import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gradveil.core.errors import UserError, one_line
from gradveil.core.progress import Steps


class Job(Protocol):
    """A piece of work. `needs` are the keys of the jobs that must end before it starts."""

    @property
    def key(self) -> str: ...
    @property
    def needs(self) -> tuple[str, ...]: ...


J = TypeVar("J", bound=Job)
S = TypeVar("S")
R = TypeVar("R")
Perform = Callable[[S, bool, Steps], R]  # takes the work, whether it is the second try, and where progress goes


class OutOfMemory(Exception):
    """The first try of a job ran out of memory: it is worth a second one."""


class DeadlinePassed(BaseException):
    """The time for all jobs is over. No error of a job, so nothing that a job catches."""


@dataclass(frozen=True)
class Lost:
    """A job has no result, because its worker died or ran out of memory."""

    reason: str


class Workers(ABC, Generic[J, R]):
    """Workers of one kind: other processes, a cluster, or this process."""

    deadline: float = math.inf  # of `time.monotonic`

    def seconds_left(self) -> float:
        """Raises `DeadlinePassed` where there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed
        return left

    def free(self) -> bool:
        """Whether another job can start now."""
        return True

    @abstractmethod
    def start(self, job: J, second_try: bool) -> None:
        """Give the job to a worker; a second try to a fresh one."""

    @abstractmethod
    def wait(self, progress: Callable[[J, int, int], None]) -> tuple[J, R | Lost]:
        """The next job that ends, and its result. Raises when no worker can go on, `DeadlinePassed` when the time is over."""

    def stop(self) -> None: ...


class Listener(Generic[J, R]):
    """Hears what happens to every job. Does nothing itself."""

    def started(self, job: J) -> None: ...

    def progressed(self, job: J, done: int, total: int) -> None: ...

    def finished(self, job: J, result: R) -> None: ...

    def retried(self, job: J, reason: str) -> None: ...

    def given_up(self, job: J, reason: str) -> None: ...

    def left_out(self, job: J) -> None: ...


def run_jobs(jobs: Sequence[J], workers: Workers[J, R], listener: Listener[J, R], deadline: float | None = None) -> None:
    """Do every job, in this order as far as `needs` and workers allow. A needed key that is no job here has ended.

    Jobs that need a job that was given up start all the same: they see what was stored for it. At the `deadline` of
    `time.monotonic`, all jobs that have not ended are left out.
    """
    waiting, running, retried = list(jobs), list[J](), set[str]()
    workers.deadline = math.inf if deadline is None else deadline
    ended = {key for job in jobs for key in job.needs} - {job.key for job in jobs}
    try:
        while waiting or running:
            for job in [job for job in waiting if ended.issuperset(job.needs)]:
                if workers.free():
                    workers.seconds_left()
                    waiting.remove(job)
                    running.append(job)
                    listener.started(job)
                    workers.start(job, job.key in retried)
            if not running:
                raise ValueError(f"jobs need each other: {', '.join(job.key for job in waiting)}")
            job, result = workers.wait(listener.progressed)
            running.remove(job)
            if isinstance(result, Lost) and job.key not in retried:
                retried.add(job.key)
                waiting.insert(0, job)
                listener.retried(job, result.reason)
                continue
            ended.add(job.key)
            if isinstance(result, Lost):
                listener.given_up(job, result.reason)
            else:
                listener.finished(job, result)
    except DeadlinePassed:
        workers.stop()
        for job in [*running, *waiting]:
            listener.left_out(job)
    finally:
        workers.stop()


class ThisProcess(Workers[J, R]):
    """The only worker is this process. A job that raises `lost` is tried once more, after memory was given back."""

    def __init__(self, perform: Perform[J, R], lost: type[Exception] = OutOfMemory):
        self._perform, self._lost = perform, lost
        self._jobs: list[tuple[J, bool]] = []

    def free(self) -> bool:
        return not self._jobs

    def start(self, job: J, second_try: bool) -> None:
        self._jobs.append((job, second_try))

    def wait(self, progress: Callable[[J, int, int], None]) -> tuple[J, R | Lost]:
        job, second_try = self._jobs.pop()
        try:
            return job, self._perform(job, second_try, lambda done, total: self._progressed(progress, job, done, total))
        except UserError:
            raise
        except self._lost as error:
            reason = f"{type(error).__name__}: {one_line(error)[:200]}"
        gc.collect()
        return job, Lost(reason)

    def _progressed(self, progress: Callable[[J, int, int], None], job: J, done: int, total: int) -> None:
        self.seconds_left()
        progress(job, done, total)
