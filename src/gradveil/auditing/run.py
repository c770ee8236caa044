"""From a case to a finished folder: what is stored already is taken, the rest is done, and all of it is judged."""

import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from gradveil.attacks.base import TOGETHER
from gradveil.auditing.case import Case
from gradveil.auditing.fit import CHOSEN, Fitted, fit
from gradveil.auditing.limits import Execution, Limits, find_device, share_of_memory
from gradveil.auditing.plan import Cell, make_plan, weights_of
from gradveil.auditing.progress import Display
from gradveil.auditing.spec import make_spec
from gradveil.auditing.stages import Asked, Stages
from gradveil.auditing.verdict import judge
from gradveil.auditing.workers import run_cells
from gradveil.core.errors import UserError
from gradveil.processes.temporary import remove_leftover_folders
from gradveil.processes.worker import cores
from gradveil.storage.environment import Environment
from gradveil.storage.reading import read_yaml
from gradveil.storage.run_folder import Outcome, RunFolder, RunIdentity
from gradveil.summary import Summary


class FinishedRun(NamedTuple):
    """Where an audit is stored, and what it says."""

    folder: Path
    summary: Summary


class Stopped(KeyboardInterrupt):
    """Ctrl-C in the middle of a run: what is done is kept."""

    def __init__(self, folder: Path, done: int, total: int):
        kept = f"{done} of {total} cells are done and kept in {folder}"
        super().__init__(f"stopped; {kept}. The same command goes on from there.")


def run_audit(
    case: Case,
    execution: Execution | None = None,
    display: Display | None = None,
    *,
    deadline: float | None = None,
    unpriced: Collection[str] = (),
    settled: Asked | None = None,
) -> FinishedRun:
    """Do all cells that are not stored yet. With 0 workers, or objects that have no text, in this process.

    A `deadline` (of `time.monotonic`) ends the work. For `unpriced` see `make_plan`, for `settled` see `Stages`.
    """
    begun, execution = time.perf_counter(), execution or Execution()
    if execution.ray is not None and not case.spec.in_words:
        needs = "data, model and methods by name or as pkg.mod:factory"
        raise UserError(f"--ray needs {needs}: objects stay on this machine.")
    display, left_out = display or Display(), dict[str, float]()
    if execution.minutes is not None:
        deadline = time.monotonic() + 60 * execution.minutes
        fitted = _fitted(case, execution, deadline, display)
        case, left_out = fitted.case, fitted.left_out
    remove_leftover_folders()
    with RunFolder(execution.out or default_folder(case)).opened(identity_of(case)) as folder:
        stages = Stages(case.spec, settled)
        for asked in stages:
            plan = make_plan(case, unpriced, asked)
            missing = [cell for cell in plan if folder.read(cell.key, display.note) is None]
            for kind, seconds in left_out.items():
                cells = [cell for cell in missing if cell.kind == kind]
                for cell in cells:
                    outcome = Outcome(status="not run", error="left out: no time", expected_cpu_seconds=seconds / len(cells))
                    folder.write(cell, outcome)
            missing = [cell for cell in missing if cell.kind not in left_out]
            complete(plan.cells, missing, case, folder, execution, display, deadline)
            summary = judge(case, plan, {cell.key: folder.outcome(cell.key) for cell in plan})
            stages.settle(summary)
        folder.finish(summary, time.perf_counter() - begun)
    return FinishedRun(folder.path, summary)


def complete(
    cells: Sequence[Cell],
    missing: Sequence[Cell],
    case: Case,
    folder: RunFolder,
    execution: Execution,
    display: Display,
    deadline: float | None = None,
) -> None:
    """Do the missing ones of these cells. Ctrl-C keeps what is done and says how much that is."""
    display.start(len(cells), weights_of(case, missing))
    memory, workers = execution.memory_bytes, workers_of(case, execution)
    share = memory if execution.ray is not None else share_of_memory(memory, workers)
    limits = Limits(share, find_device(execution.device))
    if missing and share is not None and share < TOGETHER:
        display.note(f"with less than {TOGETHER >> 20} MB per process sums are rounded differently; a close verdict may change")
    try:
        run_cells(missing, case, folder, display, limits, workers=workers, ray=execution.ray, deadline=deadline)
    except KeyboardInterrupt:
        done = sum(folder.read(cell.key) is not None for cell in cells)
        raise Stopped(folder.path, done, len(cells)) from None
    finally:
        display.stop()


def workers_of(case: Case, execution: Execution) -> int:
    """Worker processes; 0: this process alone, as objects that have no text cannot be sent to others."""
    return (cores() if execution.workers is None else execution.workers) if case.spec.in_words else 0


def _fitted(case: Case, execution: Execution, deadline: float, display: Display) -> Fitted:
    """The case with settings that fit in the minutes; those of the folder, where it holds an audit already."""
    assert execution.minutes is not None
    stored = execution.out and execution.out / "audit.yaml"
    if stored and stored.is_file():
        before = read_yaml(stored)
        chosen = {name: before[name] for name in CHOSEN if name in before} if isinstance(before, dict) else {}
        note = f"--minutes {execution.minutes:g}: the {', '.join(CHOSEN)} of {stored} are taken"
        fitted = Fitted(Case(make_spec({**dict(case.spec), **chosen})), note)
    else:
        fitted = fit(case, execution.minutes, max(1, workers_of(case, execution)), deadline)
    display.note(fitted.note)
    return fitted


def default_folder(case: Case) -> Path:
    """The same for the same case, so that the same command resumes."""
    words = "-".join(re.sub(r"[^\w.]+", "-", case.names[part]).strip("-.")[-40:] for part in ("data", "model"))
    return Path("runs") / f"{words}-{case.id[:6]}"


def identity_of(case: Case) -> RunIdentity:
    hashes = {"case": case.id, "data_sha256": case.data_hash, "model_sha256": case.model_hash}
    environment = Environment.here(**hashes, seed=case.spec.seed)
    return RunIdentity(environment, case.terms, case.spec.plain(**case.names))
