"""The published rules, each a function of the classifier's gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = torch.logspace(-2, 0.15, 100, base=10.0, dtype=torch.float64)  # of mean(p) − counts / batch; √2 is the largest


def idlg(weight: Tensor) -> Tensor:
    """iDLG (Zhao et al. 2020): the class whose weight row sums lowest. One image, non-negative features."""
    return weight.sum(1).argmin().view(1)


def bias_rule(bias: Tensor, count: int) -> Tensor:
    """Every class with a negative bias gradient once; then, repeats: the class with most pull left.

    The sum of the negative part is about −(1 − p̄) for each image, which says how much one image pulls.
    """
    return _greedy(bias, count)


def expected_rule(bias: Tensor, count: int, belief: Tensor) -> Tensor:
    """Labels with repeats: ∇b is mean(p) − counts / batch, and an untrained net believes much the same of any image.

    `belief` is the adversary's estimate of mean(p) from other images. As the size of ∇b is unknown, several are tried; each
    gives the nearest counts that add up, and the counts that explain the direction of ∇b best are taken.
    """
    belief, direction = belief.double(), bias.double() / bias.double().norm()
    left = count * (belief - SIZES[:, None] * direction)
    counts, rows = torch.zeros_like(left), torch.arange(len(SIZES))
    for _ in range(count):
        most = left.argmax(1)
        counts[rows, most] += 1
        left[rows, most] -= 1
    best = counts[int(F.cosine_similarity(belief - counts / count, direction[None], eps=0).argmax())]
    return torch.arange(len(belief)).repeat_interleave(best.long())


def llg(weight: Tensor, count: int) -> Tensor:
    """LLG (Wainakh et al. 2022): as the bias rule on row sums of the weight, the pull of one image with its 1 + 1/C."""
    rows = weight.sum(1)
    return _greedy(rows, count, factor=1 + 1 / len(rows))


def minimum_rule(weight: Tensor, count: int) -> Tensor:
    """GradInversion (Yin et al. 2021): the classes with the lowest single entries of their rows; no repeats."""
    order = weight.min(1).values.argsort()
    repeats = -(-count // len(order))
    return order.repeat(repeats)[:count].sort().values


def _greedy(pull: Tensor, count: int, factor: float = 1.0) -> Tensor:
    left = pull.double().clone()
    negative = left[left < 0].sum()
    one = negative * factor / count  # what one image adds
    labels: list[int] = []
    for c in left.argsort().tolist():  # strongest first: under noise more classes look present than there are images
        if left[c] < 0 and len(labels) < count:
            labels.append(c)
            left[c] -= one
    while len(labels) < count:
        c = int(left.argmin())
        labels.append(c)
        left[c] -= one
    return torch.tensor(sorted(labels), dtype=torch.long)
