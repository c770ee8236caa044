"""Whether a candidate's input of a fully connected layer lies in the span of what the layer sent.

The gradient of such a layer is a sum of products signal ⊗ input over the batch, so its rows are mixtures of the inputs
(Petrov et al. 2024, DAGER). A candidate of the batch lies in their span, and others do not, as long as the layer has more
units than the batch has images. Neither labels nor signals are needed, and several local steps change nothing at the first
layer. Small singular values are rounding or noise; they are left out smoothly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.lineup.contributions import LayerBlock
from gradveil.core.randomness import generator

EXACT = 1e-10  # share of an input outside the span that counts as none
SPARE = 16  # directions that are computed beyond two per image


class Directions(NamedTuple):
    """The main directions of the rows of an update, and how large it is along them, largest first."""

    sizes: Tensor
    rows: Tensor  # directions × width

    @staticmethod
    def of(sent: Tensor, images: int) -> Directions:
        """Of a layer's update (outputs × width) by so many images. Few of many directions are computed from a sketch."""
        rank = 2 * images + SPARE
        if rank < min(sent.shape) // 2:
            sketch = sent @ torch.randn(sent.shape[1], rank, generator=generator("span"), dtype=sent.dtype)
            basis = torch.linalg.qr(sent @ (sent.T @ sketch)).Q
            sent = basis.T @ sent
        _, sizes, rows = torch.linalg.svd(sent, full_matrices=False)
        return Directions(sizes, rows)


@dataclass(frozen=True)
class Span:
    """One layer, by its number among the blocks; `cut` is the share of the largest singular value that counts half."""

    block: int
    cut: float

    def scores(self, directions: Directions, candidates: LayerBlock) -> Tensor:
        """The logarithm of the share of each candidate's input that lies outside, negative: higher is nearer."""
        sizes, rows = directions
        kept = sizes.square() / (sizes.square() + (self.cut * sizes[0]).square()).clamp_min(1e-300)
        inputs = candidates.inputs.double()
        inside = (inputs @ rows.T).square() @ (1 - (1 - kept).square())
        return -(1 - inside / inputs.square().sum(1).clamp_min(1e-300)).clamp_min(EXACT).log()
