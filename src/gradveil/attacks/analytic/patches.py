"""Where a transformer embeds patches, and the learned positions that it adds to them.

A learned position is added to each embedded patch, so its gradient is the signal δ at the patch, summed over the images. The
gradient of the embedding's weight is Σ δ xᵀ over the patches x.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.layers import hooked
from gradveil.core.local_training import LocalSGD, optimizer
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Shape, Tensors


def why_unreadable(observation: Observation) -> str | None:
    """Why the signals at the patches cannot be told, or None if they can."""
    if not isinstance(optimizer(observation.knowledge.training.optimizer), LocalSGD):
        return "steps that are divided by their size, such as Adam's, do not give away the signals at the patches"
    return None if patch_embedding(observation) else "the model does not add learned positions to embedded patches"


class Embedding(NamedTuple):
    layer: str
    places: Tensor  # patches × pixels of a patch: the number of each pixel in the image
    position: str
    first: int  # the row of `position` that is added to the first patch

    def patches(self, images: Tensor) -> Tensor:
        """Images (… × C × H × W) as patches (… × patches × pixels of a patch)."""
        return images.flatten(-3)[..., self.places]

    def images(self, patches: Tensor, shape: Shape) -> Tensor:
        """The opposite. Pixels that no patch holds are 0."""
        flat = patches.new_zeros(*patches.shape[:-2], math.prod(shape))
        return flat.index_copy(-1, self.places.flatten(), patches.flatten(-2)).unflatten(-1, shape)

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """The signals and the weight's gradient of an update, summed over the steps of local training if there are any.

        Patches enter before any weight, so steps of SGD add up signals at the same patches, each with its factor.
        """
        update, knowledge = observation.update, observation.knowledge
        names = (f"{self.layer}.weight", self.position)
        moved = {name: update.tensors[name].double() * knowledge.norm for name in names}
        if update.kind == "delta":
            start = {name: observation.state[name].double() for name in names}
            moved = knowledge.training.as_gradient(moved, start, knowledge.batch_size // knowledge.aggregate)
        return self.split(moved)

    def split(self, gradients: Tensors) -> tuple[Tensor, Tensor]:
        """The signals at the patches (patches × features), and the weight's gradient (features × pixels of a patch)."""
        weight = gradients[f"{self.layer}.weight"].double().flatten(1)
        signals = gradients[self.position].double().view(-1, len(weight))
        return signals[self.first : self.first + len(self.places)], weight


def patch_embedding(observation: Observation) -> Embedding | None:
    """The patch embedding and its positions, where they explain a gradient on a made-up image."""
    model, rng = observation.model, generator("april")
    layers = {p: m for p, m in model.module.named_modules() if f"{p}.weight" in model.trainable and embeds_patches(m)}
    inputs: dict[str, Tensor] = {}  # of these layers, in the order in which the forward pass meets them

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, arguments: inputs.update({path: arguments[0].detach()})

    probe = distinct_pixels(observation)
    noise = model.draw_noise(1, rng)
    leaves = {n: t.detach().requires_grad_() for n, t in model.parameters(observation.state).items()}
    with torch.enable_grad(), hooked(m.register_forward_pre_hook(note(p)) for p, m in layers.items()):
        outputs = model({**observation.state, **leaves}, probe, noise)
        value = (outputs * torch.randn(outputs.shape, generator=rng)).sum()
    if not inputs or not value.requires_grad:
        return None
    layer = next(iter(inputs))
    patches = patches_at(inputs[layer], layers[layer])
    places = places_of(patches, probe)
    if places is None:
        return None
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return _with_positions(layer, places, patches, dict(zip(leaves, gradients, strict=True)))


def distinct_pixels(observation: Observation) -> Tensor:
    """A made-up image of which no two pixels are equal."""
    shape = torch.Size(observation.task.input_shape)
    return (torch.randperm(shape.numel(), generator=generator("patches")) / shape.numel()).view(1, *shape)


def embeds_patches(module: nn.Module) -> bool:
    """Whether the layer may embed patches: a fully connected one, or a convolution whose windows do not overlap."""
    if not isinstance(module, nn.Conv2d):
        return isinstance(module, nn.Linear)
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding in ((0, 0), "valid")
    return plain and module.stride == module.kernel_size


def patches_at(inputs: Tensor, layer: nn.Module) -> Tensor:
    """What the layer takes at each place, for one image: patches × pixels of a patch."""
    if isinstance(layer, nn.Conv2d):
        return F.unfold(inputs, layer.kernel_size, stride=layer.kernel_size)[0].T
    return inputs.flatten(0, -2)


def places_of(patches: Tensor, image: Tensor) -> Tensor | None:
    """The number of each entry among the pixels of the image, or None where an entry is no pixel or comes twice."""
    pixels, order = image.flatten().to(patches.dtype).sort()
    index = torch.searchsorted(pixels, patches.contiguous()).clamp_max(len(pixels) - 1)
    once = len(index.unique()) == index.numel()
    return order[index] if once and torch.equal(pixels[index], patches) else None


def _with_positions(layer: str, places: Tensor, patches: Tensor, gradients: Tensors) -> Embedding | None:
    """The tensor whose gradient is the signal at the patches: it explains that of the embedding's weight."""
    width = len(gradients[f"{layer}.weight"])
    for name, gradient in gradients.items():
        rows = gradient.numel() // width if gradient.ndim and gradient.shape[-1] == width else 0
        for first in range(rows - len(places) + 1):
            embedding = Embedding(layer, places, name, first)
            signals, weight = embedding.split(gradients)
            if torch.allclose(signals.T @ patches.double(), weight, rtol=0, atol=1e-3 * float(weight.abs().max())):
                return embedding
    return None
