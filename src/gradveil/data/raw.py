"""Images as read, before they are split: bytes stay bytes, and files stay closed until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gradveil.core.errors import UserError, shape_text
from gradveil.core.settings import settings

Array = NDArray[np.generic]
Indices = NDArray[np.int64]

MAX_BYTES = 4 << 30  # uncompressed, per file: a header that claims more is refused
MAX_SIDE = 1024  # pixels, of the images an audit uses; larger ones are resized by `size`
MAX_CHANNELS = 64
PICTURE_CHANNELS = 4  # a last axis of at most this length holds channels
MIN_IMAGES = 10


@settings
class Options:
    """The settings after the name of a data set: `cifar10:private=5000,public=tinyimagenet`.

    Args:
        private: number of private images.
        public: another data set that serves as the public part, or `none`.
        size: centre-crop to a square and resize to this side, in pixels.
        limit: use at most this number of images.
        attribute: CelebA: the attribute that is the label.
        split: `person`: the labels of the public part occur in no other part.
    """

    private: int | None = Field(default=None, ge=1)
    public: str | None = None
    size: int | None = Field(default=None, ge=4, le=MAX_SIDE)
    limit: int | None = Field(default=None, ge=MIN_IMAGES)
    attribute: str | None = None
    split: Literal["image", "person"] = "image"


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels n × H × W × C, bytes or floats in [0, 1] (or the files that hold them), and n labels or rows of targets."""

    x: Array | Sequence[Path]
    y: Array

    def __len__(self) -> int:
        return len(self.y)

    @property
    def pixels(self) -> Array:
        assert isinstance(self.x, np.ndarray)
        return self.x

    def take(self, index: Indices) -> Images:
        x = self.x[index] if isinstance(self.x, np.ndarray) else [self.x[i] for i in index]
        return Images(x, self.y[index])


@dataclass(frozen=True, eq=False)
class Raw:
    """The parts that a reader has read as published, and the names of the classes where the files tell them."""

    train: Images
    test: Images | None = None
    class_names: tuple[str, ...] | None = None


def concat(parts: Sequence[Images]) -> Images:
    pixels = [part.pixels for part in parts]
    if len({x.dtype for x in pixels}) > 1:  # bytes and floats have different ranges
        pixels = [x.astype(np.float32) / 255 if x.dtype == np.uint8 else x for x in pixels]
    return Images(np.concatenate(pixels), np.concatenate([part.y for part in parts]))


def checked(x: Array, y: Array, where: str) -> Images:
    """Untrusted arrays as `Images`; raises one line that says what is wrong with them."""
    x, y = checked_pixels(x, where), checked_labels(y, where)
    if len(x) != len(y):
        raise UserError(f"{where}: {len(x)} images but {len(y)} labels.")
    return Images(x, y)


def checked_pixels(x: Array, where: str) -> Array:
    """Pixels n × H × W × C, as bytes or as 32-bit floats in [0, 1]."""
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise UserError(f"{where}: images are {x.dtype}; give uint8, or floats in [0, 1].")
    if x.ndim not in (3, 4):
        raise UserError(f"{where}: images are {shape_text(x.shape)}; give n×H×W or n×H×W×C.")
    x = x[..., None] if x.ndim == 3 else x
    transposed = x.shape[1] <= PICTURE_CHANNELS < x.shape[3]
    if not 1 <= x.shape[3] <= MAX_CHANNELS or transposed:
        hint = " They look like n×C×H×W: transpose them." if transposed else ""
        raise UserError(f"{where}: images have {x.shape[3]} channels; give n×H×W×C with C up to {MAX_CHANNELS}.{hint}")
    if 0 in x.shape:
        raise UserError(f"{where}: images are {shape_text(x.shape)}, so they are empty.")
    if x.dtype == np.uint8:
        return x
    low, high = float(x.min()), float(x.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise UserError(f"{where}: some pixels are not finite numbers.")
    if low < 0 or high > 1:
        raise UserError(f"{where}: pixels run from {low:.3g} to {high:.3g}; give uint8, or floats in [0, 1], not normalised.")
    return x.astype(np.float32, copy=False)


def checked_labels(y: Array, where: str) -> Array:
    """Class numbers; or, for losses that take them, one row of numbers per image, as floats."""
    integers = np.issubdtype(y.dtype, np.integer)
    if y.ndim == 2 and y.shape[1] == 1 and integers:
        y = y[:, 0]
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise UserError(f"{where}: labels are {shape_text(y.shape)}; give one class number per image.")
    if not integers and not np.issubdtype(y.dtype, np.floating) and y.dtype != np.bool_:
        raise UserError(f"{where}: labels are {y.dtype}; give whole class numbers from 0.")
    if y.ndim == 2 or not integers:
        rows = y.reshape(len(y), -1).astype(np.float32)
        if not np.isfinite(rows).all():
            raise UserError(f"{where}: some targets are not finite numbers.")
        return rows
    if len(y) and int(y.min()) < 0:
        raise UserError(f"{where}: label {int(y.min())} is negative; class numbers start at 0.")
    if len(y) and int(y.max()) > np.iinfo(np.int32).max:
        raise UserError(f"{where}: label {int(y.max())} is not a class number.")
    return y.astype(np.int64)
