"""DP-SGD: bound the contribution of every single image to a gradient, then add noise."""

import math
from functools import lru_cache
from types import ModuleType
from typing import ClassVar

from pydantic import Field

from gradveil.certification import certificate
from gradveil.certification.mechanism import Mechanism, Releases
from gradveil.core.errors import UserError
from gradveil.core.per_image import clipped_sum
from gradveil.core.settings import settings
from gradveil.core.types import Noise, Tensors
from gradveil.defenses import Defense, Setup, Step, defense

NOISE = 1.0  # multiplier where nothing determines it


@defense("dpsgd", random=True, version=2)
@settings
class DpSgd(Defense):
    """Clip the gradient of every image, average, and add Gaussian noise of std `noise` · `clip` / batch size.

    Abadi et al. 2016, with the book-keeping of Bu et al. 2023: most networks need one pass. Over all steps of a training
    this is (ε, δ)-differentially private towards the server. The accountant of `epsilon` is that of Opacus (Rényi). `risk`
    is a promise against everyone who sees all `rounds` noisy gradients: nobody picks the image that was used out of
    `line_up` equally likely ones with a higher probability (`gradveil certify` says what voids it). Choose `clip` and the
    learning rate on public images, or on validation images that no client trains on: choices made on the private images
    are counted by no accountant, and void the promise. Secrets: `clipped`, the factor (at most 1) that scaled the gradient
    of each image.

    Args:
        clip: bound on the norm of the gradient of one image, over all trained parameters.
        noise: multiplier; 1 where none of `noise`, `epsilon` and `risk` is set.
        epsilon: ε of the whole training; the multiplier is computed from it. Needs Opacus.
        delta: δ.
        risk: the highest probability with which a line-up may succeed; the multiplier is computed from it. Needs Opacus
            where `sample_rate` is below 1.
        line_up: candidates of the line-up.
        rounds: number of noisy gradients that a client computes in total, local steps included.
        sample_rate: share of the client's data per gradient. Below 1 it counts amplification by subsampling, which
            holds only if each batch is a Poisson sample of the data; 1 claims none. `risk` counts whole epochs.
        gain: factor on what leaves: clipped gradients are short, so local steps may want a longer stride than plain training
            has. It promises nothing and costs nothing.

    Example:
        >>> gv.protect(model, "dpsgd:clip=0.5,noise=1.1", data=(x, y))
    """

    takes_empty: ClassVar[bool] = True
    starts_over = True

    clip: float = Field(default=1.0, gt=0)
    noise: float | None = Field(default=None, ge=0)
    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    risk: float | None = Field(default=None, gt=0, lt=1)
    line_up: int = Field(default=certificate.LINE_UP, ge=2)
    rounds: int = Field(default=100, ge=1)
    sample_rate: float = Field(default=1.0, gt=0, le=1)
    gain: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.noise, self.epsilon, self.risk)) > 1:
            raise UserError("dpsgd: set one of noise, epsilon and risk; each determines the others.")

    @property
    def multiplier(self) -> float:
        if self.epsilon is not None:
            return noise_for(self.epsilon, self.delta, self.rounds, self.sample_rate)
        if self.risk is not None:
            return noise_for_risk(self.risk, self.line_up, self.rounds, self.sample_rate)
        return NOISE if self.noise is None else self.noise

    def std(self, examples: int) -> float:
        """Standard deviation of the noise on every entry of what leaves, the mean gradient of `examples` images."""
        return self.gain * self.multiplier * self.clip / examples

    def added_noise(self, examples: int) -> Noise | None:
        return Noise(self.std(examples)) if self.multiplier > 0 else None

    def clip_norm(self, examples: int) -> float | None:
        return self.gain * self.clip if examples == 1 else None  # of a batch, every image's gradient is clipped by itself

    def prepare(self, setup: Setup) -> float:
        return self.multiplier  # computed once; a missing accountant is reported before any work

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        x = step.task.normalize(step.batch.x)
        total, factors = clipped_sum(step.model, step.state, x, step.batch.y, step.noise, self.clip)
        step.remember(clipped=factors.float())
        count = step.expected or len(step.batch)  # the number in a Poisson sample would tell who is in it
        std = self.std(count)
        return {name: step.rng.added_normal(self.gain * g / count, std) for name, g in total.items()}


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


@lru_cache
def noise_for_risk(risk: float, line_up: int, rounds: int, sample_rate: float) -> float:
    """The noise multiplier with which a line-up after `rounds` noisy gradients succeeds at most with probability `risk`."""
    if sample_rate < 1:
        epochs = max(1, math.ceil(rounds * sample_rate - 1e-9))
        releases = Releases(rounds=epochs, sampling="poisson", sample_rate=sample_rate)
    else:
        releases = Releases(rounds=rounds)
    return certificate.noise_for(risk, Mechanism("dpsgd", NOISE), releases, line_up)


def _accountants() -> ModuleType:
    try:
        import opacus.accountants.utils
    except ModuleNotFoundError:
        raise UserError("dpsgd: epsilon needs the accountant of Opacus; `pip install 'gradveil[dp]'`.") from None
    accountants: ModuleType = opacus.accountants
    return accountants
