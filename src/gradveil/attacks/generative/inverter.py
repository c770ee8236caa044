"""A learned inverter: what public images taught about the way from defended updates back to images. Our own; no paper.

1. Rehearse: send public images through the adversary's copy of the defense (`rehearsal`), whatever that defense is.
2. Look at an update in three ways: as it is, with all tensors made equally large, and as the inputs of the linear
   layers, ∇Wᵀ∇b / ‖∇b‖², which average noise away over the layer's outputs.
3. Decode by kernel ridge regression, closed form: an image is its class mean plus what the updates most like this one
   went with. A kernel counts twice between updates of one class. Which kernel and how much ridge is decided by the
   leave-one-out error on public images; no private image is involved.
4. A small network improves on the pictures (`polish`).

Nothing here depends on the net being smooth, the noise being small or entries being there: it stands where matching has
nothing to hold on to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.generative.polish import polish
from gradveil.attacks.generative.rehearsal import Rehearsal, fits, rehearse
from gradveil.attacks.matching.problem import residual
from gradveil.attacks.registry import attack
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.core.types import Tensors

WIDTH = 8_192  # entries of one tensor, above which it is hashed to so many
RIDGES = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
VALIDATED = 1_000  # rows on which kernel and ridge are chosen


@attack("inverter", needs={"public"})
@settings
class Inverter(Attack):
    """Kernel ridge regression from defended updates of public images to the images."""

    shared: float = Field(default=1.0, ge=0)  # weight of updates of other classes; those of the same have 1 more

    def applies(self, observation: Observation) -> str | None:
        return fits(observation)

    def run(self, target: Target) -> Answer:
        rehearsed = rehearse(target)
        known, asked = _rows(rehearsed), _asked(target)
        kernels = _kernels(_views(rehearsed.updates, target.updates()))
        means = _class_means(known, target.task.num_outputs)
        wanted = (known.x - means[known.y]).double()
        same = (known.y[:, None] == known.y).double() + self.shared
        name, ridge = _choose(kernels, known, wanted, same)
        among, across = kernels[name]
        gram = among[known.round][:, known.round].double() * same
        inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram)).to(gram))
        weights = inverse @ wanted
        left_out = known.x - (weights / inverse.diagonal()[:, None]).to(means)
        likeness = across[asked.round][:, known.round].double() * ((asked.y[:, None] == known.y) + self.shared)
        found = means[asked.y] + (likeness @ weights).to(means)
        pictures = [
            t.view(-1, *target.task.input_shape) for t in (left_out, means[known.y], known.x, found, means[asked.y])
        ]
        x = target.normalize(polish(*pictures, cache=target.cache).clamp(0, 1).view(target.shape))
        return Answer(x, residual(target, x), asked.y.view(target.shape[:2]), iterations=len(rehearsed.x))


@dataclass
class _Rows:
    """One row an image: the round whose update it is in, its label, and its pixels where they are known."""

    round: Tensor
    y: Tensor
    x: Tensor


def _rows(rehearsed: Rehearsal) -> _Rows:
    rounds, size = rehearsed.y.shape
    return _Rows(
        torch.arange(rounds).repeat_interleave(size), rehearsed.y.flatten(), rehearsed.x.flatten(0, 1).flatten(1)
    )


def _asked(target: Target) -> _Rows:
    hard = target.hard_labels
    victims, size = hard.shape
    return _Rows(torch.arange(victims).repeat_interleave(size), hard.flatten(), torch.empty(0))


def _class_means(known: _Rows, classes: int) -> Tensor:
    overall = known.x.mean(0)
    members = [known.x[known.y == c] for c in range(classes)]
    return torch.stack([m.mean(0) if len(m) else overall for m in members])


# -- views: what of an update is compared -----------------------------------------------------------------------------

View = tuple[Tensor, Tensor]  # of the rehearsed updates, and of those asked about


def _views(known: Tensors, asked: Tensors) -> list[View]:
    """Centred, and of mean square length 1 over what was rehearsed."""
    known, asked = ({n: _finite(t) for n, t in tensors.items()} for tensors in (known, asked))
    flat = [(_hashed(known[n], n), _hashed(asked[n], n)) for n in known]
    sizes = [(a**2).sum(1).mean().sqrt().clamp_min(1e-20) for a, _ in flat]
    even = [(a / s, b / s) for (a, b), s in zip(flat, sizes, strict=True)]
    inputs = [(_inputs(known, n), _inputs(asked, n)) for n in known if known[n].ndim == 3 and _bias(n) in known]
    return [_standard(parts) for parts in (flat, even, inputs or even)]


def _finite(t: Tensor) -> Tensor:
    return torch.nan_to_num(t.reshape(len(t), 1) if t.ndim == 1 else t, nan=0.0, posinf=0.0, neginf=0.0)


def _bias(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"


def _inputs(tensors: Tensors, name: str) -> Tensor:
    """Of a linear layer, as its gradients give them for one image; for several, a mixture."""
    weight, bias = tensors[name], tensors[_bias(name)]
    return torch.einsum("no,noi->ni", bias, weight) / (bias**2).sum(1, keepdim=True).clamp_min(1e-12)


def _hashed(t: Tensor, name: str) -> Tensor:
    """Rows × entries; of a large tensor, random signed sums of its entries, which keep inner products on average."""
    flat = t.flatten(1)
    if flat.shape[1] <= WIDTH:
        return flat
    rng = generator("hashing", name)
    place = torch.randint(WIDTH, (flat.shape[1],), generator=rng)
    sign = torch.randint(2, (flat.shape[1],), generator=rng).to(flat) * 2 - 1
    return flat.new_zeros(len(flat), WIDTH).index_add_(1, place, flat * sign)


def _standard(parts: Sequence[View]) -> View:
    known, asked = (torch.cat([p[i] for p in parts], 1) for i in (0, 1))
    centre = known.mean(0)
    size = ((known - centre) ** 2).sum(1).mean().sqrt().clamp_min(1e-20)
    return (known - centre) / size, (asked - centre) / size


# -- kernels, and the choice among them -------------------------------------------------------------------------------


Kernel = tuple[Tensor, Tensor]  # among the rehearsed updates, and from those asked about to them


def _kernels(views: Sequence[View]) -> dict[str, Kernel]:
    products = [(a @ a.T, b @ a.T, (b**2).sum(1)) for a, b in views]
    linear = [(among, across) for among, across, _ in products]
    smooth = [_smooth(*product) for product in products]
    return {"linear": _mean(linear), "smooth": _mean(smooth), "smooth raw": smooth[0]}


def _smooth(among: Tensor, across: Tensor, asked: Tensor) -> Kernel:
    """exp(−distance² / its median), by inner products."""
    known = among.diagonal()
    apart = (known[:, None] + known - 2 * among).clamp_min(0)
    scale = apart.median().clamp_min(1e-20)
    return torch.exp(-apart / scale), torch.exp(-(asked[:, None] + known - 2 * across).clamp_min(0) / scale)


def _mean(kernels: Sequence[Kernel]) -> Kernel:
    among, across = (torch.stack([k[i] for k in kernels]).mean(0) for i in (0, 1))
    return among, across


def _choose(kernels: dict[str, Kernel], known: _Rows, wanted: Tensor, same: Tensor) -> tuple[str, float]:
    """The kernel and ridge of the lowest leave-one-out error, which ridge regression gives in closed form."""
    n = min(len(wanted), VALIDATED)
    best = (float("inf"), "linear", RIDGES[-1])
    for name, (among, _) in kernels.items():
        values, vectors = torch.linalg.eigh(among[known.round[:n]][:, known.round[:n]].double() * same[:n, :n])
        turned = vectors.T @ wanted[:n]
        for ridge in RIDGES:
            inverse = 1 / (values.clamp_min(0) + ridge)
            left_out = (vectors @ (inverse[:, None] * turned)) / (vectors**2 @ inverse)[:, None]
            best = min(best, (float((left_out**2).mean()), name, ridge))
    return best[1], best[2]
