"""PRECODE (Scheliga, Mäder, Seeland, WACV 2022): a variational bottleneck before the classifier.

An encoder turns the features z of an image into a Gaussian N(μ, σ²) of `k` dimensions, a sample of it is decoded to new
features of the old size, and the classifier sees only these. So the gradient of every layer depends on a draw that the
server does not see. The draw is taken at inference too; the loss gains β·KL(N(μ, σ²) ‖ N(0, 1)).

Paper and public code differ in the unit of the KL term: Eq. 3 is the divergence itself (`unit=nats`, the default), the
code divides it by ln 2 (`unit=bits`). σ is the softplus of the encoder's second half, as in the code; the paper leaves
it open. The paper places the bottleneck before the output layer; `placement` names other layers, and several of them
add their losses (Eq. 9). A layer that takes feature maps is given decoded ones of the same shape.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError, unknown
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.defenses.base import Defense
from gradveil.defenses.registry import defense


class VariationalBottleneck(nn.Module):
    """z → encoder → (μ, σ) → b = μ + σ·ε → decoder → ẑ. `noise` is ε, images first; without it ε is drawn afresh."""

    noise: Tensor | None
    _divergence: Tensor | None = None

    def __init__(self, features: int, k: int = 256, beta: float = 1e-3, unit: Literal["nats", "bits"] = "nats"):
        super().__init__()
        self.k, self.beta = k, beta
        self._scale = beta / math.log(2) if unit == "bits" else beta
        self.encoder = nn.Linear(features, 2 * k)
        self.decoder = nn.Linear(k, features)
        self.register_buffer("noise", None, persistent=False)

    def encode(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """μ, σ and log σ of an image's features."""
        mean, raw = self.encoder(z.flatten(1)).chunk(2, dim=1)
        # softplus(s) is exp(s) far below zero, where its logarithm in floats would be −∞
        log_std = torch.where(raw < -15, raw, F.softplus(raw.clamp_min(-15)).log())
        return mean, F.softplus(raw), log_std

    def forward(self, z: Tensor) -> Tensor:
        mean, std, log_std = self.encode(z)
        divergence = 0.5 * (mean**2 + std**2 - 1 - 2 * log_std).sum(1)
        self._divergence = divergence.mean()
        noise = torch.randn_like(mean) if self.noise is None else self.noise.to(mean)
        decoded: Tensor = self.decoder(mean + std * noise)
        return decoded.view_as(z)

    def penalty(self) -> Tensor:
        """β·KL, the mean over the images of the last forward pass: to be added to the loss."""
        found, self._divergence = self._divergence, None  # its graph leads back to the images: given out once, not kept
        if found is None:
            raise RuntimeError("penalty() speaks of the last forward pass, and there was none")
        return self._scale * found

    def draw(self, images: int, rng: torch.Generator) -> Tensor:
        """ε for so many images."""
        return torch.randn(images, self.k, generator=rng)

    def __getstate__(self) -> dict[str, Any]:
        # The divergence belongs to one forward pass and holds its graph, which can be neither copied nor stored.
        return {name: value for name, value in vars(self).items() if name != "_divergence"}


class Guarded(nn.Module):
    """A layer with a bottleneck before it."""

    def __init__(self, bottleneck: VariationalBottleneck, layer: nn.Module):
        super().__init__()
        self.bottleneck = bottleneck
        self.layer = layer

    def forward(self, z: Tensor) -> Tensor:
        output: Tensor = self.layer(self.bottleneck(z))
        return output


@defense("precode", counters=["precode-ignore", "precode-latent", "precode-signal"], random=True)
@settings
class Precode(Defense):
    """A variational bottleneck before the classifier, or before the layers that `placement` names."""

    k: int = Field(default=256, ge=1)  # Section 4; 64 to 512 made no difference (supplement D)
    beta: float = Field(default=1e-3, ge=0)  # Section 4; 0.1 slows the training (supplement D)
    placement: tuple[str, ...] = ()  # paths of submodules; none: the classifier, found by itself
    unit: Literal["nats", "bits"] = "nats"  # of the KL term: Eq. 3, or the public code
    seed: int = 0  # of the new layers' initialisation

    def model(self, module: nn.Module, input_shape: tuple[int, int, int]) -> nn.Module:
        module = copy.deepcopy(module)
        inputs, classes = _forward_pass(module, input_shape)
        layers = dict(module.named_modules())
        for path in self.placement:
            if path not in layers:
                raise unknown("layer", path, inputs, hint=f"The model's layers: {', '.join(p for p in inputs if p)}.")
            if path not in inputs:
                raise UserError(f"precode: layer '{path}' does not run by itself on one tensor; place it elsewhere.")
        for path in self.placement or (_classifier(layers, inputs, classes),):
            guard = self._guard(layers[path], path, inputs[path])
            if not path:
                return guard
            for parent in list(module.modules()):
                for name, child in parent.named_children():
                    if child is layers[path]:
                        setattr(parent, name, guard)
        return module

    def _guard(self, layer: nn.Module, path: str, shape: torch.Size) -> Guarded:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(self.seed, "precode", path).initial_seed())
            bottleneck = VariationalBottleneck(math.prod(shape[1:]), self.k, self.beta, self.unit)
        like = next(layer.parameters(), torch.empty(0))
        return Guarded(bottleneck.to(like), layer).train(layer.training)


def bottlenecks(module: nn.Module) -> dict[str, VariationalBottleneck]:
    """The bottlenecks of a network by path: where an attack finds the encoder."""
    return {path: m for path, m in module.named_modules() if isinstance(m, VariationalBottleneck)}


def _forward_pass(module: nn.Module, input_shape: tuple[int, int, int]) -> tuple[dict[str, torch.Size], int]:
    """The input shape of every layer by path, in the order in which a forward pass runs them; the output's width."""
    probe = copy.deepcopy(module).eval()
    inputs: dict[str, torch.Size] = {}

    def note(path: str) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
            if len(given) == 1 and isinstance(given[0], Tensor):
                inputs.pop(path, None)
                inputs[path] = given[0].shape

        return hook

    for path, part in probe.named_modules():
        part.register_forward_pre_hook(note(path))
    like = next(probe.parameters(), torch.empty(0))
    with torch.no_grad():
        output = probe(torch.zeros(1, *input_shape, dtype=like.dtype, device=like.device))
    return inputs, output.shape[-1]


def _classifier(layers: dict[str, nn.Module], inputs: dict[str, torch.Size], classes: int) -> str:
    """The last linear layer that runs, of those as wide as the network's output where there are any."""
    linear = {path: m.out_features for path in inputs if isinstance(m := layers[path], nn.Linear)}
    if not linear:
        raise UserError("precode finds no linear classifier in this model; name a layer with precode:placement=….")
    return next((path for path in reversed(linear) if linear[path] == classes), list(linear)[-1])
