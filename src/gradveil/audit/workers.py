"""Who does the cells: worker processes, or this one. Cells start when all that they wait for is stored."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from gradveil.audit.case import Case
from gradveil.audit.cells import run_cell
from gradveil.audit.limits import NO_LIMITS, Limits, OutOfMemory
from gradveil.audit.plan import Cell
from gradveil.audit.progress import Display
from gradveil.audit.store import RunFolder
from gradveil.errors import UserError

Message = dict[str, Any]


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_here(
    cells: Sequence[Cell], case: Case, folder: RunFolder, display: Display, limits: Limits = NO_LIMITS
) -> None:
    """One after another in this process, in the order of the plan."""
    for cell in cells:
        display.begin(cell)

        def progress(done: int, total: int, cell: Cell = cell) -> None:
            display.progress(cell, done, total)

        try:
            content = run_cell(cell, case, folder, progress, limits)
        except OutOfMemory:
            gc.collect()
            content = run_cell(cell, case, folder, progress, replace(limits, again=True))
        display.end(cell, content)


def run_in_workers(
    cells: Sequence[Cell], case: Case, folder: RunFolder, display: Display, workers: int, limits: Limits = NO_LIMITS
) -> None:
    """A cell whose worker dies or runs out of memory is tried once more, in a new one, and then given up."""
    waiting, done = list(cells), {key for cell in cells for key in cell.needs} - {cell.key for cell in cells}
    inbox: queue.Queue[tuple[Worker, Message | None]] = queue.Queue()
    first: Message = {"spec": case.spec.plain(), "folder": str(folder.path.absolute()), "path": sys.path}
    first |= {"memory": limits.memory, "device": str(limits.device)}
    again: set[str] = set()
    crew = [Worker(first, inbox) for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(w.cell for w in crew):
            for worker in crew:
                ready = next((c for c in waiting if done.issuperset(c.needs)), None)
                if worker.cell is None and ready:
                    waiting.remove(ready)
                    worker.take(ready, again=ready.key in again)
                    display.begin(ready)
            worker, message = inbox.get()
            if message is None:
                why = worker.last_words()
                if not worker.ready:
                    raise RuntimeError(f"a worker process could not start: {why}")
                if worker.cell and worker.cell.key not in again:
                    again.add(worker.cell.key)
                    waiting.insert(0, worker.cell)
                    display.end_early(worker.cell)
                elif worker.cell:
                    error = f"the worker process ended unexpectedly, twice ({why})"
                    failed = {"status": "failed", "error": error, "traceback": why}
                    display.end(worker.cell, folder.write(worker.cell, failed))
                    done.add(worker.cell.key)
                crew.remove(worker)
                if waiting:
                    crew.append(Worker(first, inbox))
            elif message["event"] == "refused":
                raise UserError(message["error"])
            elif message["event"] == "ready":
                worker.ready = True
            elif message["event"] == "short":
                worker.short = message["error"]
            elif message["event"] == "progress" and worker.cell:
                display.progress(worker.cell, message["done"], message["total"])
            elif message["event"] == "done" and worker.cell:
                done.add(worker.cell.key)
                display.end(worker.cell, folder.outcome(worker.cell.key))
                worker.cell = None
    finally:
        for worker in crew:
            worker.stop()


# One thread a worker; and glibc keeps the pages of large temporaries instead of asking for them anew at every step.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, first: Message, inbox: queue.Queue[tuple[Worker, Message | None]]):
        self.cell: Cell | None = None
        self.ready = False
        self.short = ""  # of memory, in its own words
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("worker.py")),
            ],  # not -m, which looks into the current folder first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_ENVIRONMENT},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
        self._send(first)
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def take(self, cell: Cell, *, again: bool) -> None:
        self.cell = cell
        self._send({"cell": cell.plain(), "again": again})

    def stop(self) -> None:
        self._process.kill()  # files are renamed into place, so there is nothing to be finished
        self._process.wait()
        self._errors.close()

    def last_words(self) -> str:
        code = self._process.wait()
        if self.short:
            return f"out of memory: {self.short}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            return f"signal {signal.Signals(-code).name}; out of memory?"
        return said[-1] if said else f"exit code {code}"

    def _send(self, message: Message) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return  # it has died, which its listener reports

    def _listen(self, inbox: queue.Queue[tuple[Worker, Message | None]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            inbox.put((self, json.loads(line)))
        inbox.put((self, None))
