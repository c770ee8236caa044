"""The image behind normalised tokens, without the signals at its patches: fixed positions, LoRA, adapters. Ours.

A trained layer that takes the normalised tokens has a gradient Σ s uᵀ over the tokens u. While tokens are fewer than features,
the span of its rows holds every token (the span check of DAGER, Petrov et al. 2024). A token is γ (t − mean t) / σ + β, and its
t = W x + c is known up to the patch x: c holds the bias and the position, learned or fixed. So at each place x solves linear
equations, with σ as one more unknown where β is not 0: as many as features that are not in the span. Where the patch embedding
is trained too, its gradient spans the patches, and only their combinations are looked for.

LoRA's A has this gradient once its B is not 0, with as many rows as its rank. Layers that take the same tokens add up; ranks
that are fewer than the tokens in all tell mixtures of them, which leave every patch open. So do batches: with one more image,
differences of patches are free everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks import ClosedForm, attack
from gradveil.attacks.analytic.patches import PatchLayer, distinct_pixels, doubt, made_up_gradients, patch_layer
from gradveil.attacks.layers import noting_inputs, probe
from gradveil.core.observation import Observation
from gradveil.core.types import Tensors

WEAK = 1e-6  # singular value, as a share of the largest, below which a direction does not count


@attack("token-span", targets="unused")
class TokenSpan(ClosedForm):
    """Patches whose tokens lie in the span of a layer's gradient.

    Example: gradveil audit --model vit:patch=8 --attack token-span
    """

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.batch_size != 1 or observation.update.kind != "gradient":
            return "it needs the gradient of a single image"
        tokens = _tokens(observation)
        if tokens is None:
            return "the model does not normalise embedded patches"
        if not tokens.layers:
            return "the gradients of trained layers do not span the normalised tokens"
        rows, width = tokens.constant.shape
        unknowns = _unknowns(observation, tokens).shape[1]
        if width - rows - 1 < unknowns:
            return f"{width} features less {rows} tokens are fewer equations than the {unknowns} unknowns of a patch"
        return None

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        tokens = _tokens(observation)
        assert tokens is not None
        unknowns = _unknowns(observation, tokens)
        gradients = _stacked([observation.update.tensors[name] for name in tokens.layers])
        outside = torch.linalg.svd(gradients).Vh[len(tokens.constant) :]
        embedded = observation.state[f"{tokens.patch_layer.path}.weight"].double().flatten(1) @ unknowns
        directions = [tokens.scaled(embedded.T), *([tokens.shift[None]] if bool(tokens.shift.any()) else [])]
        matrix = outside @ torch.cat(directions).T
        wanted = -outside @ tokens.scaled(tokens.at_patches).T
        solution = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution
        error = (matrix @ solution - wanted).norm() / wanted.norm()
        patches = (unknowns @ solution[: unknowns.shape[1]]).T
        image = tokens.patch_layer.images(patches, observation.task.input_shape)[None]
        return image.float(), doubt(image, error, observation).float()


class _Tokens(NamedTuple):
    """What enters the first norm for an image x: `constant`, and the embedded patches from row `first` on."""

    patch_layer: PatchLayer
    constant: Tensor  # tokens × features
    first: int
    scale: Tensor  # γ of the norm
    shift: Tensor  # β of the norm
    layers: list[str]  # trained matrices whose gradients span the normalised tokens; none where they do not

    @property
    def at_patches(self) -> Tensor:
        return self.constant[self.first : self.first + len(self.patch_layer.places)]

    def scaled(self, rows: Tensor) -> Tensor:
        """The norm of rows of features, but for the division by their size and for β."""
        return self.scale * (rows - rows.mean(-1, keepdim=True))


def _unknowns(observation: Observation, tokens: _Tokens) -> Tensor:
    """Directions, pixels of a patch × numbers, whose combinations a patch may be."""
    count, pixels = tokens.patch_layer.places.shape
    gradient = observation.update.tensors.get(f"{tokens.patch_layer.path}.weight")
    if gradient is None or count >= min(pixels, len(gradient)):
        return torch.eye(pixels, dtype=torch.double)
    directions: Tensor = torch.linalg.svd(gradient.double().flatten(1), full_matrices=False).Vh[:count].T
    return directions


def _tokens(observation: Observation) -> _Tokens | None:
    """Asked of the network by a made-up image beside a black one."""
    patch = patch_layer(observation)
    norms = {p: m for p, m in observation.model.module.named_modules() if isinstance(m, nn.LayerNorm)}
    inputs: Tensors = {}
    inputs_of_black: Tensors = {}
    image = distinct_pixels(observation)
    gradients = made_up_gradients(observation, image, noting_inputs(norms, inputs))
    probe(observation, noting_inputs(norms, inputs_of_black), torch.zeros_like(image))
    if patch is None or not inputs:
        return None
    norm = next(iter(inputs))
    tokens, constant = (side[norm].double().flatten(0, -2) for side in (inputs, inputs_of_black))
    embedded = patch.patches(image[0]).double() @ observation.state[f"{patch.path}.weight"].double().flatten(1).T
    first = _first_row(tokens - constant, embedded)
    if first is None:
        return None
    scale, shift = (observation.state.get(f"{norm}.{part}") for part in ("weight", "bias"))
    ones = torch.ones(tokens.shape[1], dtype=torch.double)
    scale, shift = ones if scale is None else scale.double(), 0 * ones if shift is None else shift.double()
    normalised = F.layer_norm(tokens, ones.shape, scale, shift)
    layers = [name for name, gradient in gradients.items() if _is_spanned(gradient.double(), normalised)]
    sizes = torch.linalg.svdvals(_stacked([gradients[name] for name in layers])) if layers else ones[:0]
    full = len(sizes) >= len(tokens) and bool(sizes[len(tokens) - 1] > WEAK * sizes[0])
    return _Tokens(patch, constant, first, scale, shift, layers if full else [])


def _first_row(rows: Tensor, embedded: Tensor) -> int | None:
    """Where the embedded patches begin among rows of features that hold nothing else."""
    if rows.shape[1] != embedded.shape[1]:
        return None
    for first in range(len(rows) - len(embedded) + 1):
        whole = torch.zeros_like(rows)
        whole[first : first + len(embedded)] = embedded
        if torch.allclose(rows, whole, rtol=0, atol=1e-4 * float(embedded.abs().max())):
            return first
    return None


def _is_spanned(gradient: Tensor, tokens: Tensor) -> bool:
    """Whether the rows of the gradient of a matrix lie in the span of the tokens."""
    if gradient.ndim != 2 or gradient.shape[1] != tokens.shape[1] or len(tokens) >= tokens.shape[1] or not gradient.any():
        return False
    basis = torch.linalg.svd(tokens, full_matrices=False).Vh
    return bool((gradient - gradient @ basis.T @ basis).norm() < 1e-4 * gradient.norm())


def _stacked(gradients: Sequence[Tensor]) -> Tensor:
    """The rows of several gradients, each gradient of length 1."""
    return torch.cat([g.double() / g.double().norm().clamp_min(1e-30) for g in gradients])
