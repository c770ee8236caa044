"""How the learning rate changes from round to round: a factor on the first rate. Rounds are counted from 0."""

from abc import ABC, abstractmethod

from pydantic import Field

from gradveil.core.settings import choose, settings


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
    """`gamma` to the power of the round. At round `restart` it begins again, at `drop` times the first rate."""

    gamma: float = Field(default=0.99, gt=0, le=1)
    restart: int | None = Field(default=None, ge=1)
    drop: float = Field(default=0.1, gt=0, le=1)

    def factor(self, round: int) -> float:
        if self.restart is None or round < self.restart:
            return float(self.gamma**round)
        return float(self.drop * self.gamma ** (round - self.restart))


@settings
class StepDecay(Schedule):
    """Multiplied by `gamma` after every `every` rounds."""

    every: int = Field(default=30, ge=1)
    gamma: float = Field(default=0.1, gt=0, le=1)

    def factor(self, round: int) -> float:
        return float(self.gamma ** (round // self.every))


@settings
class Milestones(Schedule):
    """Multiplied by `gamma` at each of these rounds: `milestones:at=100/150`."""

    at: tuple[int, ...] = (100, 150)
    gamma: float = Field(default=0.1, gt=0, le=1)

    def factor(self, round: int) -> float:
        return float(self.gamma ** sum(round >= milestone for milestone in self.at))


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "exponential": Exponential,
    "step": StepDecay,
    "milestones": Milestones,
}


def schedule(text: str) -> Schedule:
    """The schedule that `text` writes, such as `exponential:gamma=0.99`."""
    return choose("schedule", text, SCHEDULES)
