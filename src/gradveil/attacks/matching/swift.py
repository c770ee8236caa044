"""Swift: the strongest reconstruction for the least compute on the nets we tested. Ours; no paper.

Second-order steps beat thousands of first-order ones on smooth nets, but no distance wins everywhere: one layer rules the
global cosine on some initialisations, and the layer-relative L2 is ill-conditioned on others. So:

0. Where a closed form applies (`linear`, `rgap`, `april`, `token-span`), its answer comes first: it costs a fraction of a
   second, and a victim whose update it explains needs nothing else.
1. Every other victim starts once per distance, all in one batched L-BFGS, down a ladder of TV weights: a strong prior
   first, which chooses among the images that the update alone leaves open. Batches that are far from a fit after the first
   rung go to step 4.
2. All rows finish under one common distance, and the adversary keeps the row with the lowest residual.
3. Victims that did not converge get new starts, and those close to the truth go down the ladder again from where they
   are. A victim that ends where it was before is settled: its update does not fit, and no other start will change that.
4. The remaining victims get signed Adam with a strong prior, which kinks (ReLU, max-pool) and noise do not stop. Where
   clients send BatchNorm's statistics, the moments of their batch are matched, too. Again the residual decides.

Where the net draws noise that the adversary does not know, an exact fit would fit the wrong draw: no step 3. On a net that is
so large that steps 1 and 2 do not fit in the budget's CPU seconds, all of them go into step 4.
"""

from collections.abc import Collection
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.analytic.april import April
from gradveil.attacks.analytic.linear import Linear
from gradveil.attacks.analytic.rgap import RGAP
from gradveil.attacks.analytic.token_span import TokenSpan
from gradveil.attacks.layers import is_smooth
from gradveil.attacks.matching.distances import Cosine, Distance, PerRow, RelativeL2
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.moments import MomentMatch
from gradveil.attacks.matching.optimizers import LBFGS, Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import NOTHING, Insight, Match, Problem, residual
from gradveil.attacks.matching.starts import Start
from gradveil.core.loops import is_sampled
from gradveil.core.randomness import TorchStream

CLOSED = (Linear(), RGAP(), April(), TokenSpan())
CERTAIN = (Linear, April, TokenSpan)  # for one image their score says whether it is right, whatever the layers behind them draw
SURE = 1e-3  # such a score below which it is
DISTANCES = (Cosine(), RelativeL2())
LADDER = ((1e-3, 100), (1e-4, 60))  # TV weight, L-BFGS iterations
FINISH = ((1e-5, 40), (1e-7, 150))  # common distance: before and after the choice
CLOSE = 0.1  # residual below which going on from here beats a new start
FAR = 0.3  # residual above which kinks or noise prevent a fit, and new starts do not help
NEARING = 0.6  # the same on a smooth net, of a search that was cut short after a few steps
SAME = 0.01  # relative change of the residual within which a victim has ended where it was before
LENGTHEN = {"quick": 1.0, "standard": 1.0, "thorough": 3.0}
MOMENTS = 10.0  # weight of the moments of the batch, where clients send BatchNorm's statistics
ONLY = 1200  # iterations of signed Adam where there is no time for anything else
CYCLE = ((1e-3, 200), (1e-4, 80))  # once more down the ladder, by cosine, from where a victim is


