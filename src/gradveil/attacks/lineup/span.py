"""Whether a candidate's input of a fully connected layer lies in the span of what the layer sent.

The gradient of such a layer is a sum of products signal ⊗ input over the batch, so its rows are mixtures of the inputs
(Petrov et al. 2024, DAGER). A candidate of the batch lies in their span, and others do not, as long as the layer has more
units than the batch has images. Neither labels nor signals are needed, and several local steps change nothing at the first
layer. Small singular values are rounding or noise; they are left out smoothly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.lineup.contributions import Dense

EXACT = 1e-10  # share of an input outside the span that counts as none


@dataclass(frozen=True)
class Span:
    """One layer, by its number among the blocks; `cut` is the share of the largest singular value that counts half."""

    block: int
    cut: float

    def scores(self, sent: Tensor, candidates: Dense) -> Tensor:
        """The logarithm of the share of each candidate's input that lies outside, negative: higher is nearer."""
        _, sizes, directions = torch.linalg.svd(sent, full_matrices=False)
        kept = sizes.square() / (sizes.square() + (self.cut * sizes[0]).square()).clamp_min(1e-300)
        inputs = candidates.inputs.double()
        inside = (inputs @ directions.T).square() @ (1 - (1 - kept).square())
        return -(1 - inside / inputs.square().sum(1).clamp_min(1e-300)).clamp_min(EXACT).log()
