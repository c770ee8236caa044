"""Blind source separation of images that were mixed by a fully connected layer (Cocktail Party, Kariyappa et al. 2023).

The rows of ∇W = Sᵀ X are mixtures of the images X of a batch. Differences between neighbouring pixels are mostly near zero, and
those of two images hardly depend on each other, so they are separated by independent component analysis (FastICA,
Hyvärinen 1999). Two images are never quite uncorrelated, as FastICA wants them; steps of maximum likelihood under a
heavy-tailed law (Amari et al. 1996) free them from that. The bias gradient gives sign and size. No label, ReLU or sparsity
is needed; the images are approximate.
"""

import torch
from torch import Tensor

from gradveil.core.randomness import generator
from gradveil.core.types import Shape

_FIXED_POINT_STEPS, _LIKELIHOOD_STEPS = 200, 200
_STEP = 0.2  # of the likelihood
_STILL = 1e-6  # change of a direction at which the fixed point is reached


def separated(mixtures: Tensor, shape: Shape) -> Tensor:
    """K × pixels: the images behind K independent mixtures (K × pixels + 1), whose last entries are those of the bias."""
    pictures = mixtures[:, :-1].unflatten(1, shape)
    down, across = (pictures.diff(dim=axis).flatten(1) for axis in (2, 3))
    images = unmixing(torch.cat([down, across], 1)) @ mixtures
    sizes = images[:, -1:]
    return images[:, :-1] / torch.where(sizes.abs() > 1e-12, sizes, 1e-12)


def unmixing(samples: Tensor) -> Tensor:
    """The matrix (K × K) that makes the rows of `samples` (K × n) independent, up to their order and size."""
    count, number = samples.shape
    if not samples.any():
        return torch.eye(count, dtype=samples.dtype)  # of nothing, no part is another's
    values, vectors = torch.linalg.eigh(samples @ samples.T / number)
    whitening = vectors.T / values.clamp_min(1e-14 * values.max()).sqrt()[:, None]
    white = whitening @ samples
    directions = _orthonormal(torch.randn(count, count, generator=generator(0, "separation"), dtype=samples.dtype))
    for _ in range(_FIXED_POINT_STEPS):
        parts = torch.tanh(directions @ white)
        slopes = (1 - parts**2).mean(1, keepdim=True)
        moved = _orthonormal(parts @ white.T / number - slopes * directions)
        still = float((1 - (moved * directions).sum(1).abs()).max()) < _STILL
        directions = moved
        if still:
            break
    for _ in range(_LIKELIHOOD_STEPS):
        parts = directions @ white
        scores = torch.tanh(3 * parts / parts.abs().mean(1, keepdim=True)) / parts.abs().mean(1, keepdim=True)
        gradient = torch.eye(count, dtype=samples.dtype) - scores @ parts.T / number
        directions = directions + _STEP * gradient @ directions
    unmixed: Tensor = directions @ whitening
    return unmixed


def _orthonormal(directions: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows, which favours none of them."""
    u, _, v = torch.linalg.svd(directions)
    nearest: Tensor = u @ v
    return nearest
