"""What a training run leaves behind: curves with one entry per round, events, and the last state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from gradveil.core.types import Tensors


@dataclass(frozen=True)
class Event:
    """Something that went wrong in one round (counted from 1), for one client or, with None, for all."""

    round: int
    client: int | None
    message: str


@validated(config=ConfigDict(arbitrary_types_allowed=True))
class History:
    """Curves of a training run. Rounds in which nothing was measured hold None."""

    acc_test: list[float | None] = field(default_factory=list)
    acc_train: list[float | None] = field(default_factory=list)  # on the original images of all clients
    acc_sensitive: list[float | None] = field(default_factory=list)  # on the original images of defended clients
    loss: list[float | None] = field(default_factory=list)  # mean cross entropy on the images of all clients
    seconds_per_round: list[float] = field(default_factory=list)  # clients and aggregation, without evaluation
    cpu_seconds_per_round: list[float] = field(default_factory=list)  # of this process, which other work does not lengthen
    bytes_sent: list[int] = field(default_factory=list)  # all clients together, dense, 4 bytes per entry
    nonzero_sent: list[int] = field(default_factory=list)  # how many of those entries are not zero
    gradient_cosine: list[float | None] = field(default_factory=list)  # of the first defended client
    events: list[Event] = field(default_factory=list)
    seconds_prepare: float = 0.0  # preparing defenses and protecting data, before the first round
    state: Tensors = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return len(self.acc_test)

    @property
    def seconds(self) -> float:
        return self.seconds_prepare + sum(self.seconds_per_round)

    def rounds_to(self, target: float) -> int | None:
        """The number of rounds until the test accuracy first reached `target`; None if it never did."""
        return next((i + 1 for i, a in enumerate(self.acc_test) if a is not None and a >= target), None)

    def add(self, **entry: float | None) -> None:
        """Append one round: one value per curve. Values that are not finite become None."""
        for name, value in entry.items():
            getattr(self, name).append(value if value is None or math.isfinite(value) else None)

    def to_json(self) -> dict[str, object]:
        """All but the state."""
        curves = {name: value for name, value in vars(self).items() if name != "state"}
        return {"rounds": self.rounds, "seconds": self.seconds, **curves, "events": [asdict(e) for e in self.events]}

    @classmethod
    def from_json(cls, value: Mapping[str, object], state: Tensors) -> History:
        """What `to_json` wrote, checked, with the state that belongs to it."""
        return TypeAdapter(cls).validate_python({**value, "state": state})
