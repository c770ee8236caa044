"""DP-SGD: bound the contribution of every single image to a gradient, then add noise."""

from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import ClassVar

import torch
from pydantic import Field

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Noise, Tensors
from gradveil.defenses import Defense, Setup, Step, defense

NOISE = 1.0  # multiplier where neither noise nor epsilon is set
CHUNK = 1 << 26  # values of per-image gradients in memory at a time


@defense("dpsgd", random=True)
@settings
class DpSgd(Defense):
    """Clip the gradient of every image, average, and add Gaussian noise of std `noise` · `clip` / batch size.

    Abadi et al. 2016. Over all steps of a training this is (ε, δ)-differentially private towards the server. The
    accountant is that of Opacus (Rényi). Secrets: `clipped`, the factor (at most 1) that scaled the gradient of each
    image.

    Args:
        clip: bound on the norm of the gradient of one image.
        noise: multiplier; 1 where neither `noise` nor `epsilon` is set.
        epsilon: ε of the whole training; the multiplier is computed from it. Needs Opacus.
        delta: δ.
        rounds: number of noisy gradients that a client computes in total, local steps included.
        sample_rate: share of the client's data per gradient. Below 1 it counts amplification by subsampling, which
            holds only if each batch is a Poisson sample of the data; 1 claims none.

    Example:
        >>> gv.protect(model, "dpsgd:clip=0.5,noise=1.1", data=(x, y))
    """

    takes_empty: ClassVar[bool] = True

    clip: float = Field(default=1.0, gt=0)
    noise: float | None = Field(default=None, ge=0)
    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    rounds: int = Field(default=100, ge=1)
    sample_rate: float = Field(default=1.0, gt=0, le=1)

    def __post_init__(self) -> None:
        if self.noise is not None and self.epsilon is not None:
            raise UserError("dpsgd: set noise or epsilon, not both; each determines the other.")

    @property
    def multiplier(self) -> float:
        if self.epsilon is not None:
            return noise_for(self.epsilon, self.delta, self.rounds, self.sample_rate)
        return NOISE if self.noise is None else self.noise

    def std(self, examples: int) -> float:
        """Standard deviation of the noise on every entry of the mean gradient of `examples` images."""
        return self.multiplier * self.clip / examples

    def added_noise(self, examples: int) -> Noise | None:
        return Noise(self.std(examples)) if self.multiplier > 0 else None

    def clip_norm(self, examples: int) -> float | None:
        return self.clip if examples == 1 else None  # of a batch, every image's gradient is clipped by itself

    def prepare(self, setup: Setup) -> float:
        return self.multiplier  # computed once; a missing accountant is reported before any work

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        total = {name: torch.zeros_like(g) for name, g in tensors.items()}
        factors = []
        for gradients in _per_image(step, sum(g.numel() for g in tensors.values())):
            squares = sum(((g.double() ** 2).flatten(1).sum(dim=1) for g in gradients.values()), torch.zeros(()))
            factors.append((self.clip / squares.sqrt().clamp_min(1e-12)).clamp_max(1.0))
            for name, g in gradients.items():
                total[name] += torch.einsum("n,n...->...", factors[-1].to(g), g)
        step.remember(clipped=torch.cat([f.float() for f in factors] or [torch.zeros(0)]))
        count = step.expected or len(step.batch)  # the number in a Poisson sample would tell who is in it
        std = self.std(count)
        return {name: step.rng.added_normal(g / count, std) for name, g in total.items()}


def _per_image(step: Step, values: int) -> Iterator[Tensors]:
    """Gradients of single images (`values` numbers each), along a first axis that is as long as memory allows."""
    x, chunk = step.task.normalize(step.batch.x), max(1, CHUNK // values)
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        noise = {name: draw[part, None] for name, draw in step.noise.items()}
        yield step.model.gradients(step.state, x[part, None], step.batch.y[part, None], noise)


@lru_cache
def noise_for(epsilon: float, delta: float, rounds: int, sample_rate: float) -> float:
    """The smallest noise multiplier that keeps `rounds` noisy gradients within (ε, δ)."""
    try:
        return float(
            _accountants().utils.get_noise_multiplier(
                target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=rounds, accountant="rdp"
            )
        )
    except ValueError as error:
        raise UserError(f"dpsgd: epsilon={epsilon:g} cannot be kept over {rounds} rounds: {error}") from None


def _accountants() -> ModuleType:
    try:
        import opacus.accountants.utils
    except ModuleNotFoundError:
        raise UserError("dpsgd: epsilon needs the accountant of Opacus; `pip install 'gradveil[dp]'`.") from None
    accountants: ModuleType = opacus.accountants
    return accountants
