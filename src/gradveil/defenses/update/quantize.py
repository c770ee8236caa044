"""Quantization: send fewer bits per entry, as many federations do to save traffic."""

from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense, Step, defense

_BITS = {"int8": 8, "fp16": 16}


def _bits(value: object) -> object:
    return _BITS.get(str(value), int(value) if isinstance(value, str) and value.isdigit() else value)


@defense("quantize")
@settings
class Quantize(Defense):
    """Round every entry to 8 or 16 bits.

    Zhu et al. 2019 (DLG) try half precision against leakage, in vain.

    Args:
        bits: 8 (or `int8`): 255 even levels per tensor, scaled to its largest entry; 16 (or `fp16`): half precision.

    Example:
        >>> gv.protect(model, "quantize:bits=16", data=(x, y))
    """

    bits: Annotated[Literal[8, 16], BeforeValidator(_bits)] = 8

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {name: _int8(g) if self.bits == 8 else g.half().to(g.dtype) for name, g in tensors.items()}


def _int8(g: Tensor) -> Tensor:
    scale = g.abs().max() / 127
    return torch.round(g / scale.clamp_min(1e-30)) * scale
