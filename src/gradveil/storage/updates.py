"""Updates and checkpoints as files: safetensors with metadata, and nothing believed before it is checked.

A file from outside is untrusted input: bounded size, finite floating-point tensors, and the names and shapes of the
model it is said to belong to. No pickle is ever loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.types import Kind, Tensors, Update
from gradveil.storage.files import write_tensors

MOST_BYTES = 8 * 2**30
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_update(path: str | Path, update: Update, **facts: Any) -> None:
    """Write an update. `facts` (input_shape, num_classes, mean, std, lr, …) travel as metadata."""
    meta = {"gradveil": "update", "kind": update.kind, "examples": str(update.examples)}
    write_tensors(Path(path), update.tensors, {**meta, **{k: json.dumps(v) for k, v in facts.items()}})


def load_update(path: str | Path) -> tuple[Update, dict[str, Any]]:
    """Read an update and what its metadata says of it."""
    tensors, meta = load_tensors(path)
    kind = meta.pop("kind", "gradient")
    if kind not in ("gradient", "delta"):
        raise UserError(f"{path}: kind {kind!r} is neither 'gradient' nor 'delta'.")
    examples = str(meta.pop("examples", "1"))
    if not examples.isdecimal() or not 1 <= int(examples) <= 1_000_000:
        raise UserError(f"{path}: 'examples' is '{examples}', not a number of images.")
    meta.pop("gradveil", None)
    facts: dict[str, Any] = {}
    for key, value in meta.items():
        try:
            facts[key] = json.loads(value)
        except ValueError:
            facts[key] = value
    return Update(tensors, cast(Kind, kind), int(examples)), facts


def load_tensors(path: str | Path) -> tuple[Tensors, dict[str, str]]:
    """All tensors of a safetensors file as finite floats, and its metadata."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path}: larger than {MOST_BYTES // 2**30} GiB.")
    try:
        with safe_open(str(path), framework="pt") as file:
            meta = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a safetensors file ({text}).") from None
    if not tensors:
        raise UserError(f"{path}: holds no tensors.")
    return {name: _checked(path, name, t) for name, t in tensors.items()}, meta


def _checked(path: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _FLOATS:
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            return tensor  # counters such as BatchNorm's num_batches_tracked
        raise UserError(f"{path}: tensor '{name}' is {tensor.dtype}; an update holds floating-point numbers.")
    tensor = tensor.float() if tensor.dtype != torch.float64 else tensor
    if not torch.isfinite(tensor).all():
        raise UserError(f"{path}: tensor '{name}' holds NaN or infinite values.")
    return tensor


def fit_to_model(path: str | Path, tensors: Tensors, expected: Mapping[str, Tensor]) -> Tensors:
    """The tensors in the model's order, or one line on what does not fit."""
    missing = [n for n in expected if n not in tensors]
    extra = [n for n in tensors if n not in expected]
    if missing:
        hint = f" It has '{extra[0]}', which the model lacks." if extra else ""
        raise UserError(f"{path}: tensor '{missing[0]}' of the model is missing.{hint} Was it made with another model?")
    if extra:
        raise UserError(f"{path}: tensor '{extra[0]}' is not a trainable parameter of the model.")
    for name, want in expected.items():
        if not tensors[name].is_floating_point():
            raise UserError(
                f"{path}: tensor '{name}' is {tensors[name].dtype}; an update holds floating-point numbers."
            )
        if tensors[name].shape != want.shape:
            raise UserError(
                f"{path}: tensor '{name}' is {_shape(tensors[name])}, the model's is {_shape(want)}. "
                "Was it made with another model?"
            )
    return {name: tensors[name].to(want.dtype) for name, want in expected.items()}


def _shape(tensor: Tensor) -> str:
    return "×".join(str(n) for n in tensor.shape) or "a single number"


def difference(before: str | Path, after: str | Path, expected: Mapping[str, Tensor]) -> tuple[Tensors, Update]:
    """The state before, and the update that two checkpoints of one round differ by."""
    first, _ = load_tensors(before)
    second, _ = load_tensors(after)
    start = fit_to_model(before, {n: t for n, t in first.items() if n in expected}, expected)
    end = fit_to_model(after, {n: t for n, t in second.items() if n in expected}, expected)
    if all(torch.equal(start[n], end[n]) for n in start):
        raise UserError(f"{before} and {after} hold the same weights: there is no update between them.")
    return first, Update({n: end[n] - start[n] for n in start}, "delta")
