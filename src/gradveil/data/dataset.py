"""A data set as an audit uses it: three disjoint parts and the constants that normalise them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.types import Batch


@dataclass(frozen=True, eq=False, repr=False)
class DataSet:
    """Private images (of clients), public ones (anyone may have them) and a test part; no image is in two of them.

    Private images stand in an order in which every class comes early and evenly: the first few are a fair sample.
    """

    name: str
    private: Batch
    public: Batch
    test: Batch
    num_classes: int
    class_names: tuple[str, ...]
    mean: Tensor
    std: Tensor
    public_from: str | None = (
        None  # the other data set that the public part is from; its labels are of that set's classes
    )

    @property
    def input_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.private.x.shape[1:]
        return channels, height, width

    @property
    def has_classes(self) -> bool:
        """Whether targets are class numbers, and not a row of numbers an image."""
        return self.private.y.ndim == 1

    def pool(self) -> Batch:
        """Every image of all parts, for distractors."""
        parts = (self.private, self.public, self.test)
        return Batch(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))

    def __repr__(self) -> str:
        parts = f"{len(self.private)} private, {len(self.public)} public, {len(self.test)} test"
        return f"DataSet({self.name!r}: {parts}, {self.num_classes} classes, {'×'.join(map(str, self.input_shape))})"