@attack("swift", targets="any", version=7)
class Swift(Attack):
    """A portfolio of distances under batched L-BFGS, narrowed by the adversary's own residual.

    Args:
        restarts, cycles: further starts for victims that did not converge, further descents for victims that are close.
        converged, exact: residual (share of the update's size) below which a victim needs no new start, and is done.
        closed: begin with the closed form where there is one.
        adam_steps: iterations of signed Adam for victims that never converge, scaled by the budget; 0 for none, but where
            the net is too large for anything else.
    Example: gradveil audit --attack swift:restarts=4
    """

    restarts: int = Field(default=2, ge=0)
    cycles: int = Field(default=2, ge=0)
    converged: float = Field(default=1e-3, gt=0)
    exact: float = Field(default=1e-6, gt=0)
    closed: bool = True
    adam_steps: int = Field(default=ONLY, ge=0)

    def cost(self, work: Workload) -> Cost:
        """Of a victim that no closed form explains and that ends close, or far from a fit; new starts are rare."""
        adam, portfolio = self._adam_steps(work), _portfolio_evaluations(work)
        if not self._affords_portfolio(work):
            return Cost(adam)
        cycle = LBFGS().expected_evaluations(sum(steps for _, steps in (*CYCLE, FINISH[1]))) if self.cycles else 0
        limit = (1 + self.restarts) * portfolio + self.cycles * cycle + adam
        return Cost(portfolio + max(cycle, adam), len(DISTANCES), limit)

    def run(self, target: Target) -> Answer:
        return self.reconstruct(target)

    def reconstruct(self, target: Target, insight: Insight = NOTHING) -> Answer:
        """The attack, with the insight of a counter."""
        best = self._begin(target, insight)
        if not self._affords_portfolio(target.workload):
            return best
        if is_sampled():
            return self._expected(target, insight, best)
        settled = set(range(target.shape[0])) if _draws_unknown_noise(target) else set()
        for again in range(self.restarts):
            rows = [i for i in _above(best, self.converged, settled) if best.score[i] < FAR]
            if not rows:
                break
            scale = 0.1 if again == 0 else 0.5
            settled |= _merge(best, rows, _portfolio(target.subset(rows, f"start {again}"), insight.subset(rows), scale))
        for _ in range(self.cycles):
            rows = [i for i in _above(best, self.exact, settled) if best.score[i] < CLOSE]
            if not rows:
                break
            settled |= _merge(best, rows, _cycle(target.subset(rows), insight.subset(rows), best.x[rows]))
        rows = _above(best, 10 * self.converged)
        if rows and self.adam_steps:
            _merge(best, rows, self._signed(target.subset(rows, "adam"), insight.subset(rows)))
        return best

    def _expected(self, target: Target, insight: Insight, best: Answer) -> Answer:
        """The stages that most victims take. A search that is cut short never converges, so its residual only tells which
        victims come close: some then take cycles, others new starts, and the time of all new starts stands for both."""
        rows, limit = _above(best, self.exact), NEARING if is_smooth(target.model.module) else FAR
        far, near = ([i for i in rows if (best.score[i] >= limit) == wanted] for wanted in (True, False))
        for _ in range(self.restarts if near else 0):
            _merge(best, near, _portfolio(target.subset(near), insight.subset(near), 0.1))
        if far and self.adam_steps:
            _merge(best, far, self._signed(target.subset(far, "adam"), insight.subset(far)))
        return best

    def _begin(self, target: Target, insight: Insight) -> Answer:
        """The closed form where it comes close, the portfolio for all other victims."""
        usable = [form for form in CLOSED if form.applies(target.first) is None] if insight.is_empty else []
        search = _first_portfolio if self._affords_portfolio(target.workload) else self._signed
        if not self.closed or not usable:
            return search(target, insight)
        closed = usable[0].run(target)
        best = Answer(closed.x, residual(target, closed.x))
        if isinstance(usable[0], CERTAIN) and target.shape[1] == 1:
            best.score = torch.where(closed.score < SURE, best.score.clamp_max(self.exact), best.score)
        rows = _above(best, CLOSE)
        if rows:
            _merge(best, rows, search(target.subset(rows), insight))
        return best

    def _signed(self, target: Target, insight: Insight) -> Answer:
        """Step 4."""
        steps = self._adam_steps(target.workload)
        priors = (TV(1e-2), MomentMatch(MOMENTS))
        solution = solve(Problem(target, Match(Cosine(), priors, Adam(0.1, signed=True), steps, box=True), insight))
        return Answer(solution.x, residual(target, solution.x, insight=insight), iterations=solution.iterations)

    def _affords_portfolio(self, work: Workload) -> bool:
        return len(DISTANCES) * _portfolio_evaluations(work) <= work.evaluations

    def _adam_steps(self, work: Workload) -> int:
        steps = self.adam_steps if self._affords_portfolio(work) else self.adam_steps or ONLY
        return work.steps(steps, signed=True) if steps else 0


