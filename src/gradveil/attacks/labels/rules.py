"""The published rules, each a function of the classifier's gradients."""

import torch
from torch import Tensor


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

    `belief` is the adversary's estimate of mean(p) from other images; counts are the nearest that add up.
    """
    left = count * (belief.double() - bias.double())
    labels: list[int] = []
    for _ in range(count):
        c = int(left.argmax())
        labels.append(c)
        left[c] -= 1
    return torch.tensor(sorted(labels), dtype=torch.long)


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
