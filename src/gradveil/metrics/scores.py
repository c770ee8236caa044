"""Scores: the only module that compares reconstructions with the truth."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradveil.core.results import RECOGNISABLE, Against, ScoreRow, Statistic, finite
from gradveil.core.types import Batch, hard_labels
from gradveil.metrics.identification import identification_rate, identify
from gradveil.metrics.matching import match
from gradveil.metrics.perceptual import Net
from gradveil.metrics.perceptual import lpips as perceptual_distance
from gradveil.metrics.pixel import as_pixels, mse, psnr
from gradveil.metrics.registry import registered
from gradveil.metrics.structural import ssim

GREY = 0.5  # stands for an image that is not finite


@dataclass(frozen=True)
class Scores:
    """The batch of one victim against its reconstruction; every tensor has one entry per true image, in its order."""

    against: Against
    mse: Tensor
    psnr: Tensor
    ssim: Tensor
    lpips: Tensor | None  # None: no weights, or not requested
    others: dict[str, Tensor]  # registered metrics without a field here, by name
    identified: Tensor | None  # None without a pool of distractors, like rank and chance
    rank: Tensor | None  # 1 is the most similar
    likeness: Tensor | None  # largest |correlation| with any answer for the batch
    nearest: Tensor | None  # the same of the most similar distractor
    chance: float | None
    failed: Tensor  # the reconstruction was not finite and is scored as mid-grey
    order: Tensor  # image i was compared with reconstruction order[i]

    def __len__(self) -> int:
        return len(self.mse)

    @property
    def recognisable(self) -> Tensor:
        return (self.ssim >= RECOGNISABLE) & ~self.failed


def score_all(
    truths: Sequence[Tensor] | Tensor,
    labels: Sequence[Tensor] | Tensor,
    reconstructions: Sequence[Tensor] | Tensor,
    *,
    pool: Batch | None,
    against: Against = "original",
    lpips: Net | None = "alex",
) -> list[Scores]:
    """The scores of many victims. Each is matched alone, then all images are scored in one call per metric.

    Args:
        truths, labels: per victim, a batch B × C × H × W, and B class numbers or B × classes.
        reconstructions: per victim, images of the same shape, in any order.
        pool: images from which distractors are drawn; None: no identification.
        against: what `truths` are: the original images, those fed to the network, or components of mixtures.
        lpips: the network of LPIPS; None: not computed.
    """
    finite = [r.detach().isfinite().flatten(1).all(dim=1).cpu() for r in reconstructions]
    guesses = [
        torch.where(ok[:, None, None, None], as_pixels(r.cpu()), GREY) for ok, r in zip(finite, reconstructions, strict=True)
    ]
    pixels = [as_pixels(t.cpu()) for t in truths]
    orders = [match(t, g) for t, g in zip(pixels, guesses, strict=True)]
    starts = [0, *accumulate(len(order) for order in orders)]

    truth = torch.cat(pixels)
    guess = torch.cat([g[order] for g, order in zip(guesses, orders, strict=True)])
    failed = torch.cat([~ok[order] for ok, order in zip(finite, orders, strict=True)])
    ranking = None
    if pool is not None:
        classes = torch.cat([hard_labels(y) for y in labels]).cpu()
        ranking = identify(truth, classes, guess, pool, batch=batch_numbers(guesses))

    errors, decibels, similarity = mse(truth, guess), psnr(truth, guess), ssim(truth, guess)
    distance = perceptual_distance(truth, guess, lpips) if lpips else None
    others = {m.name: m.measure(truth, guess) for m in registered() if m.name not in Scores.__dataclass_fields__}
    return [
        Scores(
            against,
            mse=errors[start:end],
            psnr=decibels[start:end],
            ssim=similarity[start:end],
            lpips=None if distance is None else distance[start:end],
            others={name: values[start:end] for name, values in others.items() if values is not None},
            identified=ranking.identified[start:end] if ranking else None,
            rank=ranking.ranks[start:end] if ranking else None,
            likeness=ranking.likeness[start:end] if ranking else None,
            nearest=ranking.nearest[start:end] if ranking else None,
            chance=float(ranking.chance[start:end].mean()) if ranking else None,
            failed=failed[start:end],
            order=order,
        )
        for (start, end), order in zip(pairwise(starts), orders, strict=True)
    ]


def batch_numbers(batches: Sequence[Tensor]) -> Tensor:
    """For all images of all batches in order: the number of the batch, from 0.

    Args:
        batches: images of each batch.
    """
    return torch.repeat_interleave(torch.tensor([len(b) for b in batches]))


def summarize(scores: Sequence[Scores], *, label_accuracy: float | None = None) -> ScoreRow:
    """All images of all victims in one row. Failed images are in every average, as mid-grey, and counted.

    Args:
        scores: one entry per victim.
        label_accuracy: share of correctly inferred labels, if measured.
    """
    if not sum(len(s) for s in scores):
        raise ValueError("no scores to summarize")
    rate = None
    if all(s.identified is not None and s.chance is not None for s in scores):
        identified = _join([s.identified for s in scores])
        chance = sum((s.chance or 0.0) * len(s) for s in scores) / len(identified)
        rate = identification_rate(identified, chance, len(scores))
    return ScoreRow(
        against=scores[0].against,
        psnr=_statistic([s.psnr for s in scores]),
        ssim=_statistic([s.ssim for s in scores]),
        mse=_statistic([s.mse for s in scores]),
        lpips=_statistic([s.lpips for s in scores]),
        others={n: s for n in scores[0].others if (s := _statistic([victim.others[n] for victim in scores]))},
        asr=_join([s.recognisable for s in scores]).double().mean().item(),
        identified=rate,
        scored=sum(len(s) for s in scores),
        failed=int(_join([s.failed for s in scores]).sum()),
        label_accuracy=label_accuracy,
    )


def _join(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([p for p in parts if p is not None])


def _statistic(parts: Sequence[Tensor | None]) -> Statistic | None:
    return None if any(p is None for p in parts) else Statistic.of([finite(v) for v in _join(parts).tolist()])
