"""Swift: the strongest reconstruction for the least compute on the nets we know. Our own; no paper.

Second-order steps beat thousands of first-order ones on smooth nets, but no distance wins everywhere: the global cosine
is ruled by one layer on some initialisations, the layer-relative L2 is ill-conditioned on others. So:

0. where a net can be unrolled in closed form (`linear`, `rgap`), its answer comes first: it costs a fraction of a second, and a
   victim whose update it explains needs nothing else;
1. every other victim starts once for each distance, all in one batched L-BFGS, down a ladder of TV weights (a strong prior
   first, which chooses among what the update alone leaves open);
2. all rows finish under one common distance, and the adversary keeps the row with the lowest residual;
3. victims that did not converge get new starts, and those close to the truth go down the ladder again from where they
   are; one that ends where it was before is settled: its update does not fit, and no other start will make it;
4. who is still open gets signed Adam with a strong prior, which kinks (ReLU, max-pool) and noise do not stop. Again the
   residual decides.

Where the net draws noise that the adversary does not know, an exact fit would fit the wrong draw: no step 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.matching.distances import Cosine, PerRow, RelativeL2
from gradveil.attacks.matching.engine import Match, Problem, solve
from gradveil.attacks.matching.optimizers import LBFGS, Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.registry import attack, parse
from gradveil.core.settings import settings

CLOSED = ("linear", "rgap")
DISTANCES = (Cosine(), RelativeL2())
LADDER = ((1e-3, 100), (1e-4, 60))  # TV weight, L-BFGS iterations
FINISH = ((1e-5, 40), (1e-7, 150))  # common distance: before and after the choice
CLOSE = 0.1  # residual below which going on from here beats a new start
SAME = 0.01  # relative change of the residual within which a victim has ended where it was before
CYCLE = ((1e-3, 200), (1e-4, 80))  # once more down the ladder, by cosine, from where a victim stands

Options = Callable[[Target], dict[str, Any]]


def plain(target: Target) -> dict[str, Any]:
    """Nothing known beyond the update."""
    return {}


@attack("swift", targets="any")
@settings
class Swift(Attack):
    """A portfolio of distances under batched L-BFGS, narrowed by the adversary's own residual."""

    restarts: int = Field(default=2, ge=0)  # further starts for victims that did not converge
    cycles: int = Field(default=2, ge=0)  # further descents for victims that are close
    converged: float = Field(
        default=1e-3, gt=0
    )  # residual (share of the update's size) below which a victim needs no new start
    exact: float = Field(default=1e-6, gt=0)  # … and below which it is done
    closed: bool = True  # begin with the closed form where there is one
    adam_steps: int = Field(default=1200, ge=0)  # for those that never converge

    def run(self, target: Target) -> Answer:
        return self.reconstruct(target)

    def reconstruct(self, target: Target, options: Options = plain) -> Answer:
        """The attack, with what a counter knows (`options` of the problem: masks, tensors that count, a transform)."""
        x, residual, used = self._begin(target, options)
        settled = set(range(target.shape[0])) if _draws_unknown_noise(target) else set()
        for again in range(self.restarts):
            # Far away stand kinks or noise, and new starts do not help there.
            rows = [i for i in _open(residual, self.converged, settled) if residual[i] < 0.3]
            if not rows:
                break
            found = _portfolio(target.subset(rows, f"start {again}"), 0.1 if again == 0 else 0.5, options)
            settled |= _unmoved(residual, rows, found)
            used += _keep_better(x, residual, rows, found)
        for _ in range(self.cycles):
            rows = [i for i in _open(residual, self.exact, settled) if residual[i] < CLOSE]
            if not rows:
                break
            found = _cycle(target.subset(rows), x[rows], options)
            settled |= _unmoved(residual, rows, found)
            used += _keep_better(x, residual, rows, found)
        rows = _open(residual, 10 * self.converged)
        if rows and self.adam_steps:
            used += _keep_better(x, residual, rows, self._signed(target.subset(rows, "adam"), options))
        return Answer(x, residual, iterations=used)

    def _signed(self, target: Target, options: Options) -> tuple[Tensor, Tensor, int]:
        """Step 4."""
        steps = steps_for(target, self.adam_steps)
        match = Match(Cosine(), (TV(1e-2),), Adam(0.1, signed=True), steps=steps, box=True)
        problem = Problem(target, match.distance, match.priors, **options(target))
        solution = solve(target, match, problem=problem)
        return solution.x, problem.residual(solution.x, RelativeL2()), solution.iterations

    def _begin(self, target: Target, options: Options) -> tuple[Tensor, Tensor, int]:
        """The closed form where it comes close, the portfolio for everyone else."""
        exact = [a for a in map(parse, CLOSED) if a.applies(target.first) is None] if options is plain else []
        if not self.closed or not exact:
            return _portfolio(target, 0.1, options)
        x = exact[0].run(target).x
        residual = torch.nan_to_num(Problem(target, RelativeL2(), ()).residual(x, RelativeL2()), nan=float("inf"))
        rows, used = _open(residual, CLOSE), 0
        if rows:
            used = _keep_better(x, residual, rows, _portfolio(target.subset(rows), 0.1, options))
        return x, residual, used


