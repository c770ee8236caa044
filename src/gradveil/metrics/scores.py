"""Scores: the only place where truth and reconstruction meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gradveil.core.types import Batch, hard_labels
from gradveil.metrics.identification import identification_rate, identify
from gradveil.metrics.matching import match
from gradveil.metrics.perceptual import Net
from gradveil.metrics.perceptual import lpips as perceptual_distance
from gradveil.metrics.pixel import as_pixels, mse, psnr
from gradveil.metrics.structural import ssim

Against = Literal["original", "fed", "component"]

RECOGNISABLE = 0.6  # SSIM from which an attack counts as successful (Scheliga et al. 2022, PRECODE)
GREY = 0.5  # stands for an image that is not finite


@dataclass(frozen=True)
class Scores:
    """One victim's batch against its reconstruction; every tensor has one entry for each true image, in its order."""

    against: Against
    mse: Tensor
    psnr: Tensor
    ssim: Tensor
    lpips: Tensor | None  # None: weights not on hand, or not asked for
    identified: Tensor | None  # None: no pool of distractors was given, as are rank and chance then
    rank: Tensor | None  # 1 is nearest
    chance: float | None
    failed: Tensor  # the reconstruction was not finite and is scored as mid-grey
    order: Tensor  # image i was compared with reconstruction order[i]

    def __len__(self) -> int:
        return len(self.mse)

    @property
    def recognisable(self) -> Tensor:
        return (self.ssim >= RECOGNISABLE) & ~self.failed


def score(
    truth: Tensor,
    labels: Tensor,
    reconstruction: Tensor,
    *,
    pool: Batch | None,
    against: Against = "original",
    lpips: Net | None = "alex",
) -> Scores:
    """One victim's batch (B × C × H × W), matched and scored in [0, 1]."""
    return score_all([truth], [labels], [reconstruction], pool=pool, against=against, lpips=lpips)[0]


def score_all(
    truths: Sequence[Tensor] | Tensor,
    labels: Sequence[Tensor] | Tensor,
    reconstructions: Sequence[Tensor] | Tensor,
    *,
    pool: Batch | None,
    against: Against = "original",
    lpips: Net | None = "alex",
) -> list[Scores]:
    """Many victims at once: each is matched by itself, then all images are scored in one call per metric."""
    finite = [r.detach().isfinite().flatten(1).all(dim=1).cpu() for r in reconstructions]
    guesses = [
        torch.where(ok[:, None, None, None], as_pixels(r.cpu()), GREY)
        for ok, r in zip(finite, reconstructions, strict=True)
    ]
    pixels = [as_pixels(t.cpu()) for t in truths]
    orders = [match(t, g) for t, g in zip(pixels, guesses, strict=True)]
    sizes = [len(order) for order in orders]

    truth = torch.cat(pixels)
    guess = torch.cat([g[order] for g, order in zip(guesses, orders, strict=True)])
    failed = torch.cat([~ok[order] for ok, order in zip(finite, orders, strict=True)])
    found = None
    if pool is not None:
        classes = torch.cat([hard_labels(y) for y in labels]).cpu()
        found = identify(truth, classes, guess, pool)

    def split(values: Tensor | None) -> Sequence[Any]:
        return [None] * len(sizes) if values is None else values.split(sizes)

    columns = zip(
        split(mse(truth, guess)),
        split(psnr(truth, guess)),
        split(ssim(truth, guess)),
        split(perceptual_distance(truth, guess, lpips) if lpips else None),
        split(found.identified if found else None),
        split(found.ranks if found else None),
        (None if c is None else float(c.mean()) for c in split(found.chance if found else None)),
        split(failed),
        orders,
        strict=True,
    )
    return [Scores(against, *values) for values in columns]


def summarize(scores: Sequence[Scores], *, attacks: int = 1) -> dict[str, Any]:
    """All images of all victims in one row. `attacks`: of how many each victim's worst was taken, for its chance.

    Failed images are in every average, as mid-grey, and are counted under `failed`.
    """
    if not sum(len(s) for s in scores):
        raise ValueError("no scores to summarize")
    row: dict[str, Any] = {
        name: _spread([getattr(s, name) for s in scores]) for name in ("psnr", "ssim", "mse", "lpips")
    }
    row["asr"] = _join([s.recognisable for s in scores]).double().mean().item()
    row["identified"] = None
    if all(s.identified is not None and s.chance is not None for s in scores):
        identified = _join([s.identified for s in scores])
        chance = sum((s.chance or 0.0) * len(s) for s in scores) / len(identified)
        row["identified"] = identification_rate(identified, chance, attacks=attacks)
    row["scored"] = sum(len(s) for s in scores)
    row["failed"] = int(_join([s.failed for s in scores]).sum())
    return row


def _join(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([p for p in parts if p is not None])


def _spread(parts: Sequence[Tensor | None]) -> dict[str, float] | None:
    if any(p is None for p in parts):
        return None
    values = _join(parts).double()
    return {
        "mean": values.mean().item(),
        "std": values.std(correction=0).item(),
        "min": values.min().item(),
        "max": values.max().item(),
    }
