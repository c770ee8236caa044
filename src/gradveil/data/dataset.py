"""A data set as an audit uses it: three disjoint parts and the constants that normalize them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import shape_text
from gradveil.core.gradients import ModelFunction
from gradveil.core.task import Task
from gradveil.core.types import Batch, Shape


@dataclass(frozen=True, eq=False, repr=False)
class DataSet:
    """Images of clients (private), images that anyone may have (public) and a test part. No image is in two of them.

    The private images are ordered so that every prefix holds the classes in their proportions.

    Args:
        private, public, test: images n × C × H × W in [0, 1], and n class numbers or n × targets.
        num_classes: number of classes, or of targets per image.
        mean, std: constants per channel, of shape C.
        public_from: the other data set that the public part comes from; its labels are the classes of that set.
    """

    name: str
    private: Batch
    public: Batch
    test: Batch
    num_classes: int
    class_names: tuple[str, ...]
    mean: Tensor
    std: Tensor
    public_from: str | None = None

    @property
    def input_shape(self) -> Shape:
        return self.private.image_shape

    @property
    def has_classes(self) -> bool:
        """Whether targets are class numbers, not one row of numbers per image."""
        return self.private.y.ndim == 1

    def task(self, model: ModelFunction) -> Task:
        """The task of a model on this data."""
        mean, std = self.mean.clone(), self.std.clone()
        return Task(model, self.input_shape, self.num_classes, mean, std, self.has_classes)

    def pool(self) -> Batch:
        """The images of all parts, for distractors."""
        parts = (self.private, self.public, self.test)
        return Batch(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))

    def __repr__(self) -> str:
        parts = f"{len(self.private)} private, {len(self.public)} public, {len(self.test)} test"
        return f"DataSet({self.name!r}: {parts}, {self.num_classes} classes, {shape_text(self.input_shape)})"
