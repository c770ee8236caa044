"""Where a transformer embeds patches, and the learned positions that it adds to them.

A learned position is added to each embedded patch, so its gradient is the signal δ at the patch, summed over the images. The
gradient of the embedding's weight is Σ δ xᵀ over the patches x.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradveil.attacks.layers import hooked, noting_inputs, probe
from gradveil.core.local_training import LocalSGD, optimizer
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Shape, Tensors


def why_unreadable(observation: Observation) -> str | None:
    """Why the signals at the patches cannot be told, or None if they can."""
    if not isinstance(optimizer(observation.knowledge.training.optimizer), LocalSGD):
        return "steps that are divided by their size, such as Adam's, do not give away the signals at the patches"
    return None if patch_embedding(observation) else "the model does not add learned positions to embedded patches"


class PatchLayer(NamedTuple):
    path: str
    places: Tensor  # patches × pixels of a patch: the number of each pixel in the image

    def patches(self, images: Tensor) -> Tensor:
        """Images (… × C × H × W) as patches (… × patches × pixels of a patch)."""
        return images.flatten(-3)[..., self.places]

    def images(self, patches: Tensor, shape: Shape) -> Tensor:
        """The opposite. Pixels that no patch holds are 0."""
        flat = patches.new_zeros(*patches.shape[:-2], math.prod(shape))
        images: Tensor = flat.index_copy(-1, self.places.flatten(), patches.flatten(-2)).unflatten(-1, shape)
        return images


class Embedding(NamedTuple):
    layer: PatchLayer
    position: str
    first: int  # the row of `position` that is added to the first patch

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """The signals and the weight's gradient of an update, summed over the steps of local training if there are any.

        Patches enter before any weight, so steps of SGD add up signals at the same patches, each with its factor.
        """
        update, knowledge = observation.update, observation.knowledge
        names = (f"{self.layer.path}.weight", self.position)
        moved = {name: update.tensors[name].double() * knowledge.norm for name in names}
        if update.kind == "delta":
            start = {name: observation.state[name].double() for name in names}
            moved = knowledge.training.as_gradient(moved, start, knowledge.batch_size // knowledge.aggregate)
        return self.split(moved)

    def split(self, gradients: Tensors) -> tuple[Tensor, Tensor]:
        """The signals at the patches (patches × features), and the weight's gradient (features × pixels of a patch)."""
        weight = gradients[f"{self.layer.path}.weight"].double().flatten(1)
        signals = gradients[self.position].double().view(-1, len(weight))
        return signals[self.first : self.first + len(self.layer.places)], weight


def patch_embedding(observation: Observation) -> Embedding | None:
    """The patch embedding and its positions, where they explain a gradient on a made-up image."""
    layer = patch_layer(observation)
    if layer is None or f"{layer.path}.weight" not in observation.model.trainable:
        return None
    image = distinct_pixels(observation)
    return _with_positions(layer, layer.patches(image[0]), made_up_gradients(observation, image))


def patch_layer(observation: Observation) -> PatchLayer | None:
    """The first layer, where it takes the pixels of an image by patches, each pixel once."""
    layers = {p: m for p, m in observation.model.module.named_modules() if _embeds(m)}
    inputs: Tensors = {}
    image = distinct_pixels(observation)
    probe(observation, noting_inputs(layers, inputs), image)
    if not inputs:
        return None
    path = next(iter(inputs))
    places = _places(_patches(inputs[path], layers[path]), image)
    return None if places is None else PatchLayer(path, places)


def made_up_gradients(observation: Observation, image: Tensor, handles: Iterable[RemovableHandle] = ()) -> Tensors:
    """Gradients of all trained parameters on an image, by random weights of the outputs. The hooks are removed then."""
    model, rng = observation.model, generator("patches")
    noise = model.draw_noise(1, rng)
    leaves = {n: t.detach().requires_grad_() for n, t in model.parameters(observation.state).items()}
    with torch.enable_grad(), hooked(handles):
        outputs = model({**observation.state, **leaves}, image.to(next(iter(leaves.values())).dtype), noise)
        value = (outputs * torch.randn(outputs.shape, generator=rng)).sum()
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def doubt(image: Tensor, error: Tensor, observation: Observation) -> Tensor:
    """The score of an image that solves equations but for an `error`, as a share of their size.

    As many equations as unknowns are always met: an image that is wrong then leaves the range of pixels.
    """
    pixels = observation.task.denormalize(image)
    return torch.maximum(error, (pixels - pixels.clamp(0, 1)).norm() / pixels.norm())


def distinct_pixels(observation: Observation) -> Tensor:
    """A made-up image of which no two pixels are equal."""
    shape = torch.Size(observation.task.input_shape)
    return (torch.randperm(shape.numel(), generator=generator("patches")) / shape.numel()).view(1, *shape)


def _embeds(module: nn.Module) -> bool:
    """Whether the layer may embed patches: a fully connected one, or a convolution whose windows do not overlap."""
    if not isinstance(module, nn.Conv2d):
        return isinstance(module, nn.Linear)
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding in ((0, 0), "valid")
    return plain and module.stride == module.kernel_size


def _patches(inputs: Tensor, layer: nn.Module) -> Tensor:
    """What the layer takes at each place, for one image: patches × pixels of a patch."""
    if isinstance(layer, nn.Conv2d):
        return F.unfold(inputs, layer.kernel_size, stride=layer.kernel_size)[0].T
    return inputs.flatten(0, -2)


def _places(patches: Tensor, image: Tensor) -> Tensor | None:
    """The number of each entry among the pixels of the image, or None where an entry is no pixel or comes twice."""
    pixels, order = image.flatten().to(patches.dtype).sort()
    index = torch.searchsorted(pixels, patches.contiguous()).clamp_max(len(pixels) - 1)
    once = len(index.unique()) == index.numel()
    return order[index] if once and torch.equal(pixels[index], patches) else None


def _with_positions(layer: PatchLayer, patches: Tensor, gradients: Tensors) -> Embedding | None:
    """The tensor whose gradient is the signal at the patches: it explains that of the embedding's weight."""
    width = len(gradients[f"{layer.path}.weight"])
    for name, gradient in gradients.items():
        rows = gradient.numel() // width if gradient.ndim and gradient.shape[-1] == width else 0
        for first in range(rows - len(patches) + 1):
            embedding = Embedding(layer, name, first)
            signals, weight = embedding.split(gradients)
            if weight.any() and torch.allclose(
                signals.T @ patches.double(), weight, rtol=0, atol=1e-3 * float(weight.abs().max())
            ):
                return embedding
    return None
