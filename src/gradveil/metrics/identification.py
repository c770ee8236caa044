"""Identification: is the true image more similar to an answer than many other images of its class?

Likeness is the absolute zero-mean normalised correlation over all channels and pixels, so that neither brightness nor
contrast nor a negative hides a match. The chance of a guess is known, so a rate is evidence; a PSNR is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from scipy.special import betaincinv
from torch import Tensor

from gradveil.core.randomness import generator
from gradveil.core.results import Rate
from gradveil.core.types import Batch, hard_labels

ENOUGH = 200  # a class with fewer distractors is replaced by all classes
LIMIT = 1000  # distractors at most
FLAT = 1e-6  # standard deviation below which an image is constant except for rounding
TIE = 1e-9  # correlations closer than this are a tie, which does not count as identified
BLOCK = 2**24  # values compared at a time, to bound memory


@dataclass(frozen=True)
class Identification:
    """How each of n true images ranks among its distractors, all compared with the same answers."""

    ranks: Tensor  # n: 1 is the most similar
    distractors: Tensor  # n: the number of distractors
    likeness: Tensor  # n: largest |correlation| of the true image with any answer for its batch
    nearest: Tensor  # n: the same of its most similar distractor; 0 without distractors

    @property
    def identified(self) -> Tensor:
        return (self.ranks == 1) & (self.distractors > 0)

    @property
    def chance(self) -> Tensor:
        """The probability that a guess identifies each image."""
        return 1 / (self.distractors.double() + 1)


def likeness_table(answers: Tensor, batch: Tensor, images: Tensor) -> Tensor:
    """Batches × images: the largest |correlation| of each image with any answer for the batch.

    Args:
        answers: rebuilt images, n × C × H × W.
        batch: n numbers from 0: the batch that each answer belongs to.
        images: m × C × H × W.
    """
    guesses, batches = _standardised(answers), int(batch.max()) + 1
    return torch.cat([_largest(guesses, batch, batches, block) for block in _blocks(images)], dim=1)


def identify(
    truth: Tensor,
    labels: Tensor,
    answers: Tensor,
    pool: Batch,
    *,
    batch: Tensor | None = None,
    limit: int = LIMIT,
    seed: int = 0,
) -> Identification:
    """Rank each true image against the first `limit` images of its class in a seeded permutation of the pool.

    Truth and distractors are treated alike: each is compared with every answer for the batch of the true image, and the
    largest |correlation| counts. So the chance is one in the number of candidates, whatever the size of a batch. Exact
    copies of the true image do not count as distractors. A constant answer identifies no image.

    Args:
        truth, labels: images n × C × H × W, and n class numbers or n × classes.
        answers: rebuilt images, n × C × H × W.
        pool: images from which the distractors are drawn; other true images of a batch must not be among them.
        batch: n numbers from 0: the batch of each true image and of each answer. None: each is a batch.
        limit: number of distractors at most.
        seed: of the permutation.
    """
    if truth.shape != answers.shape or truth.shape[1:] != pool.x.shape[1:]:
        shapes = [tuple(t.shape) for t in (truth, answers, pool.x)]
        raise ValueError(f"truth, answers and pool do not fit together: {shapes}")
    labels, batch = hard_labels(labels), torch.arange(len(truth)) if batch is None else batch
    shuffled = torch.randperm(len(pool), generator=generator(seed, "distractors"))
    classes = pool.hard_labels[shuffled]

    guesses, flat = _standardised(answers), truth.double().flatten(1)
    likeness = torch.empty(len(truth), dtype=torch.float64)
    for block in torch.arange(len(truth)).split(max(1, BLOCK // flat.shape[1])):
        table = _largest(guesses, batch, int(batch.max()) + 1, flat[block])
        likeness[block] = table[batch[block], torch.arange(len(block))]
    ranks, distractors = (torch.empty(len(truth), dtype=torch.long) for _ in range(2))
    nearest = torch.zeros_like(likeness)

    def compare(victims: Tensor, candidates: Tensor) -> None:
        """Rank these victims among these images of the pool."""
        rows, place = batch[victims].unique(return_inverse=True)
        chosen = torch.isin(batch, rows)
        group = torch.searchsorted(rows, batch[chosen])
        better, copies = torch.zeros_like(victims), torch.zeros_like(victims)
        largest = torch.zeros(len(victims), dtype=torch.float64)
        for block in candidates.split(max(1, BLOCK // flat.shape[1])):
            others = pool.x[block].double().flatten(1)
            copy = _copies(flat[victims], others)
            table = _largest(guesses[chosen], group, len(rows), others)[place].masked_fill(copy, -1)
            better += (table >= likeness[victims, None] - TIE).sum(dim=1)
            copies += copy.sum(dim=1)
            largest = torch.maximum(largest, table.amax(dim=1))
        ranks[victims], distractors[victims], nearest[victims] = 1 + better, len(candidates) - copies, largest

    for label in labels.unique():
        victims = (labels == label).nonzero().flatten()
        compare(victims, shuffled[classes == label][:limit])
        few = victims[distractors[victims] < min(ENOUGH, limit - 1)]
        if len(few):
            compare(few, shuffled[:limit])
    return Identification(ranks, distractors, likeness, nearest)


def _blocks(images: Tensor) -> Iterator[Tensor]:
    """Flattened, in double precision, so many at a time that memory stays bounded."""
    for block in images.split(max(1, BLOCK // max(1, images[0].numel()))):
        yield block.double().flatten(1)


def _largest(guesses: Tensor, batch: Tensor, batches: int, images: Tensor) -> Tensor:
    """Batches × images: the largest |correlation| with any standardised guess of the batch."""
    table = torch.zeros(batches, len(images), dtype=torch.float64)
    correlations = _correlation(guesses, images)
    return table.scatter_reduce_(0, batch[:, None].expand_as(correlations), correlations, "amax")


def _standardised(images: Tensor) -> Tensor:
    """Flattened, mean 0, length 1. A constant image becomes 0, whose correlation with every image is 0."""
    flat = images.double().flatten(1)
    flat = flat - flat.mean(dim=1, keepdim=True)
    length = flat.norm(dim=1, keepdim=True)
    return torch.where(length > FLAT * flat.shape[1] ** 0.5, flat / length, 0.0)


def _correlation(guess: Tensor, others: Tensor) -> Tensor:
    """|correlation| of every standardised guess with every image. The guess has mean 0, so images keep their mean."""
    pixels = others.shape[1]
    variance = torch.einsum("np,np->n", others, others) / pixels - others.mean(dim=1).square()
    length = variance.clamp(min=0).sqrt() * pixels**0.5
    return torch.where(length > FLAT * pixels**0.5, (guess @ others.T).abs() / length, 0.0)


def _copies(truth: Tensor, others: Tensor) -> Tensor:
    """Which of the others are exact copies of each truth. Only images of equal mean are compared in full."""
    alike = (truth.mean(dim=1)[:, None] - others.mean(dim=1)).abs() < 1e-9
    for victim in alike.any(dim=1).nonzero().flatten():
        suspects = alike[victim].nonzero().flatten()
        alike[victim, suspects] = (others[suspects] == truth[victim]).all(dim=1)
    return alike


def clopper_pearson(hits: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a rate; (0, 1) without trials.

    Args:
        hits, n: number of successes, and of trials. Successes may be fractions: means over trials of several images.
        confidence: probability that the interval covers the true rate.
    """
    if not 0 <= hits <= n:
        raise ValueError(f"{hits} hits in {n} trials")
    tail = (1 - confidence) / 2
    low = float(betaincinv(hits, n - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
    return low, high


def identification_rate(identified: Tensor, chance: float, batches: int) -> Rate:
    """The share of identified images with its exact interval, and the rate of guessing.

    Args:
        identified: n booleans.
        chance: probability that one guess identifies an image.
        batches: number of batches that the images come from. Images of one batch depend on each other, so a batch counts
            as one trial of the interval.
    """
    rate = int(identified.sum()) / len(identified)
    low, high = clopper_pearson(rate * batches, batches)
    return Rate(rate=rate, low=low, high=high, chance=chance)
