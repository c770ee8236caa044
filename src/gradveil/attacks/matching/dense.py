"""Cosine matching on fully connected nets without ever building their gradients.

A linear layer's weight gradient is Σ_b δ_b a_bᵀ, of the inputs a and the signals δ at its outputs. So its inner product
with the observed G is Σ_b δ_bᵀ G a_b and its squared size Σ_bc (δ_b·δ_c)(a_b·a_c): a product by G in place of matrices
of millions of entries for every row, which on an MLP for 32×32 colour images is thirty times less memory to move.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradveil.attacks.layers import hooked
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.problem import Problem
from gradveil.core.types import Tensors


class Dense:
    """A drop-in for `Problem.__call__`; taken only where it agrees with it."""

    def __init__(self, problem: Problem, layers: dict[str, nn.Linear]):
        self.problem, self.layers = problem, layers
        self.restarts = problem.match.restarts
        self.observed = [dict(zip(problem.names, tensors, strict=True)) for tensors in problem.observed]
        squares = [torch.stack([(t * t).flatten(1).sum(1) for t in tensors]).sum(0) for tensors in problem.observed]
        self.sizes = [torch.where(s > 0, s, 1).sqrt().repeat_interleave(self.restarts, 0) for s in squares]

    def __call__(self, x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if index is not None:
            return self.problem(x, index)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            value = self.mismatch(x)
            for prior in self.problem.match.priors:
                value = value + prior(x, self.problem.rows)
            (gradient,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), gradient

    def mismatch(self, x: Tensor) -> Tensor:
        """One minus the cosine for every row, the mean over sightings."""
        terms = [1 - self._cosine(x, i) for i in range(len(self.observed))]
        return torch.stack(terms).mean(0)

    def _cosine(self, x: Tensor, sighting: int) -> Tensor:
        problem, count = self.problem, len(x)
        inputs, signals = self._factors(x, problem.states[sighting])
        dot, square = torch.zeros(count), torch.zeros(count)
        for path, layer in self.layers.items():
            a, d = inputs[path].view(count, -1, layer.in_features), signals[path].view(count, -1, layer.out_features)
            inner, aa = torch.zeros_like(d), torch.zeros_like(d @ d.mT)
            if f"{path}.weight" in problem.names:
                grouped = a.view(-1, self.restarts * a.shape[1], layer.in_features)
                inner = inner + (grouped @ self.observed[sighting][f"{path}.weight"].mT).view_as(d)
                aa = aa + a @ a.mT
            if f"{path}.bias" in problem.names:
                bias = self.observed[sighting][f"{path}.bias"]
                inner = inner + bias.repeat_interleave(self.restarts, 0)[:, None]
                aa = aa + 1
            dot = dot + (d * inner).sum((1, 2))
            square = square + (aa * (d @ d.mT)).sum((1, 2))
        return dot / (torch.where(square > 0, square, 1).sqrt() * self.sizes[sighting])

    def _factors(self, x: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        """The inputs of each layer, and the derivative of the loss by its outputs, for all images at once."""
        inputs: Tensors = {}
        taps: Tensors = {}

        def tap(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
            def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
                inputs[path] = arguments[0]
                taps[path] = torch.zeros_like(output, requires_grad=True)
                return output + taps[path]

            return hook

        rows = self.problem.rows
        noise = {k: v.flatten(0, 1) for k, v in rows.noise.items()}
        with hooked(layer.register_forward_hook(tap(path)) for path, layer in self.layers.items()):
            loss = rows.target.model.loss(state, x.flatten(0, 1), rows.labels.flatten(0, 1), noise)
        # The loss is a mean over all images; that of one row is the mean over its batch.
        signals = torch.autograd.grad(loss * len(x), list(taps.values()), create_graph=True)
        return inputs, dict(zip(taps, signals, strict=True))


def objective(problem: Problem) -> Dense | None:
    """This route, where the problem allows it and it agrees with the exact one; otherwise None."""
    model = problem.target.model
    layers = {path: m for path, m in model.module.named_modules() if isinstance(m, nn.Linear)}
    linear = {f"{path}.{part}" for path in layers for part in ("weight", "bias")}
    plain = isinstance(problem.match.distance, Cosine) and not problem.insight.weights
    if not plain or problem.target.training.kind != "gradient" or not set(model.trainable) <= linear:
        return None
    route = Dense(problem, layers)
    rng = torch.Generator().manual_seed(0)
    probe = torch.randn((len(problem.rows), *problem.target.shape[1:]), generator=rng, requires_grad=True)
    with torch.enable_grad():
        row = torch.zeros(1, dtype=torch.long)
        exact = problem.mismatch(probe[:1], problem.rows.at(row)).sum()
        quick = route.mismatch(probe)[0]
        slopes = [torch.autograd.grad(v, probe)[0][0] for v in (exact, quick)]
    if not all(bool(s.isfinite().all()) for s in slopes):
        return None
    close = torch.allclose(slopes[0], slopes[1], rtol=1e-2, atol=1e-3 * float(slopes[0].abs().max()))
    return route if close and torch.allclose(quick, exact, atol=1e-4) else None
