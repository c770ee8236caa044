"""The federated training that measures what a defense costs: as audited, unless it is said otherwise.

Every update of it is of the audited kind, so that a defense acts on it as it does in the audit:
- Where single gradients are audited, the training is FedSGD: a client sends the gradient of a batch of the audited size.
  With FedAvg a defense would act on weight differences, where the same clipping norm or noise is another defense.
- Where weight differences are audited, a client holds as many images as an audited batch, and trains as audited.

The learning rate that is chosen for each defense is that of the server, so that no update is changed by it.
"""

import dataclasses
import math
from collections import Counter
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining, optimizer
from gradveil.core.settings import build, fields_of
from gradveil.core.text import plural
from gradveil.core.types import BatchSampling, Mode
from gradveil.federation import FederationPlan

VERSION = 4  # of how the cost is measured, here and in cost.py: raised when results change
CLIENTS = 10  # that take part in a round
IMAGES = 2000  # of all clients together
PASSES, LEAST_ROUNDS, MOST_ROUNDS = 5, 20, 300  # so many passes over all images, within these numbers of rounds
MEASURED = 20  # evaluations along a training
LAST = 3  # evaluations whose mean is the accuracy
VALIDATION = 0.2  # share of the clients' images on which a learning rate is chosen


def _grid_text(value: object) -> object:
    """YAML may hold a list or one number."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return value if isinstance(value, str) else ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)


class UtilityTraining(BaseModel):
    """Settings of that training. None: as in the audit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="Another model. [the audited one]")
    seeds: int = Field(3, ge=1, description="Trainings under each defense; the n-th ones are alike in all but the defense.")
    lr_grid: Annotated[str, BeforeValidator(_grid_text)] = Field(
        "0.25,1,4", description="Factors on the learning rate; the best is chosen for each defense."
    )
    rounds: int | None = Field(None, ge=1, description="Its rounds. [5 passes over all images: 20 to 300]")
    clients: int | None = Field(None, ge=1, description="Its clients. [10, or 2000 images in all]")
    images: int | None = Field(None, ge=1, description="Images per client. [200, or the audited batch]")
    sampled: int | None = Field(None, ge=1, description="Clients that take part in a round. [10]")
    partition: str = Field("iid", description="iid, dirichlet:alpha=X, classes:per_client=N")
    fedsgd: bool | None = Field(None, description="Clients send single gradients. [as audited]")
    local_epochs: int | None = Field(None, ge=1, description="Passes over a client's images per round. [as audited]")
    batch_size: int | None = Field(None, ge=1, description="Images in a mini-batch. [as audited]")
    accumulate: int | None = Field(None, ge=1, description="Mini-batches per step. [as audited]")
    sampling: BatchSampling | None = Field(None, description="shuffled or poisson. [as audited]")
    optimizer: str | None = Field(None, description="Of local training. [as audited]")
    lr: float | None = Field(None, gt=0, description="Its learning rate, around which the grid lies. [as audited, or 0.05]")
    momentum: float | None = Field(None, ge=0, lt=1, description="Of the same optimizer. [as audited; 0.9 with FedSGD]")
    weight_decay: float | None = Field(None, ge=0, description="Of the same optimizer. [as audited]")
    mode: Mode | None = Field(None, description="train or eval. [as audited]")
    schedule: str = Field("constant", description="exponential:gamma=X, step:every=N or milestones:at=N/M.")
    evaluate_every: int | None = Field(None, ge=1, description="Evaluate after so many rounds. [20 times]")
    # Defenses that craft images cost much.
    defended: Literal["all"] | Annotated[int, Field(ge=1)] = Field("all", description="all, or how many clients.")

    @field_validator("lr_grid")
    @classmethod
    def _readable(cls, value: str) -> str:
        _factors(value)
        return value

    @property
    def factors(self) -> tuple[float, ...]:
        """On the learning rate, the one nearest to 1 first."""
        return _factors(self.lr_grid)

    def plan(self, audited: LocalTraining, batch_size: int, available: int, seed: int) -> FederationPlan:
        """All of it, for an audit of batches of this size; with as many clients and images as are available."""
        fedsgd = audited.kind == "gradient" if self.fedsgd is None else self.fedsgd
        differences = not fedsgd and audited.kind == "delta"
        images = min(self.images or (batch_size if differences else IMAGES // CLIENTS), available)
        many = min(IMAGES, available) // images if differences else CLIENTS
        clients = min(self.clients or max(CLIENTS, many), available)
        images = min(images, available // clients)
        sampled = self.sampled or (CLIENTS if self.clients is None and clients > CLIENTS else None)
        values: dict[str, object] = {"clients": clients, "images_per_client": images, "sampled": sampled, "fedsgd": fedsgd}
        values |= {"seed": seed, "mode": audited.mode, "frozen": () if self.model else audited.frozen}
        if differences:
            values |= {"local_epochs": audited.epochs, "lr": audited.lr, "accumulate": audited.accumulate}
            values |= {"batch_size": audited.batch_size or batch_size, "optimizer": self._optimizer(audited)}
            values["sampling"] = audited.sampling
        elif fedsgd:
            values["batch_size"] = batch_size
        names = {field.name for field in dataclasses.fields(FederationPlan)} - {"clients", "sampled", "fedsgd"}
        values |= {name: value for name, value in self if name in names and value is not None and name != "optimizer"}
        if self.optimizer is not None:
            values["optimizer"] = self.optimizer
        plan = build(FederationPlan, {**values, "rounds": 1, "evaluate_every": 1}, of="utility")
        rounds = self.rounds or self._rounds(plan)
        return dataclasses.replace(plan, rounds=rounds, evaluate_every=self.evaluate_every or math.ceil(rounds / MEASURED))

    def _optimizer(self, audited: LocalTraining) -> str:
        """The audited one with all its settings, since a plan has other defaults."""
        stated = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        method = optimizer(audited.optimizer)
        settings = {name: getattr(method, name) for name in fields_of(type(method))}
        settings |= {name: value for name, value in stated.items() if value is not None}
        return f"{audited.optimizer.partition(':')[0]}:{','.join(f'{key}={value}' for key, value in settings.items())}"

    @staticmethod
    def _rounds(plan: FederationPlan) -> int:
        each = plan.images_per_client or 1
        seen = min(plan.batch_size or each, each) if plan.fedsgd else each * plan.local_epochs
        rounds = math.ceil(PASSES * plan.clients * each / ((plan.sampled or plan.clients) * seen))
        return min(MOST_ROUNDS, max(LEAST_ROUNDS, rounds))


def _factors(text: str) -> tuple[float, ...]:
    try:
        factors = {float(part) for part in text.split(",")}
    except ValueError:
        factors = set()
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise UserError(f"lr_grid={text}: write positive factors, such as 0.25,1,4; 1 alone chooses nothing.")
    return tuple(sorted(factors, key=lambda factor: (abs(math.log(factor)), factor)))


def sends_as_audited(plan: FederationPlan, audited: LocalTraining, batch_size: int) -> bool:
    """Whether a client of the plan sends what an audited one does: computed alike, from as many images."""
    return _sent(plan) == _sent(UtilityTraining().plan(audited, batch_size, IMAGES + batch_size, plan.seed))


def _sent(plan: FederationPlan) -> tuple[object, ...]:
    """All that a client's update depends on. With FedSGD the schedule is the server's."""
    training, images = plan.local_training(0), plan.batch_size if plan.fedsgd else plan.images_per_client
    alike = dataclasses.replace(training, frozen=(), optimizer="sgd")
    return alike, optimizer(training.optimizer), images, "" if plan.fedsgd else plan.schedule


def rounds_of_an_image(plan: FederationPlan) -> int:
    """In how many rounds of this training the same image takes part, at the most."""
    taken = Counter(client for round in range(plan.rounds) for client in plan.chosen(round))
    most, images = max(taken.values()), plan.images_per_client
    if not plan.fedsgd or images is None or plan.partition != "iid":  # else a client may have fewer images
        return most
    passes = math.ceil(plan.rounds / math.ceil(images / min(plan.batch_size or images, images)))
    return min(most, passes)  # every pass takes each image once


def in_words(plan: FederationPlan) -> str:
    """What is trained, for the scope of an accuracy."""
    method = "FedSGD" if plan.fedsgd else f"FedAvg ({plan.local_training(0).in_words(plan.images_per_client or 0)})"
    sent = f" with batches of {plural(plan.batch_size or 0, 'image')}, model in {plan.mode} mode" if plan.fedsgd else ""
    part = f", {plan.sampled} per round" if plan.sampled else ""
    held = plural(plan.images_per_client or 0, "image")
    who = "" if plan.defended == "all" else f", {plural(plan.num_defended, 'defended client')}"
    return f"{method}{sent}, {plural(plan.clients, 'client')} with {held} each{part}{who}, {plural(plan.rounds, 'round')}"
