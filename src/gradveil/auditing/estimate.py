"""How long the cells of a plan may take: one iteration is timed on the model at hand, the rest is reckoned."""

import timeit
from collections.abc import Callable

import torch
from torch import Tensor

from gradveil import models
from gradveil.attacks.budget import Workload
from gradveil.auditing.case import Case
from gradveil.auditing.cells import one_thread
from gradveil.auditing.plan import Cell
from gradveil.auditing.spec import CONTROL
from gradveil.core.gradients import ModelFunction

_OVERHEAD = 1.0  # seconds of any cell: reading, scoring, writing


class Estimate:
    """Seconds per cell, by rule of thumb: good for choosing a budget, not for a promise."""

    def __init__(self, case: Case):
        self.case = case
        self._task, self._state = case.task(case.defenses[CONTROL])
        shape = (case.spec.victims, case.spec.batch_size, *case.data.input_shape)
        x, y = torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.long)
        with one_thread():
            self._iteration = _seconds(lambda: self._match(x.clone().requires_grad_(), y))

    def seconds(self, cell: Cell) -> float:
        spec = self.case.spec
        if cell.kind == "attack":
            return _OVERHEAD + self._evaluations(cell) * self._iteration
        if cell.kind == "utility" and (how := spec.utility):
            return _OVERHEAD + how.rounds * how.clients * how.images * self._an_image(how.model)
        if cell.kind == "train":
            images = 2000 * spec.trained_rounds + len(self.case.data.private) * spec.trained_epochs
            return _OVERHEAD + images * self._an_image(None)
        return _OVERHEAD

    def _evaluations(self, cell: Cell) -> int:
        """How often the updates of all victims are computed and compared, as the attack says."""
        case, public = self.case, self.case.public
        images = 0 if public is None else len(public)
        work = Workload(self._task, case.spec.budget, case.spec.batch_size, case.training, images)
        cost = case.attack(cell.attack).cost(work)
        return cost.iterations * cost.rows * case.spec.updates

    def _an_image(self, model: str | None) -> float:
        """Of training: a forward and a backward pass in a mini-batch."""
        data, function = self.case.data, self._task.model
        if model is not None:
            module = models.build(model, input_shape=data.input_shape, num_classes=data.num_classes)
            function = ModelFunction(module)
        x, y = torch.zeros(64, *data.input_shape), torch.zeros(64, dtype=torch.long)
        state = function.state()
        with one_thread():
            return _seconds(lambda: function.gradient(state, x, y)) / 64

    def _match(self, x: Tensor, y: Tensor) -> None:
        """One iteration of an attack that matches gradients."""
        updates = self._task.model.updates(self._state, x, y, self.case.training)
        torch.autograd.grad(sum((g**2).sum() for g in updates.values()), x)  # type: ignore[arg-type]


def _seconds(work: Callable[[], object]) -> float:
    """The faster of two runs, after a first one that warms up."""
    return min(timeit.repeat(work, number=1, repeat=3)[1:])