class SwiftCounter(Attack):
    """Swift with the insight of a counter; subclasses say which."""

    search: ClassVar[Swift] = Swift()

    def insight(self, target: Target) -> Insight:
        return NOTHING

    def cost(self, work: Workload) -> Cost:
        return self.search.cost(work)

    def run(self, target: Target) -> Answer:
        return self.search.reconstruct(target, self.insight(target))


def _portfolio_evaluations(work: Workload) -> int:
    """Of one row."""
    return LBFGS().expected_evaluations(int(LENGTHEN[work.budget] * sum(steps for _, steps in (*LADDER, *FINISH))))


def _first_portfolio(target: Target, insight: Insight) -> Answer:
    return _portfolio(target, insight, 0.1)


def _portfolio(target: Target, insight: Insight, scale: float) -> Answer:
    """Steps 1 and 2."""
    victims, each = target.shape[0], len(DISTANCES)
    factor = LENGTHEN[target.budget]
    x = Start(scale=scale).draw(target, 1, target.rng).repeat_interleave(each, 0)
    mixed = PerRow(DISTANCES, torch.arange(each).repeat(victims))
    used, may_end = 0, target.shape[1] > 1 and not (is_sampled() and is_smooth(target.model.module))
    stages: list[tuple[Distance, tuple[float, int]]] = [*((mixed, s) for s in LADDER), (RelativeL2(), FINISH[0])]
    end = 1 if is_sampled() else 0  # a search that is cut short does not tell whether it would end: some of the rest counts
    for stage, (distance, (weight, steps)) in enumerate(stages):
        x, count = _descend(target, insight, distance, weight, int(steps * factor), x)
        used += count
        score = residual(target, x, insight=insight)
        if stage == end and may_end and not bool((score < FAR).any()):
            break  # kinks or noise prevent a fit of the batches, and a weaker prior does not help
    pick = score.unflatten(0, (victims, each)).argmin(1) + torch.arange(victims) * each
    if stage + 1 < len(stages):
        return Answer(x[pick], score[pick], iterations=used)
    x, count = _descend(target, insight, RelativeL2(), FINISH[1][0], int(FINISH[1][1] * factor), x[pick])
    return Answer(x, residual(target, x, insight=insight), iterations=used + count)


def _cycle(target: Target, insight: Insight, x: Tensor) -> Answer:
    used = 0
    stages: list[tuple[Distance, tuple[float, int]]] = [*((Cosine(), s) for s in CYCLE), (RelativeL2(), FINISH[1])]
    for distance, (weight, steps) in stages:
        x, count = _descend(target, insight, distance, weight, steps, x)
        used += count
    return Answer(x, residual(target, x, insight=insight), iterations=used)


def _descend(target: Target, insight: Insight, distance: Distance, weight: float, steps: int, x: Tensor) -> tuple[Tensor, int]:
    """From images `x`, victims · restarts first: better images, and the evaluations used."""
    restarts = len(x) // target.shape[0]
    match = Match(distance, (TV(weight, "smoothed"),), LBFGS(history=30), steps, restarts=restarts)
    solution = solve(Problem(target, match, insight), start=x)
    return solution.x, solution.iterations


def _draws_unknown_noise(target: Target) -> bool:
    drawn = target.model.draw_noise(1, TorchStream())
    return any(name not in o.knowledge.secrets for name in drawn for o in target.observations)


def _above(best: Answer, limit: float, settled: Collection[int] = ()) -> list[int]:
    """The victims with a residual above the limit that are not settled."""
    return [i for i in (best.score > limit).nonzero().flatten().tolist() if i not in settled]


def _merge(best: Answer, rows: list[int], new: Answer) -> set[int]:
    """Keep the better images of the victims `rows`; returns those that ended with the residual they had."""
    before = best.score[rows]
    settled = {rows[i] for i in ((new.score - before).abs() <= SAME * before).nonzero().flatten().tolist()}
    for place, row in enumerate(rows):
        if new.score[place] < before[place]:
            best.x[row], best.score[row] = new.x[place], new.score[place]
    best.iterations += new.iterations
    return settled
