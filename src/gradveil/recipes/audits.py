"""The audits of a recipe: only the cells that its table needs, in a folder that all recipes share."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gradveil import attacks, defenses
from gradveil.auditing.case import Case
from gradveil.auditing.cost import by_seed, last_mean
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import Cell, make_plan
from gradveil.auditing.progress import Display
from gradveil.auditing.run import complete
from gradveil.core.errors import UserError
from gradveil.core.results import RECOGNISABLE, ImageScores
from gradveil.core.types import Tensors
from gradveil.metrics import lpips, mse, psnr, ssim
from gradveil.recipes.claims import Value, of_trainings
from gradveil.recipes.recipe import ATTACK_METRICS, TRAINING_METRICS, UPDATE_METRICS, TableCell, undefended, update_of
from gradveil.storage.run_folder import RunFolder, StoredCell

STORED_SCORES = ("psnr", "ssim", "mse", "lpips", "asr", "identified")  # of every image, against the original one

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "psnr": psnr,
    "ssim": ssim,
    "mse": mse,
    "lpips": lpips,
    "lpips_vgg": partial(lpips, net="vgg"),
}


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
        if cell.figure == "length":
            sent, plain = (self._lengths(one) for one in (cell, undefended(cell)))
            return Value.of(a / b for a, b in zip(sent, plain, strict=True))
        if cell.figure in UPDATE_METRICS:
            each = [value for change in stored.changes if (value := getattr(change, cell.figure, None)) is not None]
            return Value.of(each) if each else "the model differs, so updates cannot be compared"
        return self._score(cell, stored)

    def _lengths(self, cell: TableCell) -> list[float]:
        """Of the update of every victim."""
        stored = self.folder.tensors(self.key_of(cell))
        of = [[t.flatten() for n, t in stored.items() if n.startswith(f"{v}/0/update/")] for v in range(self.case.spec.victims)]
        return [float(torch.cat(tensors).double().norm()) for tensors in of]

    def _score(self, cell: TableCell, stored: StoredCell) -> Value | str:
        """Per image, so that columns of the same victims are compared victim by victim."""
        if cell.against == "original" and cell.figure in STORED_SCORES:
            each = [_stored_score(cell.figure, image) for image in stored.victims]
        else:
            each = self._scored_again(cell, self.folder.tensors(stored.key))
        measured = [number for number in each if number is not None]
        if len(measured) < len(each):
            return f"{cell.figure} was not measured"
        value = Value.of(measured)
        statistics = {"min": min(measured), "max": max(measured), "std": value.std}
        return value if cell.statistic == "mean" else Value(statistics[cell.statistic])

    def _scored_again(self, cell: TableCell, tensors: Tensors) -> list[float | None]:
        """Scores that cells do not store image by image, from the images that they do store."""
        truth = self._components(cell) if cell.against == "component" else tensors[cell.against].flatten(0, 1)
        guess = tensors["reconstruction"].flatten(0, 1)
        if cell.figure == "asr":
            return [100.0 * bool(s >= RECOGNISABLE) for s in ssim(truth, guess)]
        if cell.figure == "mse_normalised":
            errors = (guess - truth).div(self.case.data.std.view(-1, 1, 1)).square().flatten(1)
            return [float(error) for error in errors.mean(1)]
        scores = SCORES[cell.figure](truth, guess)
        return [None] * len(truth) if scores is None else [float(score) for score in scores]

    def _components(self, cell: TableCell) -> Tensor:
        """Of every image that was fed, the image that it holds most of: itself where nothing was mixed."""
        batches, observed = self.case.spec.victims, self.folder.tensors(self.key_of(update_of(cell)))
        originals = [self.case.batch(victim).x for victim in range(batches)]
        return torch.cat([observed.get(f"{v}/0/secret/component", originals[v]) for v in range(batches)])

    def _accuracy(self, cell: TableCell, stored: StoredCell) -> Value | str:
        """Per seed, the mean of the last evaluations up to the round that the cell names."""
        curves = by_seed(stored, "acc_test" if cell.figure == "pdm" else cell.figure)
        shares = [last_mean(curve[: cell.rounds(len(curve))]) for curve in curves]
        measured = [share for share in shares if share is not None]
        if not measured or len(measured) < len(shares):
            return "not measured in this round"
        accuracy = of_trainings(measured)
        if cell.figure != "pdm":
            return accuracy
        base = self.value(undefended(cell))
        if isinstance(base, str) or not base.mean:
            return "no undefended accuracy to compare with"
        if len(base.each) != len(accuracy.each) or not base.each:
            return Value(100 * (base.mean - accuracy.mean) / base.mean, math.inf)
        return Value.of(100 * (b - a) / base.mean for a, b in zip(accuracy.each, base.each, strict=True))


def _stored_score(figure: str, image: ImageScores) -> float | None:
    if figure == "asr":
        return 100.0 * image.recognisable
    if figure == "identified":
        return 100.0 * bool(image.identified)
    number: float | None = getattr(image, figure)
    return number
