"""The other images of a batch as a Gaussian, by the gradients of public images: what a candidate must stand out from.

A batch of B images sends the sum of their gradients (divided by B). Of the candidate the gradient g is computed; the others
have labels that were read from the update, so their sum has the mean Σ nₖ μₖ and the covariance Σ nₖ Sₖ over the classes k.
Public gradients are too few to tell Sₖ in all directions. So K = their covariance + a ridge + the noise that the defense
declares, where the ridge of a layer is a share of the mean variance of its entries. All that follows needs inner products
alone, as K is a diagonal matrix plus one of the rank of the public images (Woodbury).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.lineup.contributions import Contributions

DOUBT = 0.02  # images per image of the batch whose label may have been misread


class OtherImages:
    """Public gradients by class, and their inner products."""

    def __init__(self, public: Contributions, labels: Tensor, classes: int):
        self.public, self.labels, self.classes = public, labels, classes
        member = torch.nn.functional.one_hot(labels, classes).double()
        self.sizes = member.sum(0)
        # Rows that average a class; the mean of all images where a class has none.
        averages = torch.where(self.sizes[:, None] > 0, member.T / self.sizes.clamp_min(1)[:, None], 1 / len(labels))
        self.member, self.averages = member, averages

    @cached_property
    def grams(self) -> Tensor:
        """Blocks × P × P: inner products."""
        return self.public.dot(self.public)

    @cached_property
    def variances(self) -> Tensor:
        """Blocks × P: the squared distance of each public gradient from the mean of its class."""
        squares = torch.diagonal(self.grams, dim1=1, dim2=2)
        toward = self.averages @ self.grams  # blocks × classes × P
        means = torch.diagonal(toward @ self.averages.T, dim1=1, dim2=2)
        return (squares - 2 * (toward * self.member.T).sum(1) + means @ self.member.T).clamp_min(0)

    def weights(self, counts: Tensor) -> Tensor:
        """What each public gradient counts in the covariance of so many others per class."""
        doubt = DOUBT * (1 + float(counts.sum())) / self.classes
        share = (counts + doubt) / self.sizes.clamp_min(1)
        return (share * (1 + counts / self.sizes.clamp_min(1)))[self.labels]

    def mean(self, counts: Tensor) -> Tensor:
        """The mean of so many others per class, as a combination of public gradients."""
        return counts @ self.averages


@dataclass(frozen=True)
class Seen:
    """What is compared: inner products, per block, of the public gradients and of candidates with an update."""

    public: Tensor  # blocks × P
    candidates: Tensor  # blocks × m


class WhitenedCandidates(NamedTuple):
    """Candidates g under one covariance K."""

    products: Tensor  # P × m: with public gradients
    coordinates: Tensor
    squares: Tensor  # m: g K⁻¹ g

    def picked(self, index: Tensor) -> WhitenedCandidates:
        return WhitenedCandidates(self.products[:, index], self.coordinates[:, index], self.squares[index])


class Whitening:
    """The covariance K of the others, with a ridge and a variance of noise, and products a K⁻¹ b."""

    def __init__(self, background: OtherImages, counts: Tensor, ridge: float, noise: float):
        self.background, weights = background, background.weights(counts)
        variance = background.variances @ weights
        floor = 1e-12 * variance.sum() / background.public.entries.sum()
        self.diagonal = (ridge * variance / background.public.entries + noise + floor).clamp_min(1e-300)
        self.gram = self.weigh(background.grams)
        doubt = DOUBT * (1 + float(counts.sum()))
        spread = torch.cat([weights, torch.full((background.classes,), doubt, dtype=torch.double)])
        inner = self._basis(self._basis(self.gram).T) + torch.diag(1 / spread)
        self.root = torch.linalg.cholesky(inner)

    def weigh(self, products: Tensor) -> Tensor:
        """Products per block, with the diagonal part of K⁻¹ between them."""
        weighed: Tensor = torch.tensordot(1 / self.diagonal, products, dims=1)
        return weighed

    def coordinates(self, products: Tensor) -> Tensor:
        """P × n products with public gradients, so changed that a K⁻¹ b = ab − coordinates(a) · coordinates(b)."""
        solution: Tensor = torch.linalg.solve_triangular(self.root, self._basis(products), upper=False)
        return solution

    def of(self, cross: Tensor, squares: Tensor) -> WhitenedCandidates:
        """Candidates by their products with public gradients (blocks × P × m), and their squares (blocks × m)."""
        products = self.weigh(cross)
        coordinates = self.coordinates(products)
        return WhitenedCandidates(products, coordinates, self.weigh(squares) - coordinates.square().sum(0))

    def _basis(self, products: Tensor) -> Tensor:
        """Products with public gradients as those with deviations from class means, and of class means from their mean."""
        means = self.background.averages @ products
        return torch.cat([products - self.background.member @ means, means - means.mean(0)])


@dataclass(frozen=True)
class Filter:
    """The matched filter: how likely the update is if a candidate was in the batch.

    Args:
        ridge: share of the mean variance of a layer's entries.
        free: the size of the update says nothing, so that the likeliest one is taken for each candidate.
    """

    ridge: float
    free: bool

    def scores(self, whitening: Whitening, candidates: WhitenedCandidates, seen: Seen, counts: Tensor) -> Tensor:
        """m scores. `counts`: images per class, without the candidate."""
        mean, coordinates = whitening.background.mean(counts), candidates.coordinates
        public, toward = whitening.weigh(seen.public), whitening.gram @ mean
        update, others = whitening.coordinates(torch.stack([public, toward], 1)).unbind(1)
        by_update: Tensor = whitening.weigh(seen.candidates) - coordinates.T @ update
        by_others = mean @ candidates.products - coordinates.T @ others
        if not self.free:
            return by_update - by_others - candidates.squares / 2
        both: Tensor = by_update + mean @ public - update @ others
        length = candidates.squares + 2 * by_others + mean @ toward - others @ others
        return both * both.abs() / length.clamp_min(1e-300) / 2
