"""What a defense costs: federated trainings of the audited model under it, at a learning rate of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from scipy.special import stdtrit
from torch import nn

from gradveil import models
from gradveil.auditing.case import Case
from gradveil.auditing.notices import is_near_chance
from gradveil.auditing.spec import CONTROL
from gradveil.auditing.utility import LAST, VALIDATION, UtilityTraining, in_words, sends_as_audited
from gradveil.auditing.work import Work
from gradveil.core.errors import UserError
from gradveil.core.loops import Loop
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.data import DataSet
from gradveil.federation import FederationPlan, History, train
from gradveil.storage.run_folder import Curve, Outcome, StoredCell
from gradveil.summary import UtilityRow

VALIDATED = "acc_validation"  # with the factor on the learning rate behind it
BEYOND, MOST_BEYOND = 4, 3  # factor between learning rates beyond the grid, and how many of them are tried
CURVES = ("acc_test", "acc_train", "acc_sensitive", "seconds_per_round", "cpu_seconds_per_round")


@settings
class WithoutDefended(FederationPlan):
    """The same federation, but the clients that would be defended never take part."""

    def chosen(self, round: int) -> list[int]:
        return [client for client in super().chosen(round) if client >= self.num_defended]


class CostTrainings:
    """The trainings of one utility cell. Those of one seed differ between cells in nothing but the defense."""

    def __init__(self, work: Work, training: UtilityTraining):
        self.work, self.case, self.training = work, work.case, training
        self._plan = utility_plan(work.case)
        self._short = dataclasses.replace(self._plan, rounds=-(-self._plan.rounds // 2))
        self._tried = len(training.factors) if len(training.factors) > 1 else 0
        # Without the defended clients is another question only where others remain, and the same for every defense.
        self._absent = work.cell.defense == CONTROL and self._plan.num_defended < self._plan.clients
        self._final = training.seeds * (1 + self._absent) * self._plan.rounds
        self._done, self._rounds = 0, self._final + self._tried * self._short.rounds

    def run(self) -> Outcome:
        """The trainings at the chosen rate; at the next smaller one where a model that learnt in the choice does not now."""
        chosen: dict[str, Curve] = {}
        first, *smaller = self._rates(chosen)
        outcome = self._trained(first)
        for rate in smaller:
            if not any(map(self._is_near_chance, by_seed(outcome, "acc_train"))):
                break
            self._rounds += self._final
            outcome = self._trained(rate)
        return outcome.model_copy(update={"history": chosen | outcome.history})

    def _trained(self, server_lr: float) -> Outcome:
        """The curves of later trainings of the same kind have their number behind the name."""
        curves: dict[str, Curve] = {}
        events: list[dict[str, int | str | None]] = []
        for turn in Loop(self.training.seeds, shared=True):
            plan = dataclasses.replace(self._plan, seed=self._plan.seed + turn, server_lr=server_lr)
            number = f"@{turn}" if turn else ""
            history = self._train(turn, plan, self.case.data)
            curves |= {f"{name}{number}": tuple(getattr(history, name)) for name in CURVES}
            events += [{**asdict(event), "seed": plan.seed} for event in history.events]
            if self._absent:
                absent = WithoutDefended(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})
                curves[f"acc_absent{number}"] = tuple(self._train(turn, absent, self.case.data).acc_test)
        return Outcome(history=curves, events=tuple(events), server_lr=server_lr)

    def _rates(self, curves: dict[str, Curve]) -> list[float]:
        """The server's learning rates to train with, by the accuracy on validation images after half of the rounds.

        First the best: a worse one without a defense would hide what a defense costs. Then the smaller ones that teach the
        model, best first, for where the best fails after all. Where it is the largest or the smallest of the grid, rates beyond
        the grid are tried too: noise wants small ones, and a model that learns nothing without a defense has no cost.
        """
        factors, accuracies = self.training.factors, dict[float, float]()
        if not self._tried:
            return [factors[0]]
        data, plan = _with_validation(self.case.data, self._short)

        def attempt(factor: float) -> None:
            curve = tuple(self._train(0, dataclasses.replace(plan, server_lr=factor), data).acc_test)
            curves[f"{VALIDATED}@{factor:g}"] = curve
            accuracies[factor] = -1.0 if (accuracy := last_mean(curve)) is None else accuracy

        def learns(factor: float) -> bool:
            return accuracies[factor] >= 0 and not self._is_near_chance(curves[f"{VALIDATED}@{factor:g}"])

        for place in Loop(self._tried, shared=True):
            attempt(factors[place])
        best = max(accuracies, key=accuracies.__getitem__)
        for turn in range(MOST_BEYOND):
            smallest, largest = min(accuracies), max(accuracies)
            if accuracies[best] < 0 or (learns(best) and best not in (smallest, largest)):
                break
            larger = best == largest if learns(best) else turn % 2 == 0  # where none teaches anything, both ways
            self._rounds += self._short.rounds
            attempt(BEYOND * largest if larger else smallest / BEYOND)
            best = max(accuracies, key=accuracies.__getitem__)
        learnt = list(filter(learns, accuracies))
        if best not in learnt:
            return [best]
        return [best, *sorted((f for f in learnt if f < best), key=accuracies.__getitem__, reverse=True)]

    def _is_near_chance(self, curve: Curve) -> bool:
        accuracy = last_mean(curve)
        return accuracy is not None and is_near_chance(accuracy, self.case.data.num_classes)

    def _train(self, turn: int, plan: FederationPlan, data: DataSet) -> History:
        def progress(stage: str, done: int, total: int) -> None:
            if stage.startswith("training"):
                self.work.progress(self._done + done, self._rounds)

        module, loss, cache = self._module(turn), self.case.spec.loss, self.work.folder.cache
        history = train(module, data, self.work.defense, plan, loss=loss, cache=cache, progress=progress)
        self._done += plan.rounds
        return history

    def _module(self, turn: int) -> nn.Module:
        """The audited model, or another. Later trainings begin with other weights, unless the weights are the user's."""
        spec, data = self.case.spec, self.case.data
        name = self.training.model or spec.model
        if self.training.model is None and (spec.weights is not None or not isinstance(name, str)):
            return self.case.server
        return models.build(name, input_shape=data.input_shape, num_classes=data.num_classes, seed=spec.seed + turn)


