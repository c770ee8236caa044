"""Networks that are trained once and stored in a file. A killed training continues from its last checkpoint.

While a training runs, `NAME.partial.safetensors` beside the file holds the state of modules, optimizer and schedule, the
random streams and the number of steps, so that the result equals that of an uninterrupted training, bit by bit. It is
removed when the network is stored. A checkpoint that is damaged or was written by other code is ignored.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.hashing import digest
from gradveil.core.loops import Loop, Part, State, is_sampled
from gradveil.core.types import Tensors
from gradveil.storage.files import make_private, remove_leftovers, room_for, write_tensors
from gradveil.storage.tensor_file import open_tensors

EVERY = 10.0  # seconds of work between two checkpoints of a training
EVERY_LOOPS = 30.0  # between two checkpoints of the loops of an attack, which may be large


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


class Checkpoints:
    """Runs the loops of one piece of work, which does the same loops in the same order each time, and keeps their states.

    The file holds the state of every loop that is done, and of the one at work. So work that was killed does the loops
    again from where they were, and comes to the same result, bit by bit.
    """

    def __init__(self, file: Path, every: float = EVERY_LOOPS):
        self._file, self._every, self._saved = file, every, time.monotonic()
        self._loops, self._next, self._at_work = _Loops.read(file), 0, False

    def loop(self, loop: Loop) -> Iterator[int]:
        if not loop.parts or self._at_work:  # one within another is done again with the step that it belongs to
            yield from loop.plain()
            return
        number, self._next, self._at_work = self._next, self._next + 1, True
        parts = (*loop.parts, torch.default_generator)  # a model with dropout draws from it
        try:
            for step in loop.plain(self._loops.restore(number, parts, loop.total)):
                yield step
                self._keep(number, parts, loop.total if loop.stopped else step + 1)
            self._loops.keep(number, parts, loop.total)
        finally:
            self._at_work = False

    def _keep(self, number: int, parts: Sequence[Part], done: int) -> None:
        if time.monotonic() - self._saved >= self._every:
            self._loops.keep(number, parts, done)
            self._loops.write(self._file)
            self._saved = time.monotonic()

    def remove(self) -> None:
        """The work is done."""
        self._file.unlink(missing_ok=True)


@dataclass
class _Loops:
    """The states of loops by their numbers: steps that are done, and the state of each part."""

    states: dict[str, tuple[int, list[object]]] = field(default_factory=dict)
    tensors: dict[str, Tensors] = field(default_factory=dict)

    def keep(self, number: int, parts: Sequence[Part], done: int) -> None:
        tensors: Tensors = {}
        packed = [_packed(_state(part), f"{number}/{i}", tensors) for i, part in enumerate(parts)]
        self.states[str(number)] = done, packed
        self.tensors[str(number)] = {name: t.detach().clone() for name, t in tensors.items()}

    def restore(self, number: int, parts: Sequence[Part], total: int) -> int:
        """Set the parts to what was kept; returns the steps that are done."""
        if str(number) not in self.states:
            return 0
        done, packed = self.states[str(number)]
        return done if 0 < done <= total and _load_all(parts, packed, self.tensors[str(number)]) else 0

    def write(self, file: Path) -> None:
        tensors = {name: t for each in self.tensors.values() for name, t in each.items()}
        plain = json.dumps(self.states)
        with room_for(file):
            make_private(file.parent)
            write_tensors(file, tensors, {"state": plain, "sha256": digest(f"{file.name}{plain}", tensors)})

    @classmethod
    def read(cls, file: Path) -> _Loops:
        """Of a file that is damaged, or was written for other work, nothing."""
        if not file.exists():
            return cls()
        try:
            with open_tensors(file) as content:
                plain, tensors = content.metadata["state"], content.tensors()
                if content.metadata["sha256"] != digest(f"{file.name}{plain}", tensors):
                    return cls()
        except (UserError, KeyError):
            return cls()
        states = json.loads(plain)  # what the hash is of
        parts: dict[str, Tensors] = {number: {} for number in states}
        for name, tensor in tensors.items():
            parts[name.partition("/")[0]][name] = tensor
        return cls({number: (done, packed) for number, (done, packed) in states.items()}, parts)


def _save(checkpoint: Path, parts: Sequence[Part], done: int) -> None:
    tensors: Tensors = {}
    plain = json.dumps([done, [_packed(_state(part), str(i), tensors) for i, part in enumerate(parts)]])
    write_tensors(checkpoint, tensors, {"state": plain, "sha256": digest(plain, tensors)})


def _restore(checkpoint: Path, parts: Sequence[Part], steps: int) -> int:
    """Set the parts to the state of the checkpoint, if it is complete and fits them. Returns the steps that are done."""
    if not checkpoint.exists():
        return 0
    try:
        with open_tensors(checkpoint) as file:
            metadata, tensors = file.metadata, file.tensors()
        if metadata["sha256"] != digest(metadata["state"], tensors):
            raise ValueError("damaged")
        done, states = json.loads(metadata["state"])  # what the hash is of
        if not 0 < done <= steps:
            raise ValueError("from a longer training")
    except (UserError, ValueError, LookupError, TypeError):  # another version, or damaged: only time is lost
        return 0
    return int(done) if _load_all(parts, states, tensors) else 0


def _load_all(parts: Sequence[Part], states: Sequence[Any], tensors: Tensors) -> bool:
    """Set the parts to these states; where one does not fit, as in another version, all keep those that they had."""
    fresh = [copy.deepcopy(_state(part)) for part in parts]
    try:
        for part, state in zip(parts, states, strict=True):
            _load(part, {key: _unpacked(value, tensors) for key, value in state["dict"]})
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):  # some parts may have been set already
        for part, state in zip(parts, fresh, strict=True):
            _load(part, state)
        return False
    return True


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
