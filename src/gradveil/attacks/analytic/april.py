"""APRIL (Lu et al. 2022): the image behind a transformer's patches, by one linear system.

A learned position is added to each embedded patch, so its gradient is the signal δ at the patch. The gradient of the
embedding's weight is Σ δ xᵀ over the patches x: with at least as many features as patches, every patch is told exactly,
whatever the layers behind do, dropout included.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks import ClosedForm, attack
from gradveil.attacks.layers import hooked
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Tensors


@attack("april", targets="unused")
class April(ClosedForm):
    """Patches from the gradients of learned positions and of the patch embedding.

    Example: gradveil audit --attack april
    """

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.batch_size != 1 or observation.update.kind != "gradient":
            return "it needs the gradient of a single image"
        return None if _embedding(observation) else "the model does not add learned positions to embedded patches"

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        embedding = _embedding(observation)
        assert embedding is not None
        signals, weight = embedding.split(observation.update.tensors)
        patches = torch.linalg.lstsq(signals.T, weight, driver="gelsd").solution
        error = (signals.T @ patches - weight).norm() / weight.norm()
        image = torch.zeros(observation.task.input_shape, dtype=torch.double).flatten()
        image[embedding.places.flatten()] = patches.flatten()
        image = image.view(1, *observation.task.input_shape)
        # As many equations as unknowns are always met: an image that is wrong then leaves the range of pixels.
        pixels = observation.task.denormalize(image)
        outside = (pixels - pixels.clamp(0, 1)).norm() / pixels.norm()
        open_system = signals.shape[0] > signals.shape[1]
        return image.float(), (torch.ones_like(error) if open_system else torch.maximum(error, outside)).float()


class _Embedding(NamedTuple):
    layer: str
    places: Tensor  # patches × pixels of a patch: the number of each pixel in the image
    position: str
    first: int  # the row of `position` that is added to the first patch

    def split(self, gradients: Tensors) -> tuple[Tensor, Tensor]:
        """The signals at the patches (patches × features), and the weight's gradient (features × pixels of a patch)."""
        weight = gradients[f"{self.layer}.weight"].double().flatten(1)
        signals = gradients[self.position].double().view(-1, len(weight))
        return signals[self.first : self.first + len(self.places)], weight


def _embedding(observation: Observation) -> _Embedding | None:
    """The patch embedding and its positions, where they explain a gradient on a made-up image."""
    model, rng = observation.model, generator("april")
    layers = {p: m for p, m in model.module.named_modules() if f"{p}.weight" in model.trainable and _embeds(m)}
    inputs: dict[str, Tensor] = {}  # of these layers, in the order in which the forward pass meets them

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, arguments: inputs.update({path: arguments[0].detach()})

    shape = torch.Size(observation.task.input_shape)
    probe = (torch.randperm(shape.numel(), generator=rng) / shape.numel()).view(1, *shape)  # no two pixels are equal
    noise = model.draw_noise(1, rng)
    leaves = {n: t.detach().requires_grad_() for n, t in model.parameters(observation.state).items()}
    with torch.enable_grad(), hooked(m.register_forward_pre_hook(note(p)) for p, m in layers.items()):
        outputs = model({**observation.state, **leaves}, probe, noise)
        value = (outputs * torch.randn(outputs.shape, generator=rng)).sum()
    if not inputs or not value.requires_grad:
        return None
    layer = next(iter(inputs))
    patches = _patches(inputs[layer], layers[layer])
    places = _places(patches, probe)
    if places is None:
        return None
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return _with_positions(layer, places, patches, dict(zip(leaves, gradients, strict=True)))


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


def _with_positions(layer: str, places: Tensor, patches: Tensor, gradients: Tensors) -> _Embedding | None:
    """The tensor whose gradient is the signal at the patches: it explains that of the embedding's weight."""
    width = len(gradients[f"{layer}.weight"])
    for name, gradient in gradients.items():
        rows = gradient.numel() // width if gradient.ndim and gradient.shape[-1] == width else 0
        for first in range(rows - len(places) + 1):
            embedding = _Embedding(layer, places, name, first)
            signals, weight = embedding.split(gradients)
            if torch.allclose(signals.T @ patches.double(), weight, rtol=0, atol=1e-3 * float(weight.abs().max())):
                return embedding
    return None
