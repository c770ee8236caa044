"""Networks that are trained once and stored in a file. A killed training continues from its last checkpoint.

While a training runs, `NAME.partial.safetensors` beside the file holds the state of modules, optimizer and schedule, the
random streams and the number of steps, so that the result equals that of an uninterrupted training, bit by bit. It is
removed when the network is stored. A checkpoint that is damaged or was written by other code is ignored.
"""

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.hashing import digest
from gradveil.core.loops import Loop, Part, State, is_sampled
from gradveil.core.types import Tensors
from gradveil.storage.files import make_private, remove_leftovers, room_for, write_tensors
from gradveil.storage.tensor_file import open_tensors

EVERY = 10.0  # seconds of work between two checkpoints


def trained_once(file: Path | None, train: Callable[[Path | None], Tensors]) -> Tensors:
    """The tensors of `file`. Where it does not exist, `train` makes them, and they are stored there.

    `train` receives the path of its checkpoint. Another process that asks for the same file waits. A file that was
    changed, or put in the place of another, is replaced: its hash covers its name.
    """
    if file is None or is_sampled():
        return train(None)
    partial = file.with_suffix(".partial.safetensors")
    with room_for(file):
        make_private(file.parent)
        with FileLock(f"{file}.lock", mode=0o600):
            stored = _stored(file) if file.exists() else None
            if stored is None:
                for target in (file, partial):
                    remove_leftovers(file.parent, target.name)
                stored = train(partial)
                write_tensors(file, stored, {"sha256": digest(file.name, stored)})
            partial.unlink(missing_ok=True)
    return stored


def _stored(file: Path) -> Tensors | None:
    with open_tensors(file) as content:
        tensors = content.tensors()
        if content.metadata.get("sha256") == digest(file.name, tensors):
            return tensors
    logging.getLogger("gradveil").warning("%s does not hold what was written; it is trained again.", file)
    return None


class Shuffled:
    """Row numbers in batches, without end, each pass over the rows in a new random order."""

    def __init__(self, rows: int, batch: int, rng: torch.Generator):
        self.rows, self.batch, self.rng = rows, batch, rng
        self.left = torch.empty(0, dtype=torch.long)

    def draw(self) -> Tensor:
        if not len(self.left):
            self.left = torch.randperm(self.rows, generator=self.rng)
        drawn, self.left = self.left[: self.batch], self.left[self.batch :]
        return drawn

    def steps(self, passes: int) -> int:
        """The number of batches in this number of passes."""
        return passes * -(-self.rows // self.batch)

    def state_dict(self) -> State:
        return {"left": self.left}

    def load_state_dict(self, state: State, /) -> None:
        self.left = state["left"].to(self.left)


def resumable(total: int, checkpoint: Path | None, parts: Sequence[Part]) -> Iterator[int]:
    """The numbers of the steps that remain.

    `parts` is everything that a step changes: modules, optimizers, schedules, `Shuffled`, random generators. They are
    set to the state of the checkpoint, and stored again every few seconds while the loop runs.
    """
    begin = _restore(checkpoint, parts, total) if checkpoint else 0
    saved = time.monotonic()
    for done in Loop(total - begin, shared=True):
        step = begin + done
        yield step
        if checkpoint and time.monotonic() - saved >= EVERY:
            _save(checkpoint, parts, step + 1)
            saved = time.monotonic()


def _save(checkpoint: Path, parts: Sequence[Part], done: int) -> None:
    tensors: Tensors = {}
    plain = json.dumps([done, [_packed(_state(part), str(i), tensors) for i, part in enumerate(parts)]])
    write_tensors(checkpoint, tensors, {"state": plain, "sha256": digest(plain, tensors)})


def _restore(checkpoint: Path, parts: Sequence[Part], steps: int) -> int:
    """Set the parts to the state of the checkpoint, if it is complete and fits them. Returns the steps that are done."""
    if not checkpoint.exists():
        return 0
    fresh = [copy.deepcopy(_state(part)) for part in parts]
    try:
        with open_tensors(checkpoint) as file:
            metadata, tensors = file.metadata, file.tensors()
        if metadata["sha256"] != digest(metadata["state"], tensors):
            raise ValueError("damaged")
        done, states = json.loads(metadata["state"])  # what the hash is of
        if not 0 < done <= steps:
            raise ValueError("from a longer training")
        for part, state in zip(parts, states, strict=True):
            _load(part, {key: _unpacked(value, tensors) for key, value in state["dict"]})
    except (UserError, ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        # Another version, or damaged: only time is lost. Some parts may have been set already.
        for part, state in zip(parts, fresh, strict=True):
            _load(part, state)
        return 0
    return int(done)


def _state(part: Part) -> State:
    return {"rng": part.get_state()} if isinstance(part, torch.Generator) else part.state_dict()


def _load(part: Part, state: State) -> None:
    part.set_state(state["rng"]) if isinstance(part, torch.Generator) else part.load_state_dict(state)


def _packed(value: object, name: str, tensors: Tensors) -> object:
    """A value as JSON can hold it: a dict as pairs, since an optimizer has numbers as keys; a tensor as its name."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_packed(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    return value


def _unpacked(value: object, tensors: Tensors) -> object:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _unpacked(item, tensors) for key, item in value["dict"]}
    return [_unpacked(item, tensors) for item in value] if isinstance(value, list) else value
