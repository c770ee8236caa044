"""Networks that are trained once and kept in a file; a training that is killed goes on where its last checkpoint is.

Beside the file of a network that is not finished lies `NAME.partial.safetensors`: parameters, the optimizer's and the
schedule's state, random streams and the number of steps, so that what comes of it is what an undisturbed training gives,
bit by bit. It is removed when the network is stored. One that is damaged or of other code is passed over.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.types import Tensors
from gradveil.storage.files import remove_leftovers, room_for, write_tensors

EVERY = 10.0  # seconds of work between two checkpoints


def trained_once(file: Path | None, train: Callable[[Path | None], Tensors]) -> Tensors:
    """The tensors of `file`; where there is none, what `train` makes, stored there. It is given a checkpoint's path.

    Another process that wants the very same waits for it.
    """
    if file is None:
        return train(None)
    partial = file.with_suffix(".partial.safetensors")
    with room_for(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if file.exists():
                found = _read(file)
            else:
                for target in (file, partial):
                    remove_leftovers(file.parent, target.name)
                found = train(partial)
                write_tensors(file, found)
            partial.unlink(missing_ok=True)
    return found


def _read(file: Path) -> Tensors:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}); remove it.") from None


class Shuffled:
    """Rows in batches, pass after pass without end, each pass in a new order."""

    def __init__(self, rows: int, batch: int, rng: torch.Generator):
        self.rows, self.batch, self.rng = rows, batch, rng
        self.left = torch.empty(0, dtype=torch.long)

    def draw(self) -> Tensor:
        if not len(self.left):
            self.left = torch.randperm(self.rows, generator=self.rng)
        drawn, self.left = self.left[: self.batch], self.left[self.batch :]
        return drawn

    def steps(self, passes: int) -> int:
        """How many batches so many passes are."""
        return passes * -(-self.rows // self.batch)

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"].to(self.left)


def resumable(steps: int, checkpoint: Path | None, parts: Sequence[Any]) -> Iterator[int]:
    """The numbers of the steps that are still to be done.

    `parts` is all that a step changes: modules, optimizers, schedules, `Shuffled`, random generators. They are set to
    where the checkpoint is, and stored again as the loop goes on.
    """
    begin = _restore(checkpoint, parts, steps) if checkpoint else 0
    saved = time.monotonic()
    for step in range(begin, steps):
        yield step
        if checkpoint and time.monotonic() - saved >= EVERY:
            _save(checkpoint, parts, step + 1)
            saved = time.monotonic()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _save(checkpoint: Path, parts: Sequence[Any], done: int) -> None:
    tensors: Tensors = {}
    plain = json.dumps([done, [_packed(_state(part), str(i), tensors) for i, part in enumerate(parts)]])
    write_tensors(checkpoint, tensors, {"state": plain, "sha256": _digest(plain, tensors)})


def _restore(checkpoint: Path, parts: Sequence[Any], steps: int) -> int:
    """Set the parts to where the checkpoint is, if it is whole and fits them; the steps that are done."""
    if not checkpoint.exists():
        return 0
    fresh = [copy.deepcopy(_state(part)) for part in parts]
    try:
        with safe_open(checkpoint, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if metadata["sha256"] != _digest(metadata["state"], tensors):
            raise ValueError("it is damaged")
        done, states = json.loads(metadata["state"])
        if not 0 < done <= steps:
            raise ValueError("it is of a longer training")
        for part, state in zip(parts, states, strict=True):
            _load(part, _unpacked(state, tensors))
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        # Of another version, or damaged: nothing is lost but time. Some parts may have been set already.
        for part, state in zip(parts, fresh, strict=True):
            _load(part, state)
        return 0
    return int(done)


def _state(part: Any) -> Any:
    return {"rng": part.get_state()} if isinstance(part, torch.Generator) else part.state_dict()


def _load(part: Any, state: Any) -> None:
    part.set_state(state["rng"]) if isinstance(part, torch.Generator) else part.load_state_dict(state)


def _packed(value: Any, name: str, tensors: Tensors) -> Any:
    """As JSON can hold it: a dict as its pairs, since an optimizer numbers its parameters; a tensor as its name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_packed(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    return value


def _unpacked(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _unpacked(item, tensors) for key, item in value["dict"]}
    return [_unpacked(item, tensors) for item in value] if isinstance(value, list) else value


def _digest(plain: str, tensors: Tensors) -> str:
    digest = hashlib.sha256(plain.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
