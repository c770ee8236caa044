"""The audits of a recipe: only the cells that its table needs, in a folder that all recipes share."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradveil import attacks, defenses
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import Cell, make_plan
from gradveil.auditing.progress import Display
from gradveil.auditing.run import complete
from gradveil.core.errors import UserError
from gradveil.core.results import Statistic
from gradveil.core.types import Tensors
from gradveil.recipes.claims import Value, accuracy_value
from gradveil.recipes.recipe import ATTACK_METRICS, TRAINING_METRICS, UPDATE_METRICS, TableCell, undefended
from gradveil.storage.run_folder import RunFolder, StoredCell


class SharedFolder(RunFolder):
    """The folder of one case among those of all recipes, which share what defenses train once."""

    @property
    def cache(self) -> Path:
        return self.path.parents[1] / "cache"


class RecipeAudit:
    """One audit of a recipe. A number of the table is read from a stored cell of the audit."""

    def __init__(self, case: Case, folder: RunFolder):
        self.case, self.folder = case, folder
        self._plan = {cell.key: cell for cell in make_plan(case)}

    def key_of(self, cell: TableCell) -> str:
        """The key of the audit's cell that a number of the table comes from.

        An audit has each method once, as it was first written: `precode:k=256` stands for `precode` too.
        """
        kind = "attack" if cell.figure in ATTACK_METRICS else "observe" if cell.figure in UPDATE_METRICS else "utility"
        defense = defenses.parse(cell.defense).spec
        attack = attacks.parse(cell.attack).spec if kind == "attack" else ""
        for planned in self._plan.values():
            same = planned.kind == kind and self.case.defenses[planned.defense].spec == defense
            if same and (self.case.attack(planned.attack).spec if planned.attack else "") == attack:
                return planned.key
        by = f" from {attack}" if attack else ""
        raise UserError(f"audit {cell.audit} has no cell for {cell.metric} under {cell.defense}{by}.")

    def complete(self, cells: Iterable[TableCell], execution: Execution, display: Display) -> float:
        """Do what is not stored yet. Returns the seconds that all of these cells took, now or earlier."""
        keys = {key for cell in cells for key in self._with_needs(self.key_of(cell))}
        ordered = [cell for key, cell in self._plan.items() if key in keys]
        missing = [cell for cell in ordered if not self._is_stored(cell, display)]
        complete(ordered, missing, self.case, self.folder, execution, display)
        return sum(self.folder.outcome(cell.key).seconds or 0.0 for cell in ordered)

    def _with_needs(self, key: str) -> Iterator[str]:
        yield key
        for needed in self._plan[key].needs:
            yield from self._with_needs(needed)

    def _is_stored(self, cell: Cell, display: Display) -> bool:
        """Whether the cell is done, with the images that pictures and normalised distances need."""
        stored = self.folder.read(cell.key, display.note)
        return stored is not None and (cell.kind != "attack" or stored.status != "ok" or bool(stored.tensors_sha256))

    def tensors(self, cell: TableCell) -> Tensors:
        return self.folder.tensors(self.key_of(cell))

    def value(self, cell: TableCell) -> Value | str:
        """The number of a cell, or a text that says why there is none."""
        stored = self.folder.outcome(self.key_of(cell))
        if stored.status != "ok":
            return f"{stored.status}: {stored.error}"
        if cell.figure in TRAINING_METRICS:
            return self._accuracy(cell, stored)
        if cell.figure == "seconds":
            return Value((stored.seconds or 0.0) / (self.case.spec.victims * self.case.spec.updates))
        if cell.figure in UPDATE_METRICS:
            each = [value for change in stored.changes if (value := getattr(change, cell.figure, None)) is not None]
            return Value.of(each) if each else "the model differs, so updates cannot be compared"
        return self._score(cell, stored)

    def _score(self, cell: TableCell, stored: StoredCell) -> Value | str:
        row = next((row for row in stored.rows if row.against == cell.against == "fed"), None)
        if row is not None:
            if cell.figure == "asr":
                return Value(100 * (row.asr or 0.0))
            statistic: Statistic = getattr(row, cell.figure)
            if cell.statistic == "mean":
                return Value(statistic.mean, statistic.std, row.scored)
            return Value(getattr(statistic, cell.statistic))
        if cell.figure == "mse_normalised":
            tensors, std = self.folder.tensors(stored.key), self.case.data.std.view(-1, 1, 1)
            errors = (tensors["reconstruction"] - tensors["original"]).div(std).square().flatten(0, 1).flatten(1)
            return Value.of(errors.mean(1).tolist())
        if cell.figure == "asr":
            return Value.of(100.0 * image.recognisable for image in stored.victims)
        if cell.figure == "identified":
            return Value.of(100.0 * bool(image.identified) for image in stored.victims)
        each = [getattr(image, cell.figure) for image in stored.victims]
        if any(number is None for number in each):
            return f"{cell.figure} was not measured"
        value = Value.of(each)
        statistics = {"min": min(each), "max": max(each), "std": value.std}
        return value if cell.statistic == "mean" else Value(statistics[cell.statistic])

    def _accuracy(self, cell: TableCell, stored: StoredCell) -> Value | str:
        curve = stored.history["acc_test" if cell.figure == "pdm" else cell.figure]
        rounds = curve if cell.round is None else curve[cell.round - 1 : cell.round]
        measured = [share for share in rounds if share is not None]
        if not measured:
            return "not measured in this round"
        training = self.case.spec.utility
        held = training.images if training and cell.figure == "acc_sensitive" else None
        tested = held or len(self.case.data.test)
        accuracy = accuracy_value(measured[-1], tested)
        if cell.figure != "pdm":
            return accuracy
        base = self.value(undefended(cell))
        if isinstance(base, str) or not base.mean:
            return "no undefended accuracy to compare with"
        loss = 100 * (base.mean - accuracy.mean) / base.mean
        return Value(loss, 100 * math.hypot(accuracy.std, base.std) / base.mean)
