"""What entered a fully connected layer, image by image, from the gradient of a batch.

The gradient of a layer with bias is ∇W = Sᵀ X and ∇b = Sᵀ 1: X holds the inputs of K images (K × width), S the gradients of
the loss at the layer's outputs, here called signals (K × outputs). For one image the division ∇Wᵀδ/‖δ‖² with δ = ∇b gives X
(Phong et al. 2017; Geiping et al. 2020). For a batch every invertible Q gives another product, Sᵀ = U Q with an orthonormal
basis U of the columns of [∇W ∇b]. A ReLU behind the layer tells which Q is right: it sets the signals of closed units to
exactly zero, so the columns of Sᵀ are the sparsest vectors in the span of U (SPEAR, Dimitrov et al. 2024). No label is needed.

SPEAR finds a column as the kernel of rows of U that are zero by luck, which takes about 2^K draws. Here many starts descend
to sparse vectors at once, by reweighted least squares; a start needs some 20 small linear systems. Kernels of all rows that
belong to closed units then make the columns as exact as the gradient. Whether a reading is right shows without the truth: the
units that the inputs close must be those without a signal.

Where this fails, images are peeled off one after another: the row of a unit that is open for one image alone is that image's
input, which says what units it closes, and the kernel of their rows is its column. Without it, other units are open for one
of the images that are left.

A weight difference of SGD is a sum of such gradients, one per step. An image that took part in several has one term each, with
inputs and signals that moved a little; a unit that it left closed all the time still has no signal from it. So the sum is read
like one gradient, and what moved counts as noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks.layers import linear_layers, probe
from gradveil.core.local_training import LocalSGD, optimizer
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator

EXACT = 1e-2  # error up to which a reading counts as exact
_CONVERGED = 1e-4  # error below which no further start is tried
_STARTS, _ROUNDS, _PATIENCE = 512, 16, 4  # descents at once; rounds of them at most, and without more zeros
_KERNELS, _FEW = 8192, 12  # kernels per round, and up to which number of images
_PREFERENCE = 12.0  # largest weight, as a logarithm, of the units that are closed for most images
_SHRINKAGES, _ALIKE, _DESCENTS = 80, 0.98, 64
_STEPS, _SHRINK = 18, 0.6  # of a descent; factor per step on what counts as zero
_ZERO = 12.0  # standard deviations of the noise within which an entry counts as zero
_INDEPENDENT = 0.03  # length that a unit vector must have outside the span of others
_REFINEMENTS = 30
_UNIQUE = 1e-4  # least size of U q, for unit q, in closed units of an image to which q does not belong
_MAX_IMAGES = 128  # the work grows with the third power
_REWEIGHTINGS, _NARROWING = 12, 0.55  # of a peeled direction; factor per time on what counts as zero
_DOUBTS = (0.1, 0.25, 0.4)  # shares of its change over the steps by which an output below zero counts as half closed
_PEELABLE, _UNITS = 32, 128  # images at most, and units that may stand for one of them
_LEAST, _MOST = 1e-4, 0.05  # shares of a row within which an entry may count as zero
_SPARE = 4  # zeros beyond those that any direction can have
_DISTINCT = 0.3  # as _INDEPENDENT, for directions that are peeled from several steps
_PART = 0.1  # share of a row that belongs to the image that it stands for


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a fully connected layer that were read from an update: K rows, at most one per image.

    Equal images share a row, and an image without any signal has none.
    """

    layer: str
    inputs: Tensor  # K × width
    signals: Tensor  # K × outputs: gradient of the loss at the layer's outputs, on the scale of the update
    # ‖∇W − signalsᵀ inputs‖ / ‖∇W‖ with the signals of units that these inputs close set to zero; 0 = exact. For batches
    # ∇W is its part of rank K, and 1 says that other inputs explain it as well.
    error: float

    @property
    def is_exact(self) -> bool:
        return self.error <= EXACT

    def signals_at_inputs(self, observation: Observation) -> Tensor:
        """The gradient of the loss at the layer's inputs (K × width)."""
        weight = observation.state[f"{self.layer}.weight"]
        return (self.signals.double() @ weight.double()).to(weight.dtype)


