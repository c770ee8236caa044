"""Arrays in Flower's messages, read as what they are: input from a stranger."""

from __future__ import annotations

import io
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.core.text import shorten
from gradveil.defenses.base import Refused

if TYPE_CHECKING:
    from flwr.app import Array, ArrayRecord, RecordDict

MAX_FACTS = 64  # metrics of a reply
MAX_FACT = 200  # characters of a text among them
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def numpy_arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """The arrays of a record by name, as copies; refused where the bytes are not what they claim to be."""
    return {name: _numpy(name, array) for name, array in record.items()}


def check_facts(content: RecordDict, passed: Collection[str] = ()) -> None:
    """Refuse metrics and settings in which an update could leave: lists, bytes, long texts, and many numbers."""
    records = {**content.metric_records, **content.config_records}
    facts = {(key, name): v for key, record in records.items() if key not in passed for name, v in record.items()}
    for (key, name), value in facts.items():
        if not (isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MAX_FACT)):
            raise Refused(
                f"'{name}' of '{key}' is no single number, so it may hold private data; nothing is sent. "
                "If it is meant to leave, the mod takes the name of its record in passed."
            )
    if len(facts) > MAX_FACTS:
        raise Refused(f"{len(facts)} metrics may hold private data; at most {MAX_FACTS} are sent, so nothing is.")


def _numpy(name: str, array: Array) -> NDArray[Any]:
    stream = io.BytesIO(array.data)
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"it is written as {shorten(array.stype, 40)}")
        shape, _, kind = _HEADERS[np.lib.format.read_magic(stream)](stream)
        size = len(array.data) - stream.tell()
        if kind.hasobject or math.prod(shape) * kind.itemsize != size:  # before memory is taken for it
            raise ValueError(f"{size} bytes do not hold {shape_text(shape)} values of {kind}")
        stream.seek(0)
        values: NDArray[Any] = np.load(stream, allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python text: anything may be wrong with it
        raise UserError(f"the array '{name}' cannot be read ({one_line(error)}).") from None
    if values.shape != tuple(array.shape) or str(values.dtype) != array.dtype:
        raise UserError(f"the array '{name}' holds {values.dtype} values, not the {array.dtype} ones it claims.")
    return values