def _portfolio(target: Target, scale: float, options: Options) -> tuple[Tensor, Tensor, int]:
    """Steps 1 and 2: images, residuals, evaluations."""
    victims, each = target.shape[0], len(DISTANCES)
    factor = {"quick": 1.0, "standard": 1.0, "thorough": 3.0}[target.budget]
    x = Start(scale=scale).draw(target, 1, target.rng).repeat_interleave(each, 0)
    mixed = PerRow(DISTANCES, torch.arange(each).repeat(victims))
    used = 0
    for distance, (weight, steps) in [(mixed, s) for s in LADDER] + [(RelativeL2(), FINISH[0])]:
        x, count = _descend(target, distance, weight, int(steps * factor), x, each, options)
        used += count
    problem = Problem(target, RelativeL2(), (), restarts=each, **options(target))
    residual = torch.nan_to_num(problem.residual(x, RelativeL2()), nan=float("inf"))
    pick = residual.unflatten(0, (victims, each)).argmin(1) + torch.arange(victims) * each
    x, count = _descend(target, RelativeL2(), FINISH[1][0], int(FINISH[1][1] * factor), x[pick], 1, options)
    residual = Problem(target, RelativeL2(), (), **options(target)).residual(x, RelativeL2())
    return x, torch.nan_to_num(residual, nan=float("inf")), used + count


def _cycle(target: Target, x: Tensor, options: Options) -> tuple[Tensor, Tensor, int]:
    used = 0
    for distance, (weight, steps) in [*((Cosine(), s) for s in CYCLE), (RelativeL2(), FINISH[1])]:
        x, count = _descend(target, distance, weight, steps, x, 1, options)
        used += count
    return x, Problem(target, RelativeL2(), (), **options(target)).residual(x, RelativeL2()), used


def _descend(
    target: Target, distance: object, weight: float, steps: int, x: Tensor, each: int, options: Options
) -> tuple[Tensor, int]:
    optimizer = LBFGS(history=30)
    match = Match(distance, (TV(weight, "smoothed"),), optimizer, steps=steps)  # type: ignore[arg-type]
    problem = Problem(target, match.distance, match.priors, restarts=each, **options(target))
    solution = solve(target, match, problem=problem, start=x)
    return solution.x, solution.iterations


def _draws_unknown_noise(target: Target) -> bool:
    drawn = target.model.draw_noise(1, torch.Generator())
    return any(name not in o.knowledge.secrets for name in drawn for o in target.observations)


def _open(residual: Tensor, limit: float, settled: Collection[int] = ()) -> list[int]:
    return [i for i in (residual > limit).nonzero().flatten().tolist() if i not in settled]


def _unmoved(residual: Tensor, rows: list[int], found: tuple[Tensor, Tensor, int]) -> set[int]:
    """The victims of `rows` that ended with the residual they had."""
    before = residual[rows]
    return {rows[i] for i in ((found[1] - before).abs() <= SAME * before).nonzero().flatten().tolist()}


def _keep_better(x: Tensor, residual: Tensor, rows: list[int], found: tuple[Tensor, Tensor, int]) -> int:
    new_x, new_residual, used = found
    better = new_residual < residual[rows]
    for place, row in enumerate(rows):
        if better[place]:
            x[row], residual[row] = new_x[place], new_residual[place]
    return used