def layer_inputs(observation: Observation, layer: str | None = None) -> LayerInputs | None:
    """The inputs of `layer`, or of the first fully connected layer with a bias.

    None where the layer cannot be read: it sent nothing; or a batch meets no ReLU behind it, was trained by Adam, or has as
    many images as the layer has units. An update that was changed on its way gives a reading with a large `error`.
    """
    layer = layer or next(iter(linear_layers(observation)), None)
    if layer is None:
        return None
    sent, state = observation.update.tensors, observation.state
    weight, bias = (sent[f"{layer}.{part}"].double() for part in ("weight", "bias"))
    if not bool(bias.any()) or not bool(weight.any()):
        return None
    if observation.knowledge.batch_size == 1:
        a = weight.T @ bias / (bias**2).sum()
        reading = LayerInputs(layer, a[None], bias[None], float((weight - torch.outer(bias, a)).norm() / weight.norm()))
    else:
        count = observation.knowledge.batch_size
        # Adam divides every entry by its size, which leaves no matrix of low rank.
        if not isinstance(optimizer(observation.knowledge.training.optimizer), LocalSGD):
            return None
        if count > min(_MAX_IMAGES, *(size - 2 for size in weight.shape)) or not _closes_below_zero(observation, layer):
            return None
        gradient = torch.cat([weight, bias[:, None]], 1)
        start = torch.cat([state[f"{layer}.weight"], state[f"{layer}.bias"][:, None]], 1).double()
        # Of several steps, a unit that was open before or after them has a signal.
        moved = [] if observation.update.kind == "gradient" else [start + observation.knowledge.norm * gradient]
        reading = replace(_Reader(gradient / gradient.norm(), count, torch.stack([start, *moved])).read(), layer=layer)
        reading = replace(reading, signals=reading.signals * gradient.norm())
    dtype = state[f"{layer}.weight"].dtype
    return replace(reading, inputs=reading.inputs.to(dtype), signals=reading.signals.to(dtype))


def _closes_below_zero(observation: Observation, layer: str) -> bool:
    """Whether outputs of the layer below zero are all alike to the rest of the network, as with a ReLU."""
    images = torch.randn(2, *observation.task.input_shape, generator=generator(0, "probe"))

    def outputs(below: float, above: float) -> Tensor:
        def change(_: nn.Module, __: tuple[Tensor, ...], z: Tensor) -> Tensor:
            return torch.where(z < 0, z * below, z * above)

        return probe(observation, [observation.model.module.get_submodule(layer).register_forward_hook(change)], images)

    plain = outputs(1, 1)
    return torch.equal(plain, outputs(2, 1)) and not torch.equal(plain, outputs(1, 2))


class _Solution(NamedTuple):
    """One choice of directions: inputs are `mixing` · rest."""

    mixing: Tensor  # K × rank
    signals: Tensor  # K × outputs
    is_open: Tensor  # K × outputs: whether the inputs open a unit, at any time
    error: float


