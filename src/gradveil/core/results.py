"""What is measured of rebuilt images: the records that cells store and summaries are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

RECOGNISABLE = 0.6  # SSIM from which an image counts as rebuilt (Scheliga et al. 2022, PRECODE)
Status = Literal["ok", "failed", "not applicable", "not run"]
Against = Literal["original", "fed", "component"]
ImagePlace = tuple[int, int]  # victim, and which image of its batch


def _storable(value: object) -> object:
    # A path may hold bytes that are no UTF-8; Python keeps them as surrogates, which no JSON can hold.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


StorableText = Annotated[str, BeforeValidator(_storable)]


def finite(value: float) -> float | None:
    """The value, or None where it is not finite: JSON has no such numbers."""
    return value if math.isfinite(value) else None


class Record(BaseModel):
    """Checked when it is made, and never changed. Every number is finite; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class Statistic(Record):
    """One metric over images."""

    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Statistic | None:
        """None where a value is missing: an average never leaves an image out."""
        numbers = [v for v in values if v is not None]
        if len(numbers) < len(values) or not numbers:
            return None
        mean = fmean(numbers)
        std = math.sqrt(fmean((v - mean) ** 2 for v in numbers))
        return cls(mean=mean, std=std, min=min(numbers), max=max(numbers))


class Rate(Record):
    """A share with its exact 95% interval, beside what guessing would give."""

    rate: float
    low: float
    high: float
    chance: float


class ScoreStatistics(Record):
    """All metrics over images. What was not measured is None."""

    psnr: Statistic | None = None
    ssim: Statistic | None = None
    mse: Statistic | None = None
    lpips: Statistic | None = None
    others: dict[str, Statistic] = {}  # registered metrics without a field here, by name
    asr: float | None = None
    identified: Rate | None = None
    scored: int = 0
    failed: int = 0  # not finite; in every average as mid-grey

    @property
    def strength(self) -> tuple[float, float, float]:
        """How much was rebuilt, to order by: identified images first, because the verdict rests on them."""
        rate = self.identified.rate if self.identified else -1.0
        ssim, psnr = (s.mean if s else -math.inf for s in (self.ssim, self.psnr))
        return rate, ssim, psnr


class ScoreRow(ScoreStatistics):
    """The scores of one attack against one truth: the original images, those fed, or a mixture's largest component."""

    against: Against = "original"
    label_accuracy: float | None = None


class ImageScores(Record):
    """One private image and what an attack made of it."""

    victim: int
    image: int  # of the victim's batch
    psnr: float | None
    ssim: float | None
    mse: float | None
    lpips: float | None
    others: dict[str, float | None] = {}
    identified: bool | None
    rank: int | None  # among the distractors; 1 is nearest
    likeness: float | None = None  # largest |correlation| with any answer for the batch
    nearest: float | None = None  # the same of the most similar distractor
    failed: bool
    label: int | None = None
    label_guess: int | None = None

    @property
    def place(self) -> ImagePlace:
        return self.victim, self.image

    @property
    def recognisable(self) -> bool:
        return self.ssim is not None and self.ssim >= RECOGNISABLE and not self.failed

    @property
    def strength(self) -> tuple[bool, float, float]:
        """How much was rebuilt, to order by."""
        ssim, psnr = (-math.inf if v is None else v for v in (self.ssim, self.psnr))
        return bool(self.identified), ssim, psnr


def strongest(images: Sequence[ImageScores]) -> ImageScores:
    """One private image under several attacks: the scores of the attack that got most of it.

    It is identified where no distractor is as alike to any answer of any attack.
    """
    best = max(images, key=lambda image: image.strength)
    likeness, nearest = (max(getattr(image, name) or 0.0 for image in images) for name in ("likeness", "nearest"))
    measured = all(image.likeness is not None for image in images)
    return best.model_copy(update={"identified": best.identified and likeness > nearest}) if measured else best


class Sight(Record):
    """Where in an update a private image can be seen best without an attack."""

    tensor: StorableText = ""
    reading: StorableText = ""
    likeness: float = 0.0  # 0: like any image of the class; 1: far beyond all of them


class GradientChange(Record):
    """How far the update sent is from the undefended one: cosine and relative distance."""

    cosine: float | None
    noise_ratio: float | None
    norm: float | None = None  # length of the undefended update
