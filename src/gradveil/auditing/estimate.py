"""How long the cells of a plan take: every cell is really computed, with its long loops cut short, and timed.

Times are CPU seconds of one thread, which hardly depend on what else the machine does.
"""

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradveil.auditing.case import Case
from gradveil.auditing.cells import compute
from gradveil.auditing.limits import NO_LIMITS
from gradveil.auditing.plan import Cell, cost_of
from gradveil.auditing.spec import CONTROL
from gradveil.auditing.work import Work, one_thread
from gradveil.core.errors import UserError, one_line
from gradveil.core.loops import sampled
from gradveil.core.types import Tensors
from gradveil.storage.run_folder import Outcome, StoredCell

AT_ONCE = 0.1  # CPU seconds of one iteration on so many victims as are tried; on others their time is extrapolated
SHORT = 5.0  # CPU seconds of a try that is worth a second one
PATIENCE = 15.0  # CPU seconds after which an attack is not tried on a second defense


@dataclass(frozen=True)
class CellTime:
    """CPU seconds of one cell."""

    seconds: float  # expected
    limit: float  # if no search ends before its last step
    reason: str | None = None  # why it does not apply here, or fails
    shared: float = 0.0  # of the expected seconds, those that do not depend on the number of victims

    def for_share(self, share: float) -> float:
        """Expected seconds for a share of the victims."""
        return self.shared + (self.seconds - self.shared) * share


class Estimate:
    """Tries every cell on a few victims, in memory: nothing is stored."""

    def __init__(self, case: Case, cells: Iterable[Cell]):
        self._case, self._cells = case, {cell.key: cell for cell in cells}
        self._begun = time.process_time()
        victims = min(case.spec.victims, max(1, int(AT_ONCE / _iteration(case))))
        self._factor, self._small = case.spec.victims / victims, _with_copies(case, victims)
        self._store = _Memory()
        self._times: dict[str, CellTime] = {}
        self._warm: set[tuple[str, str]] = set()

    def cell(self, cell: Cell) -> CellTime:
        if cell.key not in self._times:
            begun, kind = time.process_time(), (cell.kind, cell.attack)
            expected = self._like(cell) or self._try(cell)
            if kind not in self._warm and time.process_time() - begun < SHORT:  # the first one of a kind warms up
                expected = self._try(cell)
            self._warm.add(kind)
            self._times[cell.key] = expected
        return self._times[cell.key]

    def _like(self, cell: Cell) -> CellTime | None:
        """The time under another defense, which differs little: of look and line-up, and of attacks if trying takes long."""
        if cell.kind not in ("attack", "look", "line-up"):
            return None
        if cell.kind == "attack" and time.process_time() - self._begun < PATIENCE:
            return None
        same = [t for key, t in self._times.items() if _work(self._cells[key]) == _work(cell)]
        return max(same, key=lambda t: t.seconds, default=None)

    def _try(self, cell: Cell) -> CellTime:
        for key in cell.needs:
            if reason := self.cell(self._cells[key]).reason:
                return CellTime(0.0, 0.0, reason)
        reason, begun = None, time.process_time()
        with sampled() as sample:
            try:
                self._store.add(cell, *compute(Work(cell, self._small, self._store, lambda done, total: None, NO_LIMITS)))
            except UserError as error:
                reason = str(error)
            except (Exception, SystemExit) as error:  # a user's code may do anything
                reason = f"{type(error).__name__}: {one_line(error)}"
        spent = time.process_time() - begun
        shared = 1.0 if cell.kind in ("baseline", "train", "utility") else 0.0
        shared = max(shared * (spent + sample.skipped), sample.shared)
        seconds = (spent + sample.skipped - shared) * self._factor + shared
        return CellTime(seconds, seconds * self._longest(cell), reason, shared)

    def _longest(self, cell: Cell) -> float:
        """How much longer an attack may take whose searches all need every stage."""
        cost = cost_of(self._case, cell)
        return max(1.0, cost.limit / max(1, cost.iterations))


def wall_seconds(cells: Sequence[Cell], seconds: Mapping[str, float], workers: int) -> float:
    """Until all cells are done, each by the first free worker after those that it needs."""
    free, ended = [0.0] * max(1, workers), dict[str, float]()
    for cell in cells:
        free.sort()
        free[0] = max(free[0], *(ended.get(key, 0.0) for key in cell.needs), 0.0) + seconds[cell.key]
        ended[cell.key] = free[0]
    return max(free)


def _with_copies(case: Case, victims: int) -> Case:
    """The same case with its first victim, this number of times: so all take the same way through an attack."""
    small = copy.copy(case)
    for name in ("slots", "tested", "distractors", "terms", "id"):  # computed anew
        vars(small).pop(name, None)
    small.spec, small.victims = case.spec.model_copy(update={"victims": victims}), case.victims[:1].expand(victims, -1)
    return small


def _work(cell: Cell) -> tuple[str, str]:
    return cell.kind, cell.attack


def _iteration(case: Case) -> float:
    """CPU seconds of one iteration of a search for one victim."""
    task, state = case.task(case.defenses[CONTROL])
    batch = case.batch(0)
    x = task.normalize(batch.x)[None].requires_grad_()
    times = list[float]()
    with one_thread():
        while len(times) < 4 and sum(times[1:]) < AT_ONCE:  # the first one warms up
            begun = time.process_time()
            updates = task.model.updates(state, x, batch.y[None], case.training)
            torch.autograd.grad(torch.stack([(g**2).sum() for g in updates.values()]).sum(), x)
            times.append(time.process_time() - begun)
    return max(1e-6, min(times))


class _Memory:
    """The cells that were tried."""

    cache = None

    def __init__(self) -> None:
        self._cells: dict[str, tuple[StoredCell, Tensors]] = {}

    def add(self, cell: Cell, outcome: Outcome, tensors: Tensors | None) -> None:
        self._cells[cell.key] = StoredCell.of(cell, outcome), tensors or {}

    def outcome(self, key: str) -> StoredCell:
        return self._cells[key][0]

    def tensors(self, key: str) -> Tensors:
        return self._cells[key][1]
