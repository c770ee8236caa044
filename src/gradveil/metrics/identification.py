"""Identification: is the true image more similar to the reconstruction than many other images of its class?

Similarity is the absolute zero-mean normalised correlation over all channels and pixels, so that neither brightness nor
contrast nor a negative hides a match. The chance of a guess is known, so a rate is evidence; a PSNR is not.
"""

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
    """How each of n true images ranks among its distractors."""

    ranks: Tensor  # n: 1 is the most similar
    distractors: Tensor  # n: the number of distractors
    correlation: Tensor  # n: |correlation| of the true image with its reconstruction

    @property
    def identified(self) -> Tensor:
        return (self.ranks == 1) & (self.distractors > 0)

    @property
    def chance(self) -> Tensor:
        """The probability that a guess identifies each image."""
        return 1 / (self.distractors.double() + 1)


def identify(
    truth: Tensor, labels: Tensor, reconstruction: Tensor, pool: Batch, *, limit: int = LIMIT, seed: int = 0
) -> Identification:
    """Rank each true image against the first `limit` images of its class in a seeded permutation of the pool.

    Exact copies of the true image do not count as distractors. A constant reconstruction identifies no image.

    Args:
        truth, labels: images n × C × H × W, and n class numbers or n × classes.
        reconstruction: image i belongs to true image i.
        pool: images from which the distractors are drawn.
        limit: number of distractors at most.
        seed: of the permutation.
    """
    if truth.shape != reconstruction.shape or truth.shape[1:] != pool.x.shape[1:]:
        shapes = [tuple(t.shape) for t in (truth, reconstruction, pool.x)]
        raise ValueError(f"truth, reconstruction and pool do not fit together: {shapes}")
    labels = hard_labels(labels)
    shuffled = torch.randperm(len(pool), generator=generator(seed, "distractors"))
    classes = pool.hard_labels[shuffled]

    guess = _standardised(reconstruction)
    correlation = _correlation(guess, truth.double().flatten(1)).diagonal()
    ranks = torch.empty(len(truth), dtype=torch.long)
    distractors = torch.empty_like(ranks)

    def compare(victims: Tensor, candidates: Tensor) -> None:
        better, copies = _better(truth[victims], guess[victims], correlation[victims], pool.x, candidates)
        distractors[victims] = len(candidates) - copies
        ranks[victims] = 1 + better

    for label in labels.unique():
        victims = (labels == label).nonzero().flatten()
        compare(victims, shuffled[classes == label][:limit])
        few = victims[distractors[victims] < min(ENOUGH, limit - 1)]
        if len(few):
            compare(few, shuffled[:limit])
    return Identification(ranks, distractors, correlation)


def _better(truth: Tensor, guess: Tensor, correlation: Tensor, images: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Per victim: how many candidates are at least as similar as the truth, and how many are copies of the truth."""
    better, copies = torch.zeros(len(truth), dtype=torch.long), torch.zeros(len(truth), dtype=torch.long)
    for block in candidates.split(max(1, BLOCK // guess.shape[1])):
        others = images[block].double().flatten(1)
        copy = _copies(truth.double().flatten(1), others)
        similar = _correlation(guess, others) >= correlation[:, None] - TIE
        better += (similar & ~copy).sum(dim=1)
        copies += copy.sum(dim=1)
    return better, copies


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


def clopper_pearson(hits: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a rate; (0, 1) without trials.

    Args:
        hits, n: number of successes, and of trials.
        confidence: probability that the interval covers the true rate.
    """
    if not 0 <= hits <= n:
        raise ValueError(f"{hits} hits in {n} trials")
    tail = (1 - confidence) / 2
    low = float(betaincinv(hits, n - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
    return low, high


def identification_rate(identified: Tensor, chance: float, *, attacks: int = 1) -> Rate:
    """The share of identified images with its exact interval, and the rate of guessing.

    Args:
        identified: n booleans.
        chance: probability that one guess identifies an image.
        attacks: number of attacks of which the best one was taken; chance is multiplied by it.
    """
    hits, n = int(identified.sum()), len(identified)
    low, high = clopper_pearson(hits, n)
    return Rate(rate=hits / n, low=low, high=high, chance=min(1.0, chance * attacks))
