"""The folder of a training run: after every round the state with all that resuming needs, and the curves for users.

`state.safetensors` holds the model's state under its usual names. Its metadata holds the configuration and the history
of the same round, so that one rename replaces all of it. `history.json` is written after it, for programs.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from gradveil.core.errors import UserError
from gradveil.core.hashing import digest
from gradveil.core.losses import DEFAULT
from gradveil.federation.history import History
from gradveil.federation.rounds import Federation, OptimizerMemory, Server
from gradveil.storage.files import write_json, write_tensors
from gradveil.storage.reading import parse_json
from gradveil.storage.tensor_file import open_tensors

STATE, HISTORY = "state.safetensors", "history.json"
_MEMORY = re.compile(r"server-(\w+)/(.*)")  # of the server's optimizer; names of a module hold no slash
_HASHED = {"model": "another model", "images": "other images"}


class Checkpoint:
    """Stores a run after each round, and resumes it."""

    def __init__(self, folder: Path, federation: Federation, loss: str = DEFAULT):
        self.folder = folder
        images = {"x": federation.images.x, "y": federation.images.y, "test": federation.data.test.y}
        self.configuration: dict[str, object] = {
            **federation.plan.to_json(),
            "data": federation.data.name,
            "defense": federation.defense.spec,
            "model": digest(repr(federation.module), federation.state)[:16],
            "images": digest("", images)[:16],
            **({"loss": loss} if loss != DEFAULT else {}),
        }

    def load(self) -> tuple[History, OptimizerMemory]:
        """The history with its state, and the memory of the server's optimizer; both empty where nothing is stored."""
        path = self.folder / STATE
        if not path.exists():
            if (self.folder / HISTORY).exists():
                raise UserError(f"{self.folder} holds a {HISTORY} but no {STATE}, so it cannot go on; choose another folder.")
            return History(), {}
        try:
            with open_tensors(path) as file:
                metadata, tensors = file.metadata, file.tensors()
            configuration, record = (parse_json(metadata[key], path) for key in ("configuration", "history"))
            if not isinstance(configuration, dict) or not isinstance(record, dict):
                raise TypeError("no mapping")
            kept = {n: match for n in tensors if (match := _MEMORY.fullmatch(n))}
            state = {n: t for n, t in tensors.items() if n not in kept}
            history = History.from_json(record, state)
        except (UserError, KeyError, TypeError, ValueError):
            raise UserError(f"{path} is not the state of a training run; choose another folder.") from None
        self._compare(configuration)
        self._write_history(record)  # a kill may have come between the two files
        memory: OptimizerMemory = {}
        for name, match in kept.items():
            memory.setdefault(match[1], {})[match[2]] = tensors[name]
        return history, memory

    def save(self, history: History, server: Server) -> None:
        kept = {f"server-{kind}/{name}": t for kind, tensors in server.memory.items() for name, t in tensors.items()}
        tensors = {**server.state, **kept}
        record = history.to_json()
        metadata = {"configuration": json.dumps(self.configuration), "history": json.dumps(record, allow_nan=False)}
        write_tensors(self.folder / STATE, tensors, metadata)
        self._write_history(record)

    def _write_history(self, record: Mapping[str, object]) -> None:
        write_json(self.folder / HISTORY, {"configuration": self.configuration, **record})

    def _compare(self, stored: Mapping[str, object]) -> None:
        for key, value in self.configuration.items():
            if stored.get(key) != value:
                difference = _HASHED.get(key) or f"{key}={str(stored.get(key))[:80]}, not {value}"
                raise UserError(
                    f"{self.folder} holds a training run with {difference}; repeat its options, or choose another folder."
                )
