"""Updates and checkpoints as safetensors files with metadata, checked when they are read.

A file from outside is untrusted input. Its size is bounded, its tensors must be finite floating-point numbers, and names
and shapes must be those of the model it belongs to. No pickle is ever loaded.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gradveil.core.errors import UserError, shape_text, shown
from gradveil.core.types import Kind, Tensors, Update
from gradveil.storage.files import write_tensors
from gradveil.storage.reading import parse_json
from gradveil.storage.tensor_file import open_tensors

MAX_BYTES = 2 << 30
MAX_EXAMPLES = 999_999
MAX_FACTS = 100
MAX_FACT = 1 << 16  # bytes
KINDS: tuple[Kind, ...] = ("gradient", "delta")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_update(path: str | Path, update: Update, **facts: object) -> None:
    """Write an update. `facts` (input_shape, num_classes, mean, std, lr, …) are stored as metadata, in JSON."""
    metadata = {"gradveil": "update", "kind": update.kind, "examples": str(update.examples)}
    write_tensors(Path(path), update.tensors, {**metadata, **{k: json.dumps(v) for k, v in facts.items()}})


def load_update(path: str | Path) -> tuple[Update, dict[str, object]]:
    """An update, and the facts in its metadata."""
    tensors, metadata = load_tensors(path)
    text = metadata.pop("kind", "gradient")
    kind = next((kind for kind in KINDS if kind == text), None)
    if kind is None:
        raise UserError(f"{path}: kind {shown(text)} is neither 'gradient' nor 'delta'.")
    examples = metadata.pop("examples", "1")
    if not re.fullmatch("[1-9][0-9]{0,5}", examples, re.ASCII):  # up to MAX_EXAMPLES
        raise UserError(f"{path}: 'examples' is {shown(examples)}, not a number of images.")
    metadata.pop("gradveil", None)
    if len(metadata) > MAX_FACTS:
        raise UserError(f"{path}: {len(metadata):,} facts in its metadata; at most {MAX_FACTS} are read.")
    return Update(tensors, kind, int(examples)), {key: _decoded(value) for key, value in metadata.items()}


def _decoded(text: str) -> object:
    """A fact as it was saved; a text that is not JSON, or exceeds its limits, stays text."""
    try:
        return parse_json(text, "metadata", MAX_FACT)
    except UserError:
        return text


def load_tensors(path: str | Path) -> tuple[Tensors, dict[str, str]]:
    """All tensors of a safetensors file as finite floats, and its metadata."""
    path = Path(path)
    with open_tensors(path, MAX_BYTES) as file:
        tensors, metadata = file.tensors(), dict(file.metadata)
    if not tensors:
        raise UserError(f"{path}: holds no tensors.")
    return {name: _checked(path, name, tensor) for name, tensor in tensors.items()}, metadata


def _checked(path: Path, name: str, tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return tensor  # counters such as num_batches_tracked of BatchNorm
    if tensor.dtype not in _FLOATS:
        raise UserError(f"{path}: tensor '{name}' is {tensor.dtype}; an update holds floating-point numbers.")
    tensor = tensor.float() if tensor.dtype != torch.float64 else tensor
    if not torch.isfinite(tensor).all():
        raise UserError(f"{path}: tensor '{name}' holds NaN or infinite values.")
    return tensor


def fit_to_model(path: str | Path, tensors: Tensors, expected: Mapping[str, Tensor]) -> Tensors:
    """The tensors in the order of the model; raises one line that says what does not fit."""
    missing = [n for n in expected if n not in tensors]
    extra = [n for n in tensors if n not in expected]
    if missing:
        hint = f" It has '{extra[0]}', which the model lacks." if extra else ""
        raise UserError(f"{path}: tensor '{missing[0]}' of the model is missing.{hint} Was it made with another model?")
    if extra:
        raise UserError(f"{path}: tensor '{extra[0]}' is not a trainable parameter of the model.")
    for name, parameter in expected.items():
        tensor = tensors[name]
        if not tensor.is_floating_point():
            raise UserError(f"{path}: tensor '{name}' is {tensor.dtype}; an update holds floating-point numbers.")
        if tensor.shape != parameter.shape:
            shapes = f"{shape_text(tensor.shape)}, the model's is {shape_text(parameter.shape)}"
            raise UserError(f"{path}: tensor '{name}' is {shapes}. Was it made with another model?")
    return {name: tensors[name].to(parameter.dtype) for name, parameter in expected.items()}


def difference(before: str | Path, after: str | Path, expected: Mapping[str, Tensor]) -> tuple[Tensors, Update]:
    """The state before a round, and the update between the two checkpoints of the round."""
    first, second = load_tensors(before)[0], load_tensors(after)[0]
    start = fit_to_model(before, {n: t for n, t in first.items() if n in expected}, expected)
    end = fit_to_model(after, {n: t for n, t in second.items() if n in expected}, expected)
    if all(torch.equal(start[n], end[n]) for n in start):
        raise UserError(f"{before} and {after} hold the same weights: there is no update between them.")
    return first, Update({n: end[n] - start[n] for n in start}, "delta")
