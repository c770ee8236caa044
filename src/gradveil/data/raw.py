"""Images as they were read, before they are shared out: bytes stay bytes, files stay closed until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gradveil.core.errors import UserError
from gradveil.core.settings import settings

Array = NDArray[Any]

MAX_BYTES = 4 << 30  # uncompressed, of one file: what a header may promise before it is taken for a bomb
MAX_SIDE = 1024  # pixels, of the images an audit works on; larger ones are resized by `size`
MAX_CHANNELS = 64
PICTURE_CHANNELS = 4  # of pictures: a last axis as short as this is one of channels
MIN_IMAGES = 10


@settings
class Options:
    """What can be written after a data set's name: `cifar10:private=5000,public=tinyimagenet`."""

    private: int | None = Field(default=None, ge=1)  # how many images are private
    public: str | None = None  # another data set that serves as the public part, or `none`
    size: int | None = Field(default=None, ge=4, le=MAX_SIDE)  # centre-crop to a square and resize to so many pixels
    limit: int | None = Field(default=None, ge=MIN_IMAGES)  # use at most so many images
    attribute: str | None = None  # CelebA: the attribute that is the label
    split: Literal["image", "person"] = "image"  # person: the labels of the public part occur nowhere else


@dataclass(frozen=True, eq=False)
class Images:
    """n × H × W × C pixels, bytes or floats in [0, 1] (or the files that hold them), and n labels (or rows of targets)."""

    x: Array | Sequence[Path]
    y: Array

    def __len__(self) -> int:
        return len(self.y)

    @property
    def pixels(self) -> Array:
        assert isinstance(self.x, np.ndarray)
        return self.x

    def take(self, index: Array) -> Images:
        x = self.x[index] if isinstance(self.x, np.ndarray) else [self.x[i] for i in index]
        return Images(x, self.y[index])


@dataclass(frozen=True, eq=False)
class Raw:
    """What a reader found: the publisher's parts, and the classes' names where they are given."""

    train: Images
    test: Images | None = None
    class_names: tuple[str, ...] | None = None


def concat(parts: Sequence[Images]) -> Images:
    pixels = [part.pixels for part in parts]
    if len({x.dtype for x in pixels}) > 1:  # bytes and floats do not count alike
        pixels = [x.astype(np.float32) / 255 if x.dtype == np.uint8 else x for x in pixels]
    return Images(np.concatenate(pixels), np.concatenate([part.y for part in parts]))


def checked(x: Array, y: Array, where: str) -> Images:
    """Arrays from outside as `Images`, or one line on what is wrong with them."""
    x, y = checked_pixels(x, where), checked_labels(y, where)
    if len(x) != len(y):
        raise UserError(f"{where}: {len(x)} images but {len(y)} labels.")
    return Images(x, y)


def checked_pixels(x: Array, where: str) -> Array:
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise UserError(f"{where}: images are {x.dtype}; give uint8, or floats in [0, 1].")
    if x.ndim not in (3, 4):
        raise UserError(f"{where}: images are {shape_text(x.shape)}; give n×H×W or n×H×W×C.")
    x = x[..., None] if x.ndim == 3 else x
    looks_turned = x.shape[1] <= PICTURE_CHANNELS < x.shape[3]
    if not 1 <= x.shape[3] <= MAX_CHANNELS or looks_turned:
        turned = " They look like n×C×H×W: transpose them." if looks_turned else ""
        raise UserError(
            f"{where}: images have {x.shape[3]} channels; give n×H×W×C with C up to {MAX_CHANNELS}.{turned}"
        )
    if 0 in x.shape:
        raise UserError(f"{where}: images are {shape_text(x.shape)}, so there is nothing in them.")
    if x.dtype != np.uint8:
        low, high = float(x.min()), float(x.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise UserError(f"{where}: some pixels are not finite numbers.")
        if low < 0 or high > 1:
            raise UserError(
                f"{where}: pixels run from {low:.3g} to {high:.3g}; give uint8, or floats in [0, 1], not normalised."
            )
        x = x.astype(np.float32, copy=False)
    return x


def checked_labels(y: Array, where: str) -> Array:
    """Class numbers; or, for losses that take them, a row of numbers for each image, as floats."""
    whole = np.issubdtype(y.dtype, np.integer)
    if y.ndim == 2 and y.shape[1] == 1 and whole:
        y = y[:, 0]
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise UserError(f"{where}: labels are {shape_text(y.shape)}; give one class number for each image.")
    if not whole and not np.issubdtype(y.dtype, np.floating) and y.dtype != np.bool_:
        raise UserError(f"{where}: labels are {y.dtype}; give whole class numbers from 0.")
    if y.ndim == 2 or not whole:
        rows = y.reshape(len(y), -1).astype(np.float32)
        if not np.isfinite(rows).all():
            raise UserError(f"{where}: some targets are not finite numbers.")
        return rows
    if len(y) and int(y.min()) < 0:
        raise UserError(f"{where}: label {int(y.min())} is negative; class numbers start at 0.")
    if len(y) and int(y.max()) > np.iinfo(np.int32).max:
        raise UserError(f"{where}: label {int(y.max())} is no class number.")
    return y.astype(np.int64)


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(str(n) for n in shape) or "a single number"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
