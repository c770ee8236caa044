"""Updates as plain NumPy: what a client was sent and what it would send back, by name.

Every engine that moves arrays can be served by these: `protect_arrays` before they leave, `check_arrays` when they come
in, `save_arrays` where they arrive.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.core.errors import UserError, shape_text
from gradveil.core.randomness import Stream, Streams
from gradveil.core.types import Update
from gradveil.defenses import Defense, parse
from gradveil.defenses.base import Step, checked_update
from gradveil.protection.loop import log_round
from gradveil.storage.updates import save_update

Arrays = Mapping[str, NDArray[Any]]
Sends = Literal["weights", "update"]

# BatchNorm's running statistics in a torch state: noise would make a variance negative, and they are no update.
STATISTICS = ("*running_mean", "*running_var")


def update_defense(defense: str | Defense) -> Defense:
    """The defense, if it acts on nothing but the update that leaves."""
    method = parse(defense)
    others = [stage for stage in method.stages if stage != "update"]
    if any(type(part).prepare is not Defense.prepare for part in method.parts):
        others.append("preparation")
    if others:
        raise UserError(
            f"'{method.spec}' acts on more than the update that leaves ({', '.join(others)}), where neither model nor images "
            "are at hand; use gradveil.flower.protect in the training function."
        )
    return method


def protect_arrays(
    before: Arrays,
    after: Arrays,
    defense: str | Defense,
    *,
    untouched: Iterable[str] = STATISTICS,
    sends: Sends = "weights",
    rng: Stream | None = None,
) -> dict[str, NDArray[Any]]:
    """What may leave in place of `after`: the weights received plus the protected update, in the order of `after`.

    Whole numbers, and arrays whose names match `untouched` (shell patterns), leave as they are. With `sends="update"`,
    `after` holds the update itself. Noise comes from `rng`; without one, from the system's own randomness, which a server
    cannot repeat. What the defense leaves alone comes back bit for bit. Where something is not finite, of another kind or
    missing, nothing is returned.
    """
    method, patterns = update_defense(defense), tuple(untouched)
    for name, array in after.items():
        if array.dtype.kind not in "fiub" and not _matches(name, patterns):
            raise UserError(f"'{name}' holds {array.dtype}, which no defense protects; nothing is sent.")
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise UserError(f"training left values that are not finite in '{name}'; nothing is sent.")
    moved = [name for name, array in after.items() if _is_trained(name, array, patterns)]
    start = {name: _before(name, before, after[name], sends) for name in moved}
    changed = update = {name: torch.as_tensor(after[name].astype(np.float64) - start[name]) for name in moved}
    if update:
        nothing: Any = _Absent()
        step = Step(nothing, {}, nothing, rng or Streams()("update"))
        with torch.no_grad():  # copies: a defense that works in place must not change what it is compared with
            changed = checked_update(update, method.update({n: t.clone() for n, t in update.items()}, step))
    sent = dict(after)
    for name, change in changed.items():
        with np.errstate(over="ignore"):  # checked below
            rounded = (start[name] + change.numpy()).astype(after[name].dtype)
        sent[name] = np.where(change.numpy() == update[name].numpy(), after[name], rounded)
    checked_update(update, {name: torch.from_numpy(sent[name].astype(np.float64)) for name in update})
    log_round(method, len(changed), len(after) - len(changed))
    return sent


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
        raise UserError(f"'{name}' was not received, so there is no update to protect in it; nothing is sent.")
    if before[name].shape != array.shape:
        shapes = f"{shape_text(before[name].shape)} and is now {shape_text(array.shape)}"
        raise UserError(f"'{name}' was received as {shapes}; nothing is sent.")
    return before[name].astype(np.float64)


class _Absent:
    """Stands where the model and the images would be."""

    def __getattr__(self, name: str) -> Any:
        raise UserError("this defense asks for the model or the images, which are not at hand where an update leaves.")
