"""How much a defense changes an update: measured alike in an audit and where protected updates leave."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.core.results import GradientChange, finite


def update_change(sent: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> GradientChange | None:
    """What was sent, compared with the undefended update, over the tensors that both have; None where they share none."""
    names = [n for n in plain if n in sent and sent[n].shape == plain[n].shape]
    if not names:
        return None
    ours, theirs = (torch.cat([t[n].double().flatten() for n in names]) for t in (sent, plain))
    norm = theirs.norm()
    cosine = ours @ theirs / (ours.norm() * norm).clamp(min=1e-300)
    ratio = (ours - theirs).norm() / norm.clamp(min=1e-300)
    return GradientChange(cosine=finite(float(cosine.clamp(-1, 1))), noise_ratio=finite(float(ratio)), norm=finite(float(norm)))


def mean_change(changes: list[GradientChange | None]) -> GradientChange | None:
    """The mean over victims; None in place of a number that is missing for one of them."""
    measured = [change for change in changes if change is not None]
    if not measured:
        return None
    columns = zip(*((c.cosine, c.noise_ratio, c.norm) for c in measured), strict=True)
    cosine, ratio, norm = (_mean(column) for column in columns)
    return GradientChange(cosine=cosine, noise_ratio=ratio, norm=norm)


def _mean(values: tuple[float | None, ...]) -> float | None:
    numbers = [value for value in values if value is not None]
    return finite(sum(numbers) / len(values)) if len(numbers) == len(values) else None
