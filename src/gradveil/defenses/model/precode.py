"""PRECODE: a variational bottleneck before the classifier hides the features behind a random draw."""

import copy
import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError, unknown
from gradveil.core.layers import layer_inputs
from gradveil.core.randomness import Stream, seeded
from gradveil.core.settings import settings
from gradveil.defenses import Defense, defense


class VariationalBottleneck(nn.Module):
    """z → encoder → (μ, σ) → b = μ + σ·ε → decoder → ẑ. The buffer `noise` is ε (n × k); without it ε is drawn anew."""

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
        """μ, σ and log σ (n × k) for the features of n images."""
        mean, raw = self.encoder(z.flatten(1)).chunk(2, dim=1)
        # far below zero softplus(s) is exp(s), and the logarithm of its float value would be −∞
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
        """β·KL, the mean over the images of the last forward pass, which is added to the loss."""
        divergence, self._divergence = self._divergence, None  # its graph leads to the images, so it is not kept
        if divergence is None:
            raise RuntimeError("penalty() needs a forward pass before it")
        return self._scale * divergence

    def draw(self, images: int, rng: Stream) -> Tensor:
        """ε (images × k)."""
        return rng.normal((images, self.k))

    def __getstate__(self) -> dict[str, object]:
        # The divergence holds the graph of one forward pass, which can be neither copied nor stored.
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


@defense("precode", random=True)
@settings
class Precode(Defense):
    """Put a variational bottleneck before the classifier, or before the layers that `placement` names.

    Scheliga, Mäder, Seeland, WACV 2022. An encoder maps the features z of an image to a Gaussian N(μ, σ²) of `k`
    dimensions; a sample of it is decoded to features of the old size, and the classifier sees only these. So the
    gradient of every layer depends on a draw that the server does not see. The draw is taken at inference too; the loss
    gains β·KL(N(μ, σ²) ‖ N(0, 1)). Several bottlenecks add their losses (Eq. 9). Before a convolution the decoded
    features have the shape of the feature map.

    Paper and public code differ in the unit of the KL term. The paper does not define σ; in the code it is the softplus
    of the second half of the encoder output, and so it is here.

    Args:
        k: dimensions of the bottleneck. Section 4: 256; 64 to 512 make no difference (supplement D).
        beta: weight of the KL term. Section 4: 1e-3; 0.1 slows the training (supplement D).
        placement: paths of layers, separated by `/`; empty: the classifier, as in the paper.
        unit: of the KL term: `nats` as in Eq. 3, or `bits` (divided by ln 2) as in the code.
        seed: of the initial weights of the new layers.

    Example:
        >>> gv.protect(model, "precode:k=64", data=(x, y))
    """

    k: int = Field(default=256, ge=1)
    beta: float = Field(default=1e-3, ge=0)
    placement: tuple[str, ...] = ()
    unit: Literal["nats", "bits"] = "nats"
    seed: int = 0

    def model(self, module: nn.Module, input_shape: tuple[int, int, int]) -> nn.Module:
        module = copy.deepcopy(module)
        layers, (shapes, classes) = dict(module.named_modules()), _forward_pass(module, input_shape)
        for path in self.placement:
            if path not in layers:
                raise unknown("layer", path, shapes, hint=f"The layers of the model: {', '.join(p for p in shapes if p)}.")
            if path not in shapes:
                raise UserError(f"precode: layer '{path}' does not run on one tensor alone; choose another layer.")
        for path in self.placement or (_classifier(layers, shapes, classes),):
            guard = self._guard(layers[path], path, shapes[path])
            if not path:
                return guard
            for parent in list(module.modules()):
                for name, child in parent.named_children():
                    if child is layers[path]:
                        setattr(parent, name, guard)
        return module

    def _guard(self, layer: nn.Module, path: str, shape: torch.Size) -> Guarded:
        with seeded(self.seed, "precode", path):
            bottleneck = VariationalBottleneck(math.prod(shape[1:]), self.k, self.beta, self.unit)
        like = next(layer.parameters(), torch.empty(0))
        return Guarded(bottleneck.to(like), layer).train(layer.training)


def bottlenecks(module: nn.Module) -> dict[str, VariationalBottleneck]:
    """The bottlenecks of a network by path. Attacks use their encoders."""
    return {path: m for path, m in module.named_modules() if isinstance(m, VariationalBottleneck)}


def _forward_pass(module: nn.Module, input_shape: tuple[int, int, int]) -> tuple[dict[str, torch.Size], int]:
    """The input shape of every layer by path, in the order in which the layers run; and the width of the output."""
    probe, outputs = copy.deepcopy(module).eval(), list[Tensor]()
    like = next(probe.parameters(), torch.empty(0))
    images = torch.zeros(1, *input_shape, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        inputs = layer_inputs(dict(probe.named_modules()), lambda: outputs.append(probe(images)))
    return {path: x.shape for path, x in inputs.items()}, outputs[0].shape[-1]


def _classifier(layers: dict[str, nn.Module], shapes: dict[str, torch.Size], classes: int) -> str:
    """The last linear layer that runs and has one output per class; else the last linear layer."""
    linear = {path: m.out_features for path in shapes if isinstance(m := layers[path], nn.Linear)}
    if not linear:
        raise UserError("precode finds no linear classifier in this model; name a layer with precode:placement=….")
    return next((path for path in reversed(linear) if linear[path] == classes), list(linear)[-1])
