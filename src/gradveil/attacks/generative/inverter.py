"""A learned inverter: public images teach the way from defended updates back to images. Ours; no paper.

1. Rehearse: send public images through a copy of the defense (`rehearsal.py`), whatever that defense is.
2. View an update, at unit length, in three ways: as it is, with all tensors scaled to one size, and as the inputs of the
   linear layers, ∇Wᵀ∇b / ‖∇b‖², which average noise away over the layer's outputs.
3. Decode by kernel ridge regression, in closed form: an image is its class mean plus what images with similar updates
   have in common. A kernel counts twice between updates of one class. The leave-one-out error on public images chooses
   the kernel and the ridge; no private image is involved.
4. A small network improves the pictures (`polish.py`).

Nothing here needs a smooth net, small noise or complete updates, so it works where matching cannot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.generative.polish import polish
from gradveil.attacks.generative.public_prior import class_means
from gradveil.attacks.generative.rehearsal import MOST, fits, rehearse
from gradveil.attacks.matching.problem import residual
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator
from gradveil.core.types import Tensors

WIDTH = 8_192  # entries of one tensor, above which it is hashed to so many
RIDGES = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
VALIDATED = 1_000  # rows on which kernel and ridge are chosen


@attack("inverter", needs={"public"}, version=2)
class Inverter(Attack):
    """Kernel ridge regression from defended updates of public images to the images.

    Args: shared: weight of updates of other classes; those of the same class have 1 more.
    Example: gradveil audit --defense gaussian:std=0.1 --attack inverter
    """

    shared: float = Field(default=1.0, ge=0)

    def cost(self, work: Workload) -> Cost:  # rounds of rehearsal, for all victims together
        return Cost(min(work.public_images, MOST[work.budget]) // work.batch_size)

    def applies(self, observation: Observation) -> str | None:
        return fits(observation)

    def run(self, target: Target) -> Answer:
        rehearsed, shape = rehearse(target), target.task.input_shape
        train, test = _rows(rehearsed.y), _rows(target.hard_labels)
        pixels = rehearsed.x.flatten(0, 1).flatten(1)
        kernels = _kernels(_views(rehearsed.updates, target.updates()))
        means = class_means(pixels, train.y, target.task.num_outputs)
        wanted = (pixels - means[train.y]).double()
        same = (train.y[:, None] == train.y).double() + self.shared
        name, ridge = _choose(kernels, train, wanted, same)
        among, across = kernels[name]
        gram = among[train.round][:, train.round].double() * same
        inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram)).to(gram))
        weights = inverse @ wanted
        left_out = pixels - (weights / inverse.diagonal()[:, None]).to(means)
        likeness = across[test.round][:, train.round].double() * ((test.y[:, None] == train.y) + self.shared)
        decoded = means[test.y] + (likeness @ weights).to(means)
        pictures = [t.view(-1, *shape) for t in (left_out, means[train.y], pixels, decoded, means[test.y])]
        x = target.normalize(polish(*pictures, cache=target.cache).clamp(0, 1).view(target.shape))
        return Answer(x, residual(target, x), target.hard_labels, iterations=len(rehearsed.x))


@dataclass
class _Rows:
    """One row per image: the round of its update, and its label."""

    round: Tensor
    y: Tensor


def _rows(labels: Tensor) -> _Rows:
    rounds, size = labels.shape
    return _Rows(torch.arange(rounds).repeat_interleave(size), labels.flatten())


# -- views: how updates are compared -----------------------------------------------------------------------------------

View = tuple[Tensor, Tensor]  # of the rehearsed updates, and of the observed ones


def _views(rehearsed: Tensors, observed: Tensors) -> list[View]:
    """Centred, and of mean square length 1 over the rehearsed updates."""
    rehearsed, observed = (_unit({n: _finite(t) for n, t in tensors.items()}) for tensors in (rehearsed, observed))
    flat = [(_hashed(rehearsed[n], n), _hashed(observed[n], n)) for n in rehearsed]
    sizes = [_nonzero((a**2).sum(1).mean().sqrt()) for a, _ in flat]
    even = [(a / s, b / s) for (a, b), s in zip(flat, sizes, strict=True)]
    linear = [n for n, t in rehearsed.items() if t.ndim == 3 and _bias(n) in rehearsed]
    inputs = [(_inputs(rehearsed, n), _inputs(observed, n)) for n in linear]
    return [_standard(parts) for parts in (flat, even, inputs or even)]


def _finite(t: Tensor) -> Tensor:
    return torch.nan_to_num(t.reshape(len(t), 1) if t.ndim == 1 else t, nan=0.0, posinf=0.0, neginf=0.0)


def _nonzero(size: Tensor) -> Tensor:
    """A size to divide by: 1 in place of 0."""
    return torch.where(size > 0, size, 1)


def _unit(tensors: Tensors) -> Tensors:
    """Every update at unit length, as the size of what was sent says nothing."""
    largest = _nonzero(torch.stack([t.flatten(1).abs().amax(1) for t in tensors.values()]).amax(0))
    tensors = {n: t / largest.view(-1, *(1 for _ in t.shape[1:])) for n, t in tensors.items()}
    sizes = _nonzero(torch.stack([(t**2).flatten(1).sum(1) for t in tensors.values()]).sum(0)).sqrt()
    return {n: t / sizes.view(-1, *(1 for _ in t.shape[1:])) for n, t in tensors.items()}


def _bias(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"


def _inputs(tensors: Tensors, name: str) -> Tensor:
    """Of a linear layer, as its gradients give them for one image; for several, a mixture."""
    weight, bias = tensors[name], tensors[_bias(name)]
    return torch.einsum("no,noi->ni", bias, weight) / _nonzero((bias**2).sum(1, keepdim=True))


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
    rehearsed, observed = (torch.cat([p[i] for p in parts], 1) for i in (0, 1))
    centre = rehearsed.mean(0)
    size = _nonzero(((rehearsed - centre) ** 2).sum(1).mean().sqrt())
    return (rehearsed - centre) / size, (observed - centre) / size


# -- kernels, and the choice among them -------------------------------------------------------------------------------


Kernel = tuple[Tensor, Tensor]  # among the rehearsed updates, and from the observed ones to them


def _kernels(views: Sequence[View]) -> dict[str, Kernel]:
    products = [(a @ a.T, b @ a.T, (b**2).sum(1)) for a, b in views]
    linear = [(among, across) for among, across, _ in products]
    smooth = [_smooth(*product) for product in products]
    return {"linear": _mean(linear), "smooth": _mean(smooth), "smooth raw": smooth[0]}


def _smooth(among: Tensor, across: Tensor, observed: Tensor) -> Kernel:
    """exp(−distance² / its median), by inner products; `observed` holds squared sizes."""
    sizes = among.diagonal()
    apart = (sizes[:, None] + sizes - 2 * among).clamp_min(0)
    scale = apart.median().clamp_min(1e-20)
    return torch.exp(-apart / scale), torch.exp(-(observed[:, None] + sizes - 2 * across).clamp_min(0) / scale)


def _mean(kernels: Sequence[Kernel]) -> Kernel:
    among, across = (torch.stack([k[i] for k in kernels]).mean(0) for i in (0, 1))
    return among, across


def _choose(kernels: dict[str, Kernel], train: _Rows, wanted: Tensor, same: Tensor) -> tuple[str, float]:
    """The kernel and ridge of the lowest leave-one-out error, which ridge regression gives in closed form."""
    n = min(len(wanted), VALIDATED)
    best = (float("inf"), "linear", RIDGES[-1])
    for name, (among, _) in kernels.items():
        values, vectors = torch.linalg.eigh(among[train.round[:n]][:, train.round[:n]].double() * same[:n, :n])
        turned = vectors.T @ wanted[:n]
        for ridge in RIDGES:
            inverse = 1 / (values.clamp_min(0) + ridge)
            left_out = (vectors @ (inverse[:, None] * turned)) / (vectors**2 @ inverse)[:, None]
            best = min(best, (float((left_out**2).mean()), name, ridge))
    return best[1], best[2]
