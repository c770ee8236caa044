"""The published rules, each a function of the classifier's gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = torch.logspace(-2, 0.15, 100, base=10.0, dtype=torch.float64)  # of mean(p) − counts / batch; √2 is the largest
SIZE_RANGE = (0.01, 5.0)  # sizes of ∇b, as a share of the expected one, that a batch may have


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


def rehearsed_rule(bias: Tensor, count: int, beliefs: Tensor, labels: Tensor, noise: float = 0.0) -> Tensor | None:
    """Labels with repeats on trained nets, by the linear estimate with the least mean squared error. Ours; no paper.

    batch · ∇b is the sum of p − y over the images. What the net believes of labelled public images (`beliefs`, images ×
    classes) says how counts and such sums vary together, and so which counts to expect. A class whose entry is below zero
    is present for sure, unless `noise` (the standard deviation of an entry) explains it. `bias` must have the size that was
    sent; None where that size is not one of such a batch.
    """
    true = F.one_hot(labels, beliefs.shape[1]).double()
    pulls = beliefs.double() - true
    mean, away, size = pulls.mean(0), pulls - pulls.mean(0), bias.double()
    covariance = away.T @ away / len(pulls)
    expected = (mean.square().sum() + covariance.trace() / count).sqrt()
    if not SIZE_RANGE[0] * expected < size.norm() < SIZE_RANGE[1] * expected:
        return None
    ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(len(size), dtype=torch.double)
    gain = (true - true.mean(0)).T @ away / len(pulls) @ torch.linalg.pinv(covariance + ridge, hermitian=True)
    left = count / len(size) + count * gain @ (size - mean)
    picked: list[int] = []
    for c in size.argsort().tolist():
        if size[c] < -max(3 * noise, 1e-6 * float(size.norm())) and len(picked) < count:
            picked.append(c)
            left[c] -= 1
    while len(picked) < count:
        picked.append(int(left.argmax()))
        left[picked[-1]] -= 1
    return torch.tensor(sorted(picked))


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
