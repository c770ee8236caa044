"""The gradient of the matching loss on large nets, by first-order passes alone: 5 forward passes' worth of work, not 7.

With V the derivative of the distance by the update, that by the images is the derivative of ∇ₓL along V in weights.
It is taken as the difference (∇ₓL(W + εV/|V|, x) − ∇ₓL(W, x)) · |V|/ε, with the ReLU masks and max-pool choices of the
first pass replayed in the second: the exact derivative does not see them change either. Rounding is left, so this is
for steps by sign, and only where it has agreed with the exact route: at the first step, and now and then after it.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.problem import Problem
from gradveil.core.loops import Snapshot, State
from gradveil.core.types import Tensors

EPSILONS = (1e-3, 1e-4, 1e-2)  # lengths of the step in weight space, tried in this order
AGREEMENT = 0.99  # share of signs that must be those of the exact route
CHECK_EVERY = 500


class _Replayed(nn.Module):
    """A layer that decides (which entries pass), once while recording, and keeps to it while replaying."""

    def __init__(self, choose: Callable[[Tensor], Tensor], apply: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.choose, self.apply_choice, self.replay = choose, apply, False
        self.choices: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.replay:
            self.choices.append(self.choose(x.detach()))
        return self.apply_choice(x, self.choices.pop(0) if self.replay else self.choices[-1])


def _relu() -> _Replayed:
    return _Replayed(lambda x: (x > 0).to(x.dtype), torch.mul)


def _max_pool(pool: nn.MaxPool2d) -> _Replayed:
    chooser = copy.deepcopy(pool)
    chooser.return_indices = True
    return _Replayed(lambda x: chooser(x)[1], lambda x, i: x.flatten(-2).gather(-1, i.flatten(-2)).view(i.shape))


class Frozen(Snapshot):
    """A drop-in for `Problem.__call__` over all rows, one after another."""

    def __init__(self, problem: Problem):
        self.problem, self.epsilon, self.calls, self.exact = problem, EPSILONS[0], 0, False
        self.model = problem.target.model.with_module(_replayed(problem.target.model.module))
        self._layers = [m for m in self.model.module.modules() if isinstance(m, _Replayed)]
        self._sizes = [_norm(tensors) for tensors in problem.observed]

    def __call__(self, x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if index is not None:
            return self.problem(x, index)
        if self.calls % CHECK_EVERY == 0 and not self.exact:
            self.exact = not self._agrees(x)
        self.calls += 1
        if self.exact:
            return self.problem(x)
        value, gradient = torch.empty(len(x)), torch.empty_like(x)
        for row in range(len(x)):
            value[row], gradient[row] = self.row(x[row], row)
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            prior = sum((p(leaf, self.problem.rows) for p in self.problem.match.priors), torch.zeros(len(x)))
            if prior.requires_grad:
                gradient += torch.autograd.grad(prior.sum(), leaf)[0]
        return value + prior.detach(), gradient

    def state_dict(self) -> State:
        return {"epsilon": self.epsilon, "calls": self.calls, "exact": self.exact}

    def row(self, x: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """Distance of one row, and its derivative by the images."""
        problem, count = self.problem, len(self.problem.observed)
        y, noise = problem.rows.labels[row], {k: v[row] for k, v in problem.rows.noise.items()}
        value, gradient = torch.zeros(()), torch.zeros_like(x)
        for sighting, state in enumerate(problem.states):
            before, update = self._pass(state, x, y, noise, replay=False)
            term, moved, scale = self._move(state, update, row, sighting)
            after, _ = self._pass({**state, **moved}, x, y, noise, replay=True)
            value, gradient = value + term / count, gradient + (after - before) * (scale / count)
        return value, gradient

    def _pass(self, state: Tensors, x: Tensor, y: Tensor, noise: Tensors, *, replay: bool) -> tuple[Tensor, Tensors]:
        """∇ₓL, and while recording the update as well."""
        for layer in self._layers:
            layer.replay = replay
            if not replay:
                layer.choices.clear()
        x = x.detach().requires_grad_()
        wanted = {} if replay else {n: state[n].detach().requires_grad_() for n in self.problem.names}
        with torch.enable_grad():
            loss = self.model.loss({**state, **wanted}, x, y, noise)
        first, *rest = torch.autograd.grad(loss, [x, *wanted.values()], materialize_grads=True)
        return first, dict(zip(wanted, rest, strict=True))

    def _move(self, state: Tensors, update: Tensors, row: int, sighting: int) -> tuple[Tensor, Tensors, Tensor]:
        """Distance, the weights one step along its derivative by the update, and the factor of the difference."""
        problem, names = self.problem, self.problem.names
        victim = row // problem.match.restarts
        if isinstance(problem.match.distance, Cosine) and problem.insight.limits is None:
            return self._move_by_cosine(state, update, victim, sighting)
        leaves = {n: g[None].requires_grad_() for n, g in update.items()}
        with torch.enable_grad():
            value = problem.compare(leaves, problem.rows.at(torch.tensor([row])), sighting)
            slope = torch.autograd.grad(value.sum(), list(leaves.values()))
        length = _norm(slope)[0].clamp_min(1e-30)
        share = float(self.epsilon / length)
        moved = {n: state[n] + share * v[0] for n, v in zip(names, slope, strict=True)}
        return value.detach()[0], moved, length / self.epsilon

    def _move_by_cosine(self, state: Tensors, update: Tensors, victim: int, sighting: int) -> tuple[Tensor, Tensors, Tensor]:
        """V = w · (cos·a/|a| − b/|b|) / |a| for the update a, the target b and their weights w: no need to build it first."""
        names, factors = self.problem.names, self.problem.insight.weights
        weighted = {n: factors[n][victim] for n in names if n in factors}
        a = [update[n] * weighted[n] if n in weighted else update[n] for n in names]
        b = [t[victim] for t in self.problem.observed[sighting]]
        size, other = _norm([t[None] for t in a])[0], self._sizes[sighting][victim]
        cosine = sum((p * q).sum() for p, q in zip(a, b, strict=True)) / (size * other)
        torch._foreach_mul_(a, float(cosine / size))
        torch._foreach_add_(a, b, alpha=-float(1 / other))
        if weighted:
            slopes = dict(zip(names, a, strict=True))
            for name, factor in weighted.items():
                slopes[name].mul_(factor)
            length = _norm([t[None] for t in a])[0].clamp_min(1e-6)
        else:
            length = (1 - cosine**2).clamp_min(1e-12).sqrt()
        moved = torch._foreach_add([state[n] for n in names], a, alpha=float(self.epsilon / length))
        return 1 - cosine, dict(zip(names, moved, strict=True)), length / size / self.epsilon

    def _agrees(self, x: Tensor) -> bool:
        """Whether the first row's signs are those of the exact route, for the first step length that serves."""
        leaf = x[:1].detach().requires_grad_()
        with torch.enable_grad():
            value = self.problem.mismatch(leaf, self.problem.rows.at(torch.tensor([0])))
            (exact,) = torch.autograd.grad(value.sum(), leaf)
        for epsilon in (self.epsilon, *(e for e in EPSILONS if e != self.epsilon)):
            self.epsilon = epsilon
            if float((self.row(x[0], 0)[1].sign() == exact[0].sign()).float().mean()) >= AGREEMENT:
                return True
        return False


def objective(problem: Problem, *, signed: bool) -> Problem | Frozen:
    """The route for first-order steps: by differences for signed ones where the work allows it, else the problem."""
    return Frozen(problem) if signed and problem.target.workload.allows_differences else problem


def _replayed(module: nn.Module) -> nn.Module:
    """A copy in which every ReLU and max-pool can be replayed. The check of signs detects other kinks."""
    twin = copy.deepcopy(module)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                setattr(parent, name, _relu())
            elif isinstance(child, nn.MaxPool2d):
                setattr(parent, name, _max_pool(child))
    return twin


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of every row of all tensors together. Not by `norm`, which loses four digits on a million entries."""
    return torch.stack([(t * t).flatten(1).sum(1) for t in tensors]).sum(0).sqrt()
