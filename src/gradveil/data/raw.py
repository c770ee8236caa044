"""Images as read, before they are split: bytes stay bytes, and files stay closed until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gradveil.core.settings import settings

Array = NDArray[np.generic]
Indices = NDArray[np.int64]

MAX_BYTES = 2 << 30  # uncompressed, per file or folder: a header that claims more is refused; as floats it takes 8 GiB
MAX_CLASSES = 1 << 15  # ImageNet-21k has 21,841
MAX_NAME = 1_000  # characters of a class name
MAX_FILES = 500_000  # pictures of a set
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
        pad: black pixels around every image, on each side; added after `size`.
        limit: use at most this number of images.
        attribute: CelebA: the attribute that is the label.
        split: `person`: the labels of the public part occur in no other part.
    """

    private: int | None = Field(default=None, ge=1)
    public: str | None = None
    size: int | None = Field(default=None, ge=4, le=MAX_SIDE)
    pad: int = Field(default=0, ge=0, le=MAX_SIDE // 4)
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
