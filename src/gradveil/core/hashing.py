"""Digests of what a stored file depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(terms: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of named tensors (shape, type and values), in hexadecimal digits."""
    result = hashlib.sha256(terms.encode())
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
