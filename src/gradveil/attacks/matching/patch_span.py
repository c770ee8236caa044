"""Batches behind a transformer's patches: what is certain of every patch first, then a search among what is left. Ours.

The patches x of all images, at all places p, have signals δ. The patch embedding's gradient is Σ δ xᵀ, and that of the learned
position p is the sum of δ over the patches at p (`analytic/patches.py`). While images × patches are fewer than the features and
than the pixels of a patch, both matrices of the sum have full rank, and so:

1. Every patch lies in the span of the gradient's rows (the span check of DAGER, Petrov et al. 2024, without candidates).
2. In this span, the sum over the images of the dual vectors of the patches at p is known: its product with a patch is 1 at p
   and 0 elsewhere. Of images × patches numbers per patch (images − 1) × patches are left: none for a single image, which is
   APRIL. All of this holds for weight differences of SGD too.
3. These numbers are found by matching the whole update, in double precision: the span's weak directions are 10⁵ times smaller
   than its strong ones. Steps are taken in units of the square root of the singular values, so that fine structure does not
   hold up coarse one, and the embedding's gradient is compared in these units too, so that weak patches count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.analytic.patches import Embedding, PatchLayer, patch_embedding, why_unreadable
from gradveil.attacks.matching.distances import RelativeL2, fitted
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.problem import Match, Problem
from gradveil.attacks.matching.rows import Rows
from gradveil.core.observation import Observation
from gradveil.core.types import Shape, Tensors

SPREAD = 0.3  # of the start, in units of the span's coordinates
WHITE = 0.01  # weight of the embedding's gradient with equal singular values
MEMORY = 50  # steps that L-BFGS remembers


@attack("patch-span", targets="any")
class PatchSpan(Attack):
    """A search for the patches of a batch among those that the patch embedding and its positions allow.

    Args:
        steps: iterations of L-BFGS, scaled by the budget.
    Example: gradveil audit --model vit:patch=8 --batch-size 2 --attack patch-span
    """

    steps: int = Field(default=2000, ge=1)

    def applies(self, observation: Observation) -> str | None:
        images = observation.knowledge.batch_size
        if images == 1:
            return "it separates the images of a batch; `april` reads a single one"
        reason, embedding = why_unreadable(observation), patch_embedding(observation)
        if reason or embedding is None:
            return reason
        patches, pixels = embedding.layer.places.shape
        width = len(observation.state[f"{embedding.layer.path}.weight"])
        if images * patches >= min(width, pixels):
            return f"{images} × {patches} patches are not fewer than the {width} features and {pixels} pixels of a patch"
        if int(torch.linalg.matrix_rank(embedding.read(observation)[1].double())) < images * patches:
            return f"the gradient of the embedding tells of fewer than {images} × {patches} patches"
        return None

    def cost(self, work: Workload) -> Cost:
        return Cost(LBFGS().expected_evaluations(work.steps(self.steps)))

    def run(self, target: Target) -> Answer:
        answers = [self._one(target.subset([row], "start")) for row in range(target.shape[0])]
        x, score = torch.cat([a.x for a in answers]), torch.cat([a.score for a in answers])
        return Answer(x.float(), score.float(), iterations=max(a.iterations for a in answers))

    def _one(self, target: Target) -> Answer:
        embedding = patch_embedding(target.first)
        assert embedding is not None
        target = target.about([_in_double(target.first)], target.labels)
        span = PatchCoordinates.of(target, embedding)
        z = SPREAD * torch.randn(target.shape[1], len(span.offset), len(span.basis), generator=target.rng).double()
        match = Match(
            RelativeL2(), (), LBFGS(history=MEMORY, tolerance=1e-3), target.workload.steps(self.steps), coordinates=span
        )
        solution = solve(_WhiteProblem(target, match, span), start=span.images(z[None]))
        return Answer(solution.x, solution.residual, iterations=solution.iterations)


@dataclass(frozen=True)
class PatchCoordinates:
    """A linear map between images and the numbers that step 2 leaves open, images × patches × numbers."""

    layer: PatchLayer
    shape: Shape
    offset: Tensor  # patches × pixels of a patch
    basis: Tensor  # numbers × pixels of a patch
    left: Tensor  # features × rank, and
    right: Tensor  # pixels of a patch × rank: between them the embedding's gradient becomes the identity

    @staticmethod
    def of(target: Target, embedding: Embedding) -> PatchCoordinates:
        signals, weight = embedding.read(target.first)
        rank = target.shape[1] * len(signals)
        left, sizes, rows = (t[..., :rank] for t in _svd(weight))
        units = sizes.sqrt() / sizes.mean().sqrt()
        duals = signals @ left / sizes * units
        open_directions = torch.linalg.svd(duals).Vh[len(signals) :]
        span = units[:, None] * rows.T
        offset, basis = torch.linalg.pinv(duals).T @ span, open_directions @ span
        left, right = left / sizes.sqrt(), rows / sizes.sqrt()
        return PatchCoordinates(embedding.layer, target.task.input_shape, offset, basis, left, right)

    def images(self, z: Tensor) -> Tensor:
        return self.layer.images(self.offset + z @ self.basis, self.shape)

    def of_images(self, x: Tensor) -> Tensor:
        numbers: Tensor = (self.layer.patches(x) - self.offset) @ torch.linalg.pinv(self.basis)
        return numbers

    def slope(self, gradient: Tensor) -> Tensor:
        return self.layer.patches(gradient) @ self.basis.T


class _WhiteProblem(Problem):
    """The match of all gradients, and of the embedding's with all its singular values made equal."""

    def __init__(self, target: Target, match: Match, span: PatchCoordinates):
        super().__init__(target, match)
        self.span = span

    def compare(self, updates: Tensors, rows: Rows, sighting: int = 0) -> Tensor:
        downhill = 1 if self.target.first.update.kind == "gradient" else -1
        white = downhill * self.span.left.T @ updates[f"{self.span.layer.path}.weight"].flatten(2) @ self.span.right
        identity = torch.eye(white.shape[-1], dtype=white.dtype)
        error = torch.cat(fitted([white], [identity[None]])) - identity
        return super().compare(updates, rows, sighting) + WHITE * error.square().mean((1, 2))


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Left and right singular vectors as columns, and the singular values between them."""
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, sizes, right.mT


def _in_double(observation: Observation) -> Observation:
    def double(tensors: Tensors) -> Tensors:
        return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}

    seen = [
        replace(s, state=double(s.state), update=replace(s.update, tensors=double(s.update.tensors))) for s in observation.seen
    ]
    return replace(observation, seen=tuple(seen))
