"""The moments of a batch at its BatchNorm layers: those that clients sent, and those of candidate images.

Hatamizadeh et al. (2022) match them beside the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.attacks.batch_statistics import sent_moments, shares
from gradveil.attacks.layers import hooked
from gradveil.attacks.matching.rows import Rows
from gradveil.core.local_training import MiniBatch

MomentPair = tuple[Tensor, Tensor]  # mean and unbiased variance
MomentsByPath = dict[str, MomentPair]  # path of a BatchNorm layer, with a dot at its end
TINY = 1e-5  # variance that BatchNorm adds


@dataclass(frozen=True)
class MomentMatch:
    """The moments of the batch, as clients sent them: squared errors in standard deviations, the mean over all channels."""

    weight: float

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        total, wanted = x.new_zeros(len(x)), wanted_moments(rows)
        for (mean, variance), (true_mean, true_variance) in compared(x, rows, wanted):
            deviation = (true_variance + TINY).sqrt()
            off = ((mean - true_mean) / deviation).square() + ((variance + TINY).sqrt() / deviation - 1).square()
            total = total + off.mean(1) / len(wanted)
        return self.weight * total


def compared(x: Tensor, rows: Rows, wanted: MomentsByPath) -> list[tuple[MomentPair, MomentPair]]:
    """Of each layer the moments of images and those they should have."""
    ours = batch_moments(x, rows) if wanted else {}
    return [(ours[path], wanted[path]) for path in wanted if path in ours]


def wanted_moments(rows: Rows) -> MomentsByPath:
    """The moments that were sent, rows × channels; empty unless all victims sent those of the same layers."""
    sent = [sent_moments(o) for o in rows.target.observations]
    if not sent or any(each.keys() != sent[0].keys() for each in sent):
        return {}
    stacked = {p: [torch.stack([getattr(s[p], part) for s in sent]) for part in ("mean", "variance")] for p in sent[0]}
    return {path: (mean[rows.victims], variance[rows.victims]) for path, (mean, variance) in stacked.items()}


def running_moments(rows: Rows) -> MomentsByPath:
    """The running statistics of the model, 1 × channels."""
    state, paths = rows.target.state, [f"{path}." for path, _ in batch_norms(rows.target.model.module)]
    kept = [path for path in paths if f"{path}running_mean" in state]
    return {path: (state[f"{path}running_mean"][None], state[f"{path}running_var"][None]) for path in kept}


def batch_moments(x: Tensor, rows: Rows) -> MomentsByPath:
    """Mean and unbiased variance at the input of every BatchNorm layer, rows × channels, as a client would send them.

    Later mini-batches are taken at the weights of the first, too: one round changes them little. So every epoch is like the
    first. A layer that a forward pass meets several times, or never, is left out.
    """
    target, layers = rows.target, batch_norms(rows.target.model.module)
    parts = [part for step in target.training.steps(x.shape[1]) for part in step]
    epoch, totals = parts[: len(parts) // target.training.epochs], MomentsByPath()
    for i, part in enumerate(epoch):
        for path, (mean, variance) in _one_batch(x[:, part], _part_of(rows, part), layers).items():
            share = float(shares(target.model.momenta.get(path), len(parts))[i :: len(epoch)].sum())
            before = totals.get(path, (0.0, 0.0))
            totals[path] = (before[0] + share * mean, before[1] + share * variance)
    return totals


def _one_batch(x: Tensor, rows: Rows, layers: list[tuple[str, nn.Module]]) -> MomentsByPath:
    seen: dict[str, list[MomentPair]] = {f"{path}.": [] for path, _ in layers}

    def note(path: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].unflatten(0, (-1, x.shape[1])).transpose(1, 2).flatten(2)  # rows, channels, values
        count = values.shape[2]
        seen[path].append((values.mean(2), values.var(2, unbiased=False) * (count / max(1, count - 1))))

    with hooked(layer.register_forward_pre_hook(partial(note, f"{path}.")) for path, layer in layers):
        rows.outputs(x)
    once = {path: pairs for path, pairs in seen.items() if sum(len(mean) for mean, _ in pairs) == len(x)}
    return {p: (torch.cat([mean for mean, _ in pairs]), torch.cat([var for _, var in pairs])) for p, pairs in once.items()}


def _part_of(rows: Rows, part: MiniBatch) -> Rows:
    return replace(rows, noise={name: draw[:, part] for name, draw in rows.noise.items()})


def batch_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, layer) for path, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
