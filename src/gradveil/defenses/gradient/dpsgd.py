"""DP-SGD (Abadi et al. 2016): bound what any one image adds to a gradient, then drown it in noise.

The gradient of every image is scaled to a norm of at most `clip`, they are averaged, and N(0, (noise · clip / B)²) is
added. Over all the steps of a training this is (ε, δ)-differentially private towards the server; the accountant is
Opacus's (Rényi). `sample_rate` below 1 counts amplification by subsampling, which holds only if each batch is a Poisson
sample of the client's data; 1 claims none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Noise, Tensors
from gradveil.defenses.base import Defense, Setup, Step
from gradveil.defenses.registry import defense

NOISE = 1.0  # multiplier where neither noise nor epsilon is given
CHUNK = 1 << 26  # values of per-image gradients held at a time


@defense("dpsgd", counters=["noise-likelihood"], random=True)
@settings
class DpSgd(Defense):
    """Clip every image's gradient to `clip`, average, add Gaussian noise of std `noise` · `clip` / batch size.

    Secrets: `clipped`, the factor (at most 1) by which each image's gradient was scaled.
    """

    clip: float = Field(default=1.0, gt=0)
    noise: float | None = Field(default=None, ge=0)  # multiplier; or give `epsilon`
    epsilon: float | None = Field(default=None, gt=0)  # of the whole training: the multiplier follows from it
    delta: float = Field(default=1e-5, gt=0, lt=1)
    rounds: int = Field(default=100, ge=1)  # noisy gradients a client computes in all, local steps counted
    sample_rate: float = Field(default=1.0, gt=0, le=1)  # share of its data in each

    def __post_init__(self) -> None:
        if self.noise is not None and self.epsilon is not None:
            raise UserError("dpsgd: give noise or epsilon, not both; the one follows from the other.")

    @property
    def multiplier(self) -> float:
        if self.epsilon is not None:
            return noise_for(self.epsilon, self.delta, self.rounds, self.sample_rate)
        return NOISE if self.noise is None else self.noise

    def std(self, examples: int) -> float:
        """Standard deviation of the noise on every entry of the mean gradient of so many images."""
        return self.multiplier * self.clip / examples

    def added_noise(self, examples: int) -> Noise | None:
        return Noise(self.std(examples)) if self.multiplier > 0 else None

    def clip_norm(self, examples: int) -> float | None:
        return self.clip if examples == 1 else None  # of a batch, every image's gradient is clipped by itself

    def spent(self, rounds: int | None = None) -> float:
        """ε at `delta` after so many rounds (all of them by default)."""
        return epsilon_of(self.multiplier, self.delta, rounds or self.rounds, self.sample_rate)

    def prepare(self, setup: Setup) -> float:
        return self.multiplier  # found once, and a missing accountant is told before any work

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        total = {name: torch.zeros_like(g) for name, g in tensors.items()}
        factors = []
        for each in _per_image(step, sum(g.numel() for g in tensors.values())):
            size = torch.sqrt(sum((g.double() ** 2).flatten(1).sum(dim=1) for g in each.values()))
            factors.append((self.clip / size.clamp_min(1e-12)).clamp_max(1.0))
            for name, g in each.items():
                total[name] += torch.einsum("n,n...->...", factors[-1].to(g), g)
        before = [step.secrets["clipped"]] if "clipped" in step.secrets else []  # of earlier local steps
        step.secrets["clipped"] = torch.cat([*before, *(f.float() for f in factors)])
        count, std = len(step.batch), self.std(len(step.batch))
        return {name: g / count + std * torch.randn(g.shape, generator=step.rng).to(g) for name, g in total.items()}


def _per_image(step: Step, values: int) -> Any:
    """Gradients of single images, a first axis of as many of them as memory bears."""
    x, chunk = step.task.normalize(step.batch.x), max(1, CHUNK // values)
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        noise: dict[str, Tensor] = {name: draw[part, None] for name, draw in step.noise.items()}
        yield step.model.gradients(step.state, x[part, None], step.batch.y[part, None], noise)


@lru_cache
def noise_for(epsilon: float, delta: float, rounds: int, sample_rate: float) -> float:
    """The smallest noise multiplier that keeps `rounds` noisy gradients within (ε, δ)."""
    utils = _accountants().utils
    try:
        found = utils.get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=rounds, accountant="rdp"
        )
    except ValueError as error:
        raise UserError(f"dpsgd: epsilon={epsilon:g} cannot be kept over {rounds} rounds: {error}") from None
    return float(found)


@lru_cache
def epsilon_of(noise: float, delta: float, rounds: int, sample_rate: float) -> float:
    """ε at δ after `rounds` noisy gradients; infinite without noise."""
    if noise == 0:
        return float("inf")
    accountant = _accountants().RDPAccountant()
    accountant.history = [(noise, sample_rate, rounds)]
    return float(accountant.get_epsilon(delta))


def _accountants() -> Any:
    try:
        import opacus.accountants
        import opacus.accountants.utils
    except ModuleNotFoundError:
        raise UserError("dpsgd: epsilon needs the accountant of Opacus; `pip install 'gradveil[dp]'`.") from None
    return opacus.accountants
