"""What an adversary has with no update at all: mean images of public data. Only what scores above them is a leak."""

from __future__ import annotations

from torch import Tensor

from gradveil.core.types import Batch, hard_labels


def baseline(public: Batch, labels: Tensor | None, count: int | None = None) -> Tensor:
    """The mean public image of each label's class; the overall mean, `count` times, where no label is known.

    A class that the public data does not hold gets the overall mean too.
    """
    if not len(public):
        raise ValueError("the public data is empty")
    overall = public.x.mean(dim=0)
    if labels is None:
        return overall.repeat(1 if count is None else count, 1, 1, 1)
    wanted = hard_labels(labels)
    images = overall.repeat(len(wanted), 1, 1, 1)
    for label in wanted.unique():
        members = public.hard_labels == label
        if members.any():
            images[wanted == label] = public.x[members].mean(dim=0)
    return images
