"""Who does the cells: worker processes, or this one. Cells start when all that they wait for is stored."""

from __future__ import annotations

import gc
import os
import queue
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradveil.auditing.case import Case
from gradveil.auditing.cells import run_cell
from gradveil.auditing.limits import NO_LIMITS, Limits, OutOfMemory
from gradveil.auditing.plan import Cell
from gradveil.auditing.progress import Display
from gradveil.auditing.store import RunFolder
from gradveil.core.errors import UserError
from gradveil.processes.worker import Message, Worker

_PROGRAM = Path(__file__).with_name("worker_program.py")


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
    inbox: queue.Queue[tuple[Worker[Cell], Message | None]] = queue.Queue()
    first: Message = {"spec": case.spec.plain(), "folder": str(folder.path.absolute()), "path": sys.path}
    first |= {"memory": limits.memory, "device": str(limits.device)}
    again: set[str] = set()
    crew = [Worker(_PROGRAM, first, inbox) for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(w.task for w in crew):
            for worker in crew:
                ready = next(
                    (c for c in waiting if done.issuperset(c.needs) and (worker.fresh or c.key not in again)), None
                )
                if worker.task is None and ready:
                    waiting.remove(ready)
                    worker.take(ready, {"cell": ready.plain(), "again": ready.key in again})
                    display.begin(ready)
            worker, message = inbox.get()
            if message is None:
                why = worker.last_words()
                if not worker.ready:
                    raise RuntimeError(f"a worker process could not start: {why}")
                if worker.task and worker.task.key not in again:
                    again.add(worker.task.key)
                    waiting.insert(0, worker.task)
                    display.end_early(worker.task)
                elif worker.task:
                    error = f"the worker process ended unexpectedly, twice ({why})"
                    failed = {"status": "failed", "error": error, "traceback": why}
                    display.end(worker.task, folder.write(worker.task, failed))
                    done.add(worker.task.key)
                crew.remove(worker)
                if waiting:
                    crew.append(Worker(_PROGRAM, first, inbox))
            elif message["event"] == "refused":
                raise UserError(message["error"])
            elif message["event"] == "ready":
                worker.ready = True
            elif message["event"] == "short":
                worker.short = message["error"]
            elif message["event"] == "progress" and worker.task:
                display.progress(worker.task, message["done"], message["total"])
            elif message["event"] == "done" and worker.task:
                done.add(worker.task.key)
                display.end(worker.task, folder.outcome(worker.task.key))
                worker.task = None
    finally:
        for worker in crew:
            worker.stop()
