"""Medical images with several labels each, as chest classifiers have: what MedNIST's classes say of an image."""

import torch
from torch import Tensor

from gradveil.data.load import load

# Per class of MedNIST: kind of scan and part of the body.
_SAYS = {
    "AbdomenCT": ("CT", "abdomen"),
    "BreastMRI": ("MR", "chest"),
    "CXR": ("X-ray", "chest"),
    "ChestCT": ("CT", "chest"),
    "Hand": ("X-ray", "hand"),
    "HeadCT": ("CT", "head"),
}
LABELS = tuple(dict.fromkeys(label for labels in _SAYS.values() for label in labels))


def mednist_labels() -> tuple[Tensor, Tensor]:
    """Images in [0, 1], and one row of zeros and ones per image, one column per label of `LABELS`."""
    data = load("mednist")
    rows = torch.tensor([[float(label in _SAYS[name]) for label in LABELS] for name in data.class_names])
    parts = [part for part in (data.private, data.public, data.test) if len(part)]
    return torch.cat([part.x for part in parts]), rows[torch.cat([part.y for part in parts])]
