"""Updates as plain NumPy: what a client was sent and what it would send back, by name.

Every engine that moves arrays can be served by these: `protect_arrays` before they leave, `check_arrays` when they come
in, `save_arrays` where they arrive.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Unpack

from gradveil.core.errors import UserError, shape_text
from gradveil.core.randomness import Stream, Streams
from gradveil.core.results import GradientChange
from gradveil.core.types import Update
from gradveil.core.update_change import update_change
from gradveil.defenses import Defense
from gradveil.defenses.base import Refused, Step, checked_update
from gradveil.protection.audited import DefenseSource
from gradveil.protection.door import Door, DoorOptions
from gradveil.protection.loop import check_names
from gradveil.storage.updates import save_update

Arrays = Mapping[str, NDArray[Any]]
Sends = Literal["weights", "update"]

# BatchNorm's running statistics in a torch state: noise would make a variance negative, and they are no update.
STATISTICS = ("*running_mean", "*running_var")


def update_door(kind: str, defense: DefenseSource, options: DoorOptions) -> Door:
    """A door for a defense that acts on nothing but the update that leaves."""
    check_names(options, DoorOptions.__annotations__)
    door = Door.of(kind, defense, options)
    method = door.defense
    others = [stage for stage in method.stages if stage != "update"]
    if any(type(part).prepare is not Defense.prepare for part in method.parts):
        others.append("preparation")
    if others:
        raise UserError(
            f"'{method.spec}' acts on more than the update that leaves ({', '.join(others)}), where neither model nor images "
            "are at hand; use gradveil.flower.protect in the training function."
        )
    return door


def protect_arrays(
    before: Arrays,
    after: Arrays,
    defense: DefenseSource,
    *,
    untouched: Iterable[str] = STATISTICS,
    sends: Sends = "weights",
    rng: Stream | None = None,
    **options: Unpack[DoorOptions],
) -> dict[str, NDArray[Any]]:
    """What may leave in place of `after`: the weights received plus the protected update, in the order of `after`.

    No defense acts on whole numbers and on arrays whose names match `untouched` (shell patterns). Unless `buffers="send"`,
    they are withheld: the received ones go back. With `sends="update"`, `after` holds the update itself. Noise comes from
    `rng`; without one, from the system's own randomness, which a server cannot repeat. What the defense leaves alone comes
    back bit for bit. Where something is not finite, of another kind, late or missing, nothing is returned. `options` may
    also give a `deadline` for the defense in seconds, and a file for `evidence`. For an exported protection they state
    `training` and `images` of this client; in other units than the audited ones nothing is returned, unless `beyond_audit`.
    """
    door = update_door("arrays", defense, options)
    with door.round(""):
        door.audited.check_images(door.audited.client_training({}), None)
        outgoing = protected_arrays(door, before, after, Kinds(tuple(untouched), sends), rng or Streams()("update"))
        outgoing.let_out(door, "")
        return outgoing.arrays


@dataclass(frozen=True)
class Kinds:
    """Which arrays of a reply no defense acts on, and whether the others are weights or an update."""

    untouched: tuple[str, ...]
    sends: Sends


@dataclass(frozen=True)
class Outgoing:
    """What is about to leave, and the names of what was done with it."""

    arrays: dict[str, NDArray[Any]]
    protected: list[str]
    withheld: list[str]
    unprotected: list[str]
    change: GradientChange | None  # of the update, by the defense

    def let_out(self, door: Door, number: int | str, more: Arrays = MappingProxyType({})) -> None:
        """`more` are arrays that leave beside these, unprotected."""
        tensors = {name: torch.from_numpy(np.array(a, order="C")) for name, a in {**self.arrays, **more}.items()}
        door.let_out(number, tensors, self.protected, self.withheld, [*self.unprotected, *more], self.change)


def protected_arrays(door: Door, before: Arrays, after: Arrays, kinds: Kinds, rng: Stream) -> Outgoing:
    """The arrays that may leave, or an error."""
    for name, array in after.items():
        check_values(name, array)
    protection = door.audited.protection
    frozen = [pattern for p in (protection.training.frozen if protection else ()) for pattern in (p, f"*/{p}")]
    moved = [name for name, array in after.items() if _is_trained(name, array, (*kinds.untouched, *frozen))]
    door.audited.check_tensors(after[name].shape for name in moved)
    start = {name: _before(name, before, after[name], kinds.sends) for name in moved}
    changed = update = {name: torch.as_tensor(after[name].astype(np.float64) - start[name]) for name in moved}
    if update:
        nothing: Any = _Absent()
        with torch.no_grad():
            changed = door.checked.update(update, Step(nothing, {}, nothing, rng))
    sent = dict(after)
    for name, change in changed.items():
        with np.errstate(over="ignore"):  # checked below
            rounded = (start[name] + change.numpy()).astype(after[name].dtype)
        sent[name] = np.where(change.numpy() == update[name].numpy(), after[name], rounded)
    checked_update(update, {name: torch.from_numpy(sent[name].astype(np.float64)) for name in update})
    buffers = [name for name in after if name not in changed]
    for name in buffers:
        received = _received(name, before, after[name], kinds.sends)
        sent[name] = received if door.buffers == "withhold" else after[name]
    withheld = buffers if door.buffers == "withhold" else []
    return Outgoing(sent, list(changed), withheld, [] if withheld else buffers, update_change(changed, update))


def check_values(name: str, array: NDArray[Any]) -> None:
    """Refuse arrays of other kinds than real numbers, and values that are not finite."""
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8 or not array.dtype.isnative:
        raise Refused(f"'{name}' holds {array.dtype}, which no defense protects; nothing is sent.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refused(f"training left values that are not finite in '{name}'; nothing is sent.")


def _received(name: str, before: Arrays, array: NDArray[Any], sends: Sends) -> NDArray[Any]:
    """The array as the server sent it, where nothing of it is to leave; in an update, no change."""
    if sends == "update" and name not in before:
        return np.zeros_like(array)
    _before(name, before, array, "weights")  # it was received, and has kept its shape
    if before[name].dtype != array.dtype:
        raise Refused(f"'{name}' was received as {before[name].dtype} and is now {array.dtype}; nothing is sent.")
    return np.zeros_like(array) if sends == "update" else before[name].copy()


def check_arrays(received: Arrays, expected: Arrays) -> None:
    """Refuse a model from a server that is not the one agreed on: other names, shapes or kinds, or values not finite."""
    missing, extra = [n for n in expected if n not in received], [n for n in received if n not in expected]
    if missing or extra:
        difference = f"lacks '{missing[0]}'" if missing else f"has '{extra[0]}', which this client's does not"
        raise UserError(f"the model from the server {difference}; nothing was trained.")
    for name, want in expected.items():
        array = received[name]
        if array.shape != want.shape:
            shapes = f"{shape_text(array.shape)}, this client's is {shape_text(want.shape)}"
            raise UserError(f"the model from the server has '{name}' as {shapes}; nothing was trained.")
        if (array.dtype.kind == "f") != (want.dtype.kind == "f"):
            raise UserError(f"the model from the server has '{name}' as {array.dtype}, not {want.dtype}.")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"the model from the server has values that are not finite in '{name}'; nothing was trained.")


def matrices_of_one_row(received: Arrays) -> list[str]:
    """The matrices whose rows are, for the most part, zero or multiples of one row.

    Training does not make them so; servers that fish for single images or imprint them do. Other tampering is not noticed.
    """
    names = []
    for name, array in received.items():
        if array.ndim != 2 or array.dtype.kind != "f" or len(array) < 2 or not array.any():
            continue
        lengths = np.linalg.norm(array, axis=1)
        longest = lengths.argmax()
        along = array @ array[longest] >= 0.9999 * lengths * lengths[longest]
        names += [name] if along.mean() > 0.75 else []  # of a row that is zero, both sides are
    return names


def save_arrays(
    path: str | Path,
    before: Arrays,
    after: Arrays,
    *,
    examples: int = 1,
    untouched: Iterable[str] = STATISTICS,
    sends: Sends = "weights",
    **facts: Any,
) -> list[str]:
    """Write what a client sent as an update that `gradveil attack` reads, and say which arrays are in it.

    `facts` are as for `gradveil.storage.updates.save_update`.
    """
    patterns = tuple(untouched)
    tensors = {
        name: torch.from_numpy(np.array(array.astype(np.float64) - _before(name, before, array, sends), array.dtype))
        for name, array in after.items()
        if _is_trained(name, array, patterns)
    }
    if not tensors:
        raise UserError("what the client sent holds no trained arrays.")
    save_update(path, Update(tensors, "delta", examples), **facts)
    return list(tensors)


def _is_trained(name: str, array: NDArray[Any], untouched: tuple[str, ...]) -> bool:
    return array.dtype.kind == "f" and not _matches(name, untouched)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _before(name: str, before: Arrays, array: NDArray[Any], sends: Sends) -> NDArray[np.float64]:
    """What the update of an array is measured from: the weights received, or zero where the update itself is sent."""
    if sends == "update":
        return np.zeros(())
    if name not in before:
        raise Refused(f"'{name}' was not received, so there is no update to protect in it; nothing is sent.")
    if before[name].shape != array.shape:
        shapes = f"{shape_text(before[name].shape)} and is now {shape_text(array.shape)}"
        raise Refused(f"'{name}' was received as {shapes}; nothing is sent.")
    return before[name].astype(np.float64)


class _Absent:
    """Stands where the model and the images would be."""

    def __getattr__(self, name: str) -> Any:
        raise Refused("this defense asks for the model or the images, which are not at hand where an update leaves.")
