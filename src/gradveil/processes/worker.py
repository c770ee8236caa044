"""Worker processes: each runs `program.py`, gets jobs and answers, one JSON line each.

They are not forked or spawned, so a user's script needs no main guard, and no pickle passes between processes.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gradveil.core.errors import UserError
from gradveil.processes.scheduler import J, Lost, Perform, R, S, Workers

# One thread per worker. And glibc keeps the pages of large temporary tensors instead of asking for them at every step.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Inbox = queue.Queue[tuple["_Process", list[Any] | None]]


class ProcessWorkers(Workers[J, R]):
    """Up to `limit` processes. Each calls `prepare(setup)`, which returns what performs a job.

    `prepare` is found by its name in the other process. `setup`, `encode(job)` and the results are JSON.
    """

    def __init__(self, prepare: Callable[[S], Perform[Any, R]], setup: S, encode: Callable[[J], object], limit: int):
        self._first = [sys.path, prepare.__module__, prepare.__name__, setup]
        self._encode, self._limit = encode, limit
        self._idle: list[_Process] = []
        self._working: dict[_Process, J] = {}
        self._inbox: Inbox = queue.Queue()

    def free(self) -> bool:
        return bool(self._idle) or len(self._working) < self._limit

    def start(self, job: J, second_try: bool) -> None:
        fresh = second_try or not self._idle  # the process of a lost job has ended and left room
        process = _Process(self._first, self._inbox) if fresh else self._idle.pop()
        self._working[process] = job
        process.send([self._encode(job), second_try])

    def wait(self, progress: Callable[[J, int, int], None]) -> tuple[J, R | Lost]:
        while True:
            try:
                process, message = self._inbox.get(timeout=min(self.seconds_left(), threading.TIMEOUT_MAX))
            except queue.Empty:
                continue
            match message:
                case ["ready"]:
                    process.ready = True
                case ["progress", done, total]:
                    progress(self._working[process], done, total)
                case ["finished", result]:
                    self._idle.append(process)
                    return self._working.pop(process), result
                case ["refused", reason] if process.ready:
                    raise UserError(reason)
                case _:
                    reason = message[1] if message else process.exit_reason()
                    if not process.ready:
                        raise UserError(f"a worker process could not start ({reason}); what is finished is kept.")
                    process.stop()
                    if process in self._working:
                        return self._working.pop(process), Lost(reason)
                    self._idle.remove(process)  # it has died while it had nothing to do

    def stop(self) -> None:
        for process in [*self._idle, *self._working]:
            process.stop()
        self._idle, self._working = [], {}


class _Process:
    """The parent's end of one worker process. Its messages go to the inbox, and None when it has ended."""

    def __init__(self, first: object, inbox: Inbox):
        self.ready = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("program.py"))],  # -m would search the current folder first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_ENVIRONMENT},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
        self.send(first)
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def send(self, message: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which `_listen` reports
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _listen(self, inbox: Inbox) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            inbox.put((self, json.loads(line)))
        inbox.put((self, None))

    def exit_reason(self) -> str:
        """The signal that ended it, or the last line of its standard error."""
        code = self._process.wait()
        if code < 0:
            return f"signal {signal.Signals(-code).name}; out of memory?"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"

    def stop(self) -> None:
        self._process.kill()  # files are renamed into place, so nothing is left half-written
        self._process.wait()
        self._errors.close()
