"""What a federation does, in numbers: the part of a training run that every engine shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from pydantic import Field

from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.core.types import LocalTraining
from gradveil.federation.schedules import Schedule, schedule


@settings
class Plan:
    """Rounds of FedAvg, or with `fedsgd` of one gradient a client. Rounds and clients count from 0 in here."""

    rounds: int = Field(ge=1)
    clients: int = Field(default=10, ge=1)
    images_per_client: int | None = Field(default=200, ge=1)  # a mean, where shares are uneven; None: all there are
    sampled: int | None = Field(default=None, ge=1)  # how many clients take part in a round; None: all
    local_epochs: int = Field(default=1, ge=1)
    batch_size: int | None = Field(default=64, ge=1)
    lr: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    schedule: str = "constant"
    partition: str = "iid"
    fedsgd: bool = False
    defended: str | int = "all"  # or how many: the first so many clients
    seed: int = 0
    evaluate_every: int = Field(default=1, ge=1)
    cosine_every: int = Field(default=0, ge=0)  # compare the first defended update with the undefended one; 0: never
    deadline: float | None = Field(default=None, gt=0)  # seconds until a client without an answer misses the round

    def __post_init__(self) -> None:
        text = str(self.defended)
        if text != "all" and not (text.isdecimal() and int(text) <= self.clients):
            raise UserError(f"defended={text}: write all, or how many of the {self.clients} clients.")
        if self.sampled is not None and self.sampled > self.clients:
            raise UserError(f"sampled={self.sampled} asks for more clients than there are ({self.clients}).")
        if self.fedsgd and self.local_epochs != 1:
            raise UserError("FedSGD sends one gradient a round, so there are no local epochs to set.")
        self._schedule()

    def _schedule(self) -> Schedule:
        return schedule(self.schedule)

    @property
    def num_defended(self) -> int:
        return self.clients if self.defended == "all" else int(self.defended)

    def learning_rate(self, round: int) -> float:
        return self.lr * self._schedule().factor(round)

    def local_training(self, round: int) -> LocalTraining:
        """One gradient, or local SGD at this round's rate."""
        if self.fedsgd:
            return LocalTraining()
        return LocalTraining(
            epochs=self.local_epochs,
            batch_size=self.batch_size,
            lr=self.learning_rate(round),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def chosen(self, round: int) -> list[int]:
        """The clients that take part in a round."""
        if self.sampled is None:
            return list(range(self.clients))
        drawn = torch.randperm(self.clients, generator=generator(self.seed, round, "sample"))
        return sorted(drawn[: self.sampled].tolist())

    def evaluated(self, round: int) -> bool:
        return (round + 1) % self.evaluate_every == 0 or round + 1 == self.rounds

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "defended": self.num_defended}
