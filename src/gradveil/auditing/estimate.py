"""How long the cells of a plan may take: one iteration is timed on the model at hand, the rest is reckoned."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gradveil import models
from gradveil.attacks.budget import Workload
from gradveil.auditing.case import Case
from gradveil.auditing.cells import one_thread
from gradveil.auditing.plan import Cell
from gradveil.auditing.spec import CONTROL
from gradveil.core.gradients import ModelFunction
from gradveil.core.types import Tensors

_OVERHEAD = 1.0  # seconds of any cell: reading, scoring, writing


class Estimate:
    """Seconds per cell, by rule of thumb: good for choosing a budget, not for a promise."""

    def __init__(self, case: Case):
        self.case = case
        self._task, self._state = case.task(case.defenses[CONTROL])
        shape = (case.spec.victims, case.spec.batch_size, *case.data.input_shape)
        x, y = torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.long)
        with one_thread():
            self._iteration = _seconds(lambda: _match(self._task.model, self._state, x, y, case))

    def seconds(self, cell: Cell) -> float:
        if cell.kind == "attack":
            return _OVERHEAD + self._evaluations(cell) * self._iteration
        if cell.kind == "utility" and self.case.spec.utility:
            how = self.case.spec.utility
            return _OVERHEAD + how.rounds * how.clients * how.images * self._an_image(how.model)
        if cell.kind == "train":
            rounds, epochs = self.case.spec.trained_rounds, self.case.spec.trained_epochs
            images = 2000 * rounds + len(self.case.data.private) * epochs
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
            shape, classes = data.input_shape, data.num_classes
            function = ModelFunction(models.build(model, input_shape=shape, num_classes=classes))
        x, y = torch.zeros(64, *data.input_shape), torch.zeros(64, dtype=torch.long)
        state = function.state()
        with one_thread():
            return _seconds(lambda: function.gradient(state, x, y)) / 64


def _match(function: ModelFunction, state: Tensors, x: torch.Tensor, y: torch.Tensor, case: Case) -> None:
    x = x.clone().requires_grad_()
    found = function.updates(state, x, y, case.training)
    torch.autograd.grad(sum((g**2).sum() for g in found.values()), x)  # type: ignore[arg-type]


def _seconds(work: Callable[[], object]) -> float:
    """The faster of two runs, after a first one that warms up."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times[1:])
