"""Who does the cells: worker processes, a Ray cluster, or this process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gradveil.auditing.case import Case
from gradveil.auditing.cells import run_cell
from gradveil.auditing.cluster import RayWorkers
from gradveil.auditing.limits import NO_LIMITS, Limits
from gradveil.auditing.plan import Cell, make_plan
from gradveil.auditing.progress import Display
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.core.progress import Steps
from gradveil.processes.scheduler import Listener, Perform, ThisProcess, Workers, run_jobs
from gradveil.processes.worker import ProcessWorkers
from gradveil.storage.run_folder import Outcome, RunFolder


def run_cells(
    cells: Sequence[Cell],
    case: Case,
    folder: RunFolder,
    display: Display,
    limits: Limits = NO_LIMITS,
    *,
    workers: int = 0,
    ray: str | None = None,
    deadline: float | None = None,
) -> None:
    """Do the cells on the cluster at the address `ray`, or in so many worker processes; with none, in this process."""
    team: Workers[Cell, None]
    if ray is not None:
        team = RayWorkers(ray, case, folder, limits)
    elif workers:
        setup = (case.spec.plain(), str(folder.path.absolute()), limits.memory, str(limits.device))
        team = ProcessWorkers(prepare_cells, setup, Cell.plain, workers)
    else:
        team = ThisProcess(_performer(case, folder, limits))
    run_jobs(cells, team, _CellListener(folder, display), deadline)


class _CellListener(Listener[Cell, None]):
    """Shows what happens, and stores why a cell was given up."""

    def __init__(self, folder: RunFolder, display: Display):
        self._folder, self._display = folder, display

    def started(self, job: Cell) -> None:
        self._display.begin(job)

    def progressed(self, job: Cell, done: int, total: int) -> None:
        self._display.progress(job, done, total)

    def finished(self, job: Cell, result: None) -> None:
        self._display.end(job, self._folder.outcome(job.key))

    def retried(self, job: Cell, reason: str) -> None:
        self._display.end_early(job)

    def left_out(self, job: Cell) -> None:
        self._display.end(job, self._folder.write(job, Outcome(status="not run", error="left out: no time")))

    def given_up(self, job: Cell, reason: str) -> None:
        error = f"the worker process ended unexpectedly, twice ({reason})"
        self._display.end(job, self._folder.write(job, Outcome(status="failed", error=error, traceback=reason)))


def _performer(case: Case, folder: RunFolder, limits: Limits) -> Perform[Cell, None]:
    keys = {cell.key for cell in make_plan(case)}

    def perform(cell: Cell, second_try: bool, progress: Steps) -> None:
        if cell.key not in keys:
            raise UserError("data, model or code has changed since the audit began; run it again.")
        run_cell(cell, case, folder, progress, replace(limits, second_try=second_try))

    return perform


def prepare_cells(setup: tuple[dict[str, object], str, int | None, str]) -> Perform[dict[str, object], None]:
    """In a worker process: the case, built as in the parent. Cells come as `Cell.plain` wrote them."""
    spec, folder, memory, device = setup
    perform = _performer(Case(make_spec(spec)), RunFolder(Path(folder)), Limits(memory, torch.device(device)))
    return lambda cell, second_try, progress: perform(Cell.read(cell), second_try, progress)
