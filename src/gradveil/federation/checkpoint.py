"""A training run's folder: after every round the state with all that is needed to go on, and the curves for others.

`state.safetensors` holds the model's state under its own names, and in its metadata the configuration and the history
of the same round, so that one rename makes all of it new. `history.json` is written after it, for programs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.losses import DEFAULT
from gradveil.core.types import Tensors
from gradveil.federation.history import History
from gradveil.federation.rounds import Federation, Server
from gradveil.storage.files import write_json, write_tensors

STATE, HISTORY = "state.safetensors", "history.json"
_VELOCITY = "server-velocity/"  # a module's own names hold no slash where this one has it
_HASHED = {"model": "another model", "images": "other images"}


class Checkpoint:
    """Stores a run round by round, and finds where it stopped."""

    def __init__(self, folder: Path, federation: Federation, loss: str = DEFAULT):
        self.folder = folder
        self.configuration: dict[str, Any] = {
            **federation.plan.to_json(),
            "data": federation.data.name,
            "defense": federation.defense.spec,
            "model": _digest(repr(federation.module), *federation.state.values()),
            "images": _digest("", federation.images.x, federation.images.y, federation.data.test.y),
            **({"loss": loss} if loss != DEFAULT else {}),
        }

    def load(self) -> tuple[History, Tensors]:
        """The history so far, with its state, and the server's velocity; an empty history where there is none."""
        path = self.folder / STATE
        if not path.exists():
            if (self.folder / HISTORY).exists():
                raise UserError(
                    f"{self.folder} holds a {HISTORY} but no {STATE}, so it cannot go on; choose another folder."
                )
            return History(), {}
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            configuration = json.loads(metadata["configuration"])
            history = json.loads(metadata["history"])
        except (SafetensorError, KeyError, ValueError, OSError):
            raise UserError(f"{path} is not the state of a training run; choose another folder.") from None
        self._compare(configuration)
        velocity = {n.removeprefix(_VELOCITY): t for n, t in tensors.items() if n.startswith(_VELOCITY)}
        state = {n: t for n, t in tensors.items() if not n.startswith(_VELOCITY)}
        return History.from_json(history, state), velocity

    def save(self, history: History, server: Server) -> None:
        tensors = {**server.state, **{_VELOCITY + name: t for name, t in server.velocity.items()}}
        record = history.to_json()
        metadata = {"configuration": json.dumps(self.configuration), "history": json.dumps(record, allow_nan=False)}
        write_tensors(self.folder / STATE, tensors, metadata)
        write_json(self.folder / HISTORY, {"configuration": self.configuration, **record})

    def _compare(self, stored: dict[str, Any]) -> None:
        for key, value in self.configuration.items():
            if stored.get(key) != value:
                found = _HASHED.get(key) or f"{key}={stored.get(key)}, not {value}"
                raise UserError(
                    f"{self.folder} holds a training run with {found}; repeat its options, or choose another folder."
                )


def _digest(text: str, *tensors: Tensor) -> str:
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
