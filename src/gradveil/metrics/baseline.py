"""The guess of an adversary without any update: mean images of public data. Only a higher score shows a leak."""

from torch import Tensor

from gradveil.core.types import Batch, hard_labels


def baseline(public: Batch, labels: Tensor | None, count: int | None = None) -> Tensor:
    """The mean public image of the class of each label (n × C × H × W).

    Without labels, and for a class that the public data does not hold, it is the mean of all public images.

    Args:
        public: images that anyone may have.
        labels: n class numbers, or n × classes; None: unknown.
        count: number of images where `labels` is None.
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
