"""NVFlare's SVTPrivacy: choose entries by the sparse vector technique, and send them with noise."""

import math

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.randomness import Stream
from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense, Step, defense


@defense("svt", random=True)
@settings
class Svt(Defense):
    """Send a share of the entries, those that noisy comparisons prefer, clamped to ±`gamma` and with Laplace noise.

    NVFlare's filter `SVTPrivacy` as of its releases from 2.8 on (earlier ones clamp after the noise), after Lyu, Su and
    Li 2017. Every entry's absolute value, clamped, gets Laplace noise and is compared with a threshold that has noise
    too. Entries that fail are compared again with new noise, until enough have passed; of all that passed, as many as
    wanted are drawn. All others are sent as zero. Parameters that are a single number leave as they are.

    NVFlare's accountant adds up what it calls ε: `epsilon` for the choice and `noise_var` per entry that is sent, 134 for
    LeNet on MNIST at the defaults.

    Args:
        fraction: share of all entries that is drawn.
        epsilon: of the choice; 1 : (2 · drawn entries)^⅔ of it go into threshold and comparisons.
        noise_var: of every entry that is sent: the scale of its Laplace noise is 2 · `gamma` / `noise_var`.
        gamma: limit of absolute values, in units of the update divided by `steps`.
        tau: the threshold before its noise.
        replace: draw with replacement: entries that are drawn twice are sent once.
        steps: local steps that the client reports, as for `percentile`.

    Example:
        >>> gv.protect(model, "svt:fraction=0.5,noise_var=1", data=(x, y))
    """

    fraction: float = Field(default=0.1, gt=0, le=1)
    epsilon: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    noise_var: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    gamma: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    tau: float = Field(default=1e-6, allow_inf_nan=False)
    replace: bool = True
    steps: int = Field(default=1, ge=1)

    @property
    def noise_scale(self) -> float:
        """Of the Laplace noise on entries that are sent, in units of the update."""
        return 2 * self.gamma / self.noise_var * self.steps

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        flat = torch.cat([g.detach().flatten().double().cpu() for g in tensors.values()])
        limit = self.gamma * self.steps
        clamped = flat.clamp(-limit, limit)
        drawn = self._drawn(clamped.abs() / self.steps, step.rng)
        sent = torch.zeros_like(flat)
        sent[drawn] = step.rng.added_laplace(clamped[drawn], self.noise_scale)
        parts = sent.split([g.numel() for g in tensors.values()])
        return {
            name: g if g.ndim == 0 else part.reshape(g.shape).to(g)
            for (name, g), part in zip(tensors.items(), parts, strict=True)
        }

    def _drawn(self, sizes: Tensor, rng: Stream) -> Tensor:
        """The numbers of the entries that are sent, each once."""
        count = math.ceil(len(sizes) * self.fraction)
        threshold_share = self.epsilon / (1 + (2 * count) ** (2 / 3))
        threshold = self.tau + rng.added_laplace(torch.zeros(1, dtype=sizes.dtype), self.gamma / threshold_share)
        comparison = 2 * self.gamma * count / (self.epsilon - threshold_share)
        passed = torch.zeros(len(sizes), dtype=torch.bool)
        while int(passed.sum()) < count:
            waiting = (~passed).nonzero().flatten()
            passed[waiting] = rng.added_laplace(sizes[waiting], comparison) >= threshold
        entries = passed.nonzero().flatten()
        picks = rng.integers(0, len(entries), (count,)) if self.replace else rng.permutation(len(entries))[:count]
        drawn: Tensor = entries[picks].unique()
        return drawn