class _Reader:
    """One gradient [∇W ∇b] of `count` images, as U · rest, and the search for the columns of Q.

    `parameters` (times × outputs × width + 1) are [W b] when the gradient was computed.
    """

    def __init__(self, gradient: Tensor, count: int, parameters: Tensor):
        self.rng = generator(0, "apart")
        self.u, self.sizes, self.rest, self.noise = factored(gradient, count)
        rank = len(self.sizes)
        self.converged = max(_CONVERGED, 2 * self.noise * (rank * sum(gradient.shape)) ** 0.5 / float(self.rest.norm()))
        self.outputs = self.rest @ parameters.mT  # times × rank × outputs
        sums = self.u.square().sum(1)
        self.is_live = sums > 1e-12 * sums.max()  # units that are closed for every image say nothing
        self.live = self.u[self.is_live]
        # Units that a mean of the inputs leaves farthest below zero are closed for most images.
        mean = gradient.T @ gradient[:, -1] / gradient[:, -1].square().sum()
        order = (parameters[0] @ mean)[self.is_live].argsort()
        self.closed_first = 1 - order.argsort() / len(order)
        self.products = (self.live[:, :, None] * self.live[:, None]).flatten(1)

    def read(self) -> LayerInputs:
        rank = len(self.sizes)
        best, candidates = self._solution(torch.eye(rank, dtype=torch.float64)), self.sizes.new_zeros(0, rank)
        zeros, idle, turn = 0, 0, 0
        while best.error > self.converged and idle < _PATIENCE and turn < _ROUNDS:
            fresh = [self._descend(self._starts(candidates))]
            if turn and 1 < rank <= _FEW:
                fresh.append(self._kernels())
            candidates = self._completed(self._sparsest(torch.cat([candidates, *fresh])))
            best = min(best, self._refined(candidates), key=lambda solution: solution.error)
            before, zeros, turn = zeros, int(self._zeros(candidates).sum()), turn + 1
            idle = idle + 1 if zeros <= before else 0
        if best.error > EXACT and 1 < rank <= _PEELABLE:
            best = self._by_peeling() or best
        return LayerInputs("", (best.mixing @ self.rest)[:, :-1], best.signals, best.error)

    def _by_peeling(self) -> _Solution | None:
        """What the peeled directions say, where they are most."""
        if len(self.outputs) == 1:
            q = self._peeled(0)
            return self._refined(q) if len(q) == len(self.sizes) else None
        # Of several steps, units that opened or closed on the way leave the error of any refinement small.
        peeled = [self._peeled(doubt) for doubt in _DOUBTS]
        solutions = [self._solution(q) for q in peeled if 2 * len(q) >= len(self.sizes)]
        return min(solutions, key=lambda solution: solution.error, default=None)

    def _peeled(self, doubt: float) -> Tensor:
        """Directions of images, one after another, by units that are open for one of the images left (n × rank)."""
        rank, rows, sums = len(self.sizes), nn.functional.normalize(self.live), self.live.norm(dim=1)
        units = self.closed_first.argsort(descending=True)[:_UNITS]
        distinct = _INDEPENDENT if len(self.outputs) == 1 else _DISTINCT
        left, chosen = self.live, self.live[:0]
        while len(chosen) < rank:
            scale = left[units] @ self.rest[:, -1:]
            inputs = left[units] / torch.where(scale.abs() > 1e-9, scale, 1e-9)  # as mixtures of the rest, if one image is left
            outputs = inputs @ self.outputs[..., self.is_live]
            highest = outputs.amax(0)
            change, below = highest - outputs.amin(0), (-highest).clamp_min(0)
            q = self._kernels_within(rows, below / (below + doubt * change + 1e-30))
            entries = (q @ rows.T).abs()
            zero = (_ZERO * self._entry_noise(q) / sums).clamp(_LEAST, _MOST)
            zeros = ((entries < zero) & (highest < change + 1e-12)).sum(1)
            fits = (left.norm(dim=1) > 1e-3 * sums)[units] & (entries.gather(1, units[:, None])[:, 0] > _PART)
            fits &= ((below > 0).sum(1) > rank) & ((q - q @ torch.linalg.pinv(chosen) @ chosen).norm(dim=1) > distinct)
            best = int(torch.where(fits, zeros, 0).argmax())
            if not fits[best] or zeros[best] < rank - 1 + _SPARE:
                break
            chosen = torch.cat([chosen, q[best : best + 1]])
            left = left - torch.outer(left @ q[best], inputs[best] / (inputs[best] @ q[best]))
        return chosen

    def _kernels_within(self, rows: Tensor, weights: Tensor) -> Tensor:
        """For every row of weights (n × rows) the direction that the rows leave smallest, forgiving a few of them."""
        products, rank = (rows[:, :, None] * rows[:, None]).flatten(1), rows.shape[1]
        factors, width = torch.ones_like(weights), 0.3
        for _ in range(_REWEIGHTINGS):
            moments = ((weights * factors) @ products).unflatten(1, (rank, rank))
            moments = moments / moments.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-30)[:, None, None]
            q: Tensor = torch.linalg.eigh(moments)[1][:, :, 0]
            factors, width = 1 / (1 + ((q @ rows.T) / (width + _LEAST)) ** 2), width * _NARROWING
        return q

    def _starts(self, candidates: Tensor) -> Tensor:
        """Rows of U, each a mixture of few signals, and random directions; most without what the sparsest candidates
        explain, each without another number of them."""
        rows = self.live[torch.randint(len(self.live), (_STARTS // 2,), generator=self.rng)]
        random = torch.randn(_STARTS // 2, rows.shape[1], generator=self.rng, dtype=rows.dtype)
        starts = torch.cat([nn.functional.normalize(rows), nn.functional.normalize(random)])
        if len(candidates):
            basis = torch.linalg.qr(candidates.T)[0]
            explained = torch.arange(basis.shape[1]) < torch.randint(basis.shape[1], (len(starts), 1), generator=self.rng)
            starts = starts - (starts @ basis * explained) @ basis.T
        return nn.functional.normalize(starts)

    def _kernels(self) -> Tensor:
        """Directions with zeros in a random choice of as many rows as make a kernel; of many the sparsest."""
        rank = len(self.sizes)
        weights = (_PREFERENCE * torch.rand(1, generator=self.rng) * self.closed_first).exp()
        places = torch.multinomial(weights, _KERNELS * (rank - 1), replacement=True, generator=self.rng).view(_KERNELS, -1)
        level = torch.randn(_KERNELS, 1, rank, generator=self.rng, dtype=torch.float64)
        system = torch.cat([level, nn.functional.normalize(self.live)[places]], 1)
        q = torch.linalg.solve_ex(system, torch.eye(rank, 1, dtype=torch.float64).expand(_KERNELS, -1, -1))[0][..., 0]
        q = nn.functional.normalize(q[q.isfinite().all(1)])
        return q[self._zeros(q).topk(min(_STARTS, len(q))).indices]

    def _descend(self, q: Tensor) -> Tensor:
        """Unit vectors q (n × rank) with sparse U q near the starts.

        Shrinkage of the entries first (Qu et al. 2014), cheap and rough; then, for those that differ, least squares that
        forgive large entries.
        """
        rank, raw = q.shape[1], q[::4] if q.shape[1] <= _FEW else q[:0]
        for _ in range(_SHRINKAGES):
            q = nn.functional.normalize(nn.functional.softshrink(q @ self.live.T, 0.5 / len(self.live) ** 0.5) @ self.live)
        q = q[(q @ self.live.T).abs().sum(1).argsort()]
        q = torch.cat([q[~((q @ q.T).abs().triu(1) > _ALIKE).any(0)][: _DESCENTS + 2 * rank], raw])
        for step in range(_STEPS):
            entries = (q @ self.live.T).abs()
            width = torch.maximum(entries.median(1, keepdim=True).values * _SHRINK**step, self._entry_noise(q))
            moments = ((1 / (entries**2 + width**2)) @ self.products).unflatten(1, (rank, rank))
            moments = moments / moments.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
            q = torch.linalg.eigh(moments)[1][:, :, 0]
        return q

    def _entry_noise(self, q: Tensor) -> Tensor:
        """Standard deviation of the noise in the entries of U q (n × 1)."""
        return self.noise * (q / self.sizes).square().sum(1, keepdim=True).sqrt() + 1e-13

    def _zeros(self, q: Tensor) -> Tensor:
        """How many entries of U q are zero within the noise (n)."""
        return torch.le((q @ self.live.T).abs(), _ZERO * self._entry_noise(q)).sum(1)

    def _sparsest(self, q: Tensor) -> Tensor:
        """Linearly independent directions, those with most zeros first."""
        zeros = self._zeros(q)
        kept = q.new_zeros(0, q.shape[1])  # orthonormal
        chosen: list[int] = []
        for i in zeros.argsort(descending=True, stable=True).tolist():
            left = q[i] - kept.T @ (kept @ q[i])
            if len(chosen) < q.shape[1] and left.norm() > _INDEPENDENT:
                left = left - kept.T @ (kept @ left)
                kept, chosen = torch.cat([kept, nn.functional.normalize(left, dim=0)[None]]), [*chosen, i]
        return q[chosen]

    def _completed(self, q: Tensor) -> Tensor:
        """With directions that the forward pass proposes, as long as these have more zeros.

        The input of an image depends on the directions of the others alone: where one is missing, its input is right.
        """
        for _ in range(_REFINEMENTS):
            zeros = self._zeros(q).sum()
            q = self._sparsest(torch.cat([self._kernels_of(~self._solution(q).is_open), q]))
            if not self._zeros(q).sum() > zeros:
                break
        return q

    def _kernels_of(self, closed: Tensor) -> Tensor:
        """For every row of units (n × outputs) the direction that these units leave smallest."""
        directions: Tensor = torch.linalg.eigh(self._moments(closed))[1]
        return directions[:, :, 0]

    def _moments(self, units: Tensor) -> Tensor:
        """Σ u uᵀ over the units of every row (n × outputs) of a mask."""
        sums: Tensor = units[:, self.is_live].double() @ self.products
        return sums.view(len(units), len(self.sizes), -1)

    def _refined(self, q: Tensor) -> _Solution:
        """Each direction anew as the kernel of the rows whose units its inputs close, while that makes the error smaller."""
        best = self._solution(q)
        for _ in range(_REFINEMENTS):
            solution = self._solution(self._kernels_of(~best.is_open))
            if not solution.error < best.error:
                break
            best = solution
        return best if best.error > self.converged or self._is_unique(best) else best._replace(error=1.0)

    def _is_unique(self, solution: _Solution) -> bool:
        """Whether the units that an image closes leave one direction only; too few of them fit mixtures as well."""
        second = torch.linalg.eigvalsh(self._moments(~solution.is_open))[:, :2].amax(1)
        return bool((second > _UNIQUE**2).all())

    def _solution(self, q: Tensor) -> _Solution:
        """What the directions `q` (K × rank) say: the last entry of every row of the inputs is the 1 for the bias."""
        mixing: Tensor = torch.linalg.pinv(q.T)
        scale = mixing @ self.rest[:, -1:]
        scale = torch.where(scale.abs() > 1e-12, scale, 1e-12)
        mixing, signals = mixing / scale, (self.u @ q.T).T * scale
        outputs = mixing @ self.outputs
        is_open = (outputs + outputs.amax(0) - outputs.amin(0) > 0).any(0)
        wrong = signals * ~is_open  # ‖wrongᵀ inputs‖² by matrices of K × K
        square = ((wrong @ wrong.T) * (mixing * self.sizes**2 @ mixing.T)).sum()
        error = float((square.clamp_min(0) / self.sizes.square().sum()).sqrt())
        return _Solution(mixing, signals * is_open, is_open, error if math.isfinite(error) else 1.0)


class Factors(NamedTuple):
    """A matrix of low rank with noise, as u · rest."""

    u: Tensor  # orthonormal columns
    sizes: Tensor  # singular values, falling
    rest: Tensor
    noise: float  # standard deviation per entry


def factored(matrix: Tensor, most: int) -> Factors:
    """The factors of a matrix of rank `most` or less, from a random sketch (Halko et al. 2011)."""
    rng = generator(0, "sketch")
    sketch = torch.randn(matrix.shape[1], min(most + 8, *matrix.shape), generator=rng, dtype=matrix.dtype)
    basis = torch.linalg.qr(matrix @ sketch)[0]
    for _ in range(2):
        basis = torch.linalg.qr(matrix @ (matrix.T @ basis))[0]
    u, sizes, v = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    u, sizes, rest = basis @ u[:, :most], sizes[:most], sizes[:most, None] * v[:most]
    noise = float((matrix - u @ rest).square().mean().sqrt())
    rank = max(1, int((sizes > 4 * noise * sum(n**0.5 for n in matrix.shape)).sum()))
    return Factors(u[:, :rank], sizes[:rank], rest[:rank], noise)
