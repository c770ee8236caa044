"""What a training run left behind: one entry a round in every curve, what went wrong, and the last state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gradveil.core.types import Tensors


@dataclass
class History:
    """Curves of a training run. Rounds in which nothing was measured hold None."""

    acc_test: list[float | None] = field(default_factory=list)
    acc_train: list[float | None] = field(default_factory=list)  # on all clients' own images, as they were
    acc_sensitive: list[float | None] = field(default_factory=list)  # on the defended clients' own images
    loss: list[float | None] = field(default_factory=list)  # mean cross entropy on all clients' own images
    seconds_per_round: list[float] = field(default_factory=list)  # clients and aggregation, without evaluation
    bytes_sent: list[int] = field(default_factory=list)  # all clients together, dense, 4 bytes an entry
    nonzero_sent: list[int] = field(default_factory=list)  # how many of those entries are not zero
    gradient_cosine: list[float | None] = field(default_factory=list)  # of the first defended client
    events: list[dict[str, Any]] = field(default_factory=list)  # round (from 1), client or None, what
    seconds_prepare: float = 0.0  # defenses preparing themselves and protecting data, before the first round
    state: Tensors = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return len(self.acc_test)

    @property
    def seconds(self) -> float:
        return self.seconds_prepare + sum(self.seconds_per_round)

    def rounds_to(self, target: float) -> int | None:
        """How many rounds until the test accuracy first reached `target`; None if it never did."""
        return next((i + 1 for i, a in enumerate(self.acc_test) if a is not None and a >= target), None)

    def add(self, **entry: Any) -> None:
        """One more round: a value for every curve."""
        for name, value in entry.items():
            broken = isinstance(value, float) and not math.isfinite(value)
            getattr(self, name).append(None if broken else value)

    def to_json(self) -> dict[str, Any]:
        """All but the state."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "state"}
        return {"rounds": self.rounds, "seconds": self.seconds, **plain}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], state: Tensors) -> History:
        known = {f.name for f in fields(cls)} - {"state"}
        return cls(**{k: v for k, v in value.items() if k in known}, state=state)