def utility_plan(case: Case) -> FederationPlan:
    """The first training that measures the cost in this case."""
    assert case.spec.utility is not None
    return case.spec.utility.plan(case.training, case.spec.batch_size, len(case.data.private), case.spec.seed)


def by_seed(cell: Outcome, curve: str) -> list[Curve]:
    """The curves of this name of all trainings."""
    return [values for name, values in cell.history.items() if name.partition("@")[0] == curve]


def last_mean(curve: Curve) -> float | None:
    """The mean of the last values that were measured: single ones change much from round to round."""
    measured = [value for value in curve if value is not None and not math.isnan(value)][-LAST:]
    return sum(measured) / len(measured) if measured else None


def _with_validation(data: DataSet, plan: FederationPlan) -> tuple[DataSet, FederationPlan]:
    """The data with some of the clients' images in place of the test part, and the plan for those that remain.

    Clients become fewer where only some take part in a round, so that each holds as many images; else each holds fewer.
    """
    clients, images = plan.clients, plan.images_per_client or 1
    held = data.private[: clients * images]
    order = torch.randperm(len(held), generator=generator(plan.seed, "validation"))
    count = max(1, round(VALIDATION * len(held)))
    rest = held[order[count:].sort().values]
    if plan.sampled is not None or images * (1 - VALIDATION) < 1:
        clients = len(rest) // images
    else:
        images = len(rest) // clients
    if not clients or not images:
        raise UserError("the clients hold too few images to choose a learning rate; set --utility-lr-grid 1.")
    smaller = dataclasses.replace(
        plan,
        clients=clients,
        images_per_client=images,
        sampled=None if plan.sampled is None else min(plan.sampled, clients),
        defended=plan.defended if plan.defended == "all" else min(plan.num_defended, clients),
    )
    return dataclasses.replace(data, private=rest, test=held[order[:count]]), smaller


# -- the row of a summary ----------------------------------------------------------------------------------------------


def utility_row(case: Case, trained: StoredCell | None, clean: StoredCell | None) -> UtilityRow | None:
    """Accuracies, and what they and a round's time are against the undefended trainings of the same seeds."""
    training = case.spec.utility
    if trained is None or training is None:
        return None
    plan = utility_plan(case)
    accuracy, undefended = (_accuracies(cell, "acc_test") for cell in (trained, clean))
    kept = _ratio(_mean(accuracy), _mean(undefended))
    loss = PairedLoss.of(accuracy, undefended)
    return UtilityRow(
        acc_test=_mean(accuracy),
        acc_train=_mean(_accuracies(trained, "acc_train")),
        acc_sensitive=_mean(_accuracies(trained, "acc_sensitive")),
        seconds_per_round=_round_seconds(trained),
        pdm=None if kept is None else 100 * (1 - kept),
        std=loss.std if loss else None,
        low=loss.low if loss else None,
        high=loss.high if loss else None,
        overhead=_overhead(trained, clean),
        acc_absent=_mean(_accuracies(clean, "acc_absent")),
        model=training.model or case.names["model"],
        audited_model=training.model is None,
        audited_updates=sends_as_audited(plan, case.training, case.spec.batch_size),
        scope=in_words(plan),
        seeds=training.seeds,
        rounds=plan.rounds,
        lr=plan.lr,
        server_lr=trained.server_lr or 1.0,
        tried=tuple(float(name.partition("@")[2]) for name in trained.history if name.startswith(VALIDATED)) or (1.0,),
    )


@dataclass(frozen=True)
class PairedLoss:
    """How the lost percent of the undefended accuracy varies over seeds, each paired with its undefended training."""

    std: float
    low: float  # Student's 95% interval of the mean
    high: float

    @classmethod
    def of(cls, defended: Sequence[float], undefended: Sequence[float]) -> PairedLoss | None:
        """None for one seed, which tells nothing of the spread, or where a training has no accuracy."""
        if len(defended) != len(undefended) or len(defended) < 2 or not sum(undefended):
            return None
        lost = 100 * (np.array(undefended) - np.array(defended)) / np.mean(undefended)
        std, count = float(lost.std(ddof=1)), len(lost)
        half = float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
        return cls(std, float(lost.mean()) - half, float(lost.mean()) + half)


def _accuracies(trained: StoredCell | None, curve: str) -> list[float]:
    """Per seed, at the end of its training."""
    curves = by_seed(trained, curve) if trained else []
    return [mean for values in curves if (mean := last_mean(values)) is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _overhead(trained: StoredCell, clean: StoredCell | None) -> float | None:
    """By the time on the processor, which other work does not lengthen, where both trainings measured it."""
    by_processor = _ratio(*(_round_seconds(cell, "cpu_seconds_per_round") for cell in (trained, clean)))
    return by_processor or _ratio(_round_seconds(trained), _round_seconds(clean))


def _round_seconds(trained: StoredCell | None, curve: str = "seconds_per_round") -> float | None:
    """Of the median round: other work on the machine makes single rounds take many times as long."""
    curves = by_seed(trained, curve) if trained else []
    rounds = [seconds for curve in curves for seconds in curve if seconds is not None]
    return float(np.median(rounds)) if rounds else None


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None
