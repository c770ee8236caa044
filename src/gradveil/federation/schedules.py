"""How the learning rate moves from round to round: a factor on the given rate; rounds count from 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pydantic import Field

from gradveil.core.settings import settings
from gradveil.federation.named import choose


class Schedule(ABC):
    @abstractmethod
    def factor(self, round: int) -> float: ...


@settings
class Constant(Schedule):
    """The same rate in every round."""

    def factor(self, round: int) -> float:
        return 1.0


@settings
class Exponential(Schedule):
    """`gamma` to the power of the round. From round `restart` on it starts anew at `drop` times the first rate."""

    gamma: float = Field(0.99, gt=0, le=1)
    restart: int | None = Field(None, ge=1)
    drop: float = Field(0.1, gt=0, le=1)

    def factor(self, round: int) -> float:
        if self.restart is None or round < self.restart:
            return float(self.gamma**round)
        return float(self.drop * self.gamma ** (round - self.restart))


@settings
class StepDecay(Schedule):
    """Times `gamma` after every `every` rounds."""

    every: int = Field(30, ge=1)
    gamma: float = Field(0.1, gt=0, le=1)

    def factor(self, round: int) -> float:
        return float(self.gamma ** (round // self.every))


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "exponential": Exponential, "step": StepDecay}


def schedule(text: str) -> Schedule:
    """The schedule that `text` writes, such as `exponential:gamma=0.99`."""
    return choose("schedule", text, SCHEDULES)


# The federations of DCS2's accuracy tables, as arguments of `train`: ten clients, IID, one of them defended, one local
# epoch with batches of 64 and momentum 0.9. Rates and schedules are those of the public code.
_DCS2: dict[str, Any] = {
    "clients": 10,
    "defended": 1,
    "partition": "iid",
    "local_epochs": 1,
    "batch_size": 64,
    "momentum": 0.9,
}
_DECAY = "exponential:gamma=0.99"
DCS2: dict[str, dict[str, Any]] = {
    "mnist": {**_DCS2, "rounds": 200, "images_per_client": 200, "lr": 0.01, "schedule": _DECAY},
    "cifar10": {
        **_DCS2,
        "rounds": 50,
        "images_per_client": 2000,
        "lr": 0.01,
        "weight_decay": 1e-3,
        "schedule": f"{_DECAY},restart=30,drop=0.1",
    },
    "celeba": {**_DCS2, "rounds": 100, "images_per_client": 500, "lr": 0.001, "schedule": _DECAY},
    "tinyimagenet": {**_DCS2, "rounds": 50, "images_per_client": 2000, "lr": 0.01, "schedule": "constant"},
}
