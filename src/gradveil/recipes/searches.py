"""ATS: the search of a policy as a measurement, on the recipe's own network and data."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from gradveil.defenses.data.ats.defense import Policy, parse_policies, write_policy
from gradveil.defenses.data.ats.scores import Score
from gradveil.defenses.data.ats.search import NO_POLICY, Search, candidates, choose
from gradveil.metrics import psnr, ssim
from gradveil.recipes.bench import Bench
from gradveil.recipes.claims import Value
from gradveil.recipes.measures import (
    AtsMeasurement,
    FunctionScores,
    GradientSimilarity,
    HalfTrained,
    LayerSimilarity,
    MeasurementWork,
    ObscuredAccuracy,
    Perturbations,
    ScoreCorrelation,
    Values,
)


class PolicySearch(AtsMeasurement):
    """Algorithm 1: policies searched here, beside random and published ones, under an attack on other images.

    Values are per victim means over the policies of a kind, against the transformed images; scores are of single policies.
    """

    kind: Literal["policy_search"]
    candidates: int
    random: int  # policies of the random kind
    published: str
    attack: str
    rounds: int = 4  # draws per accuracy score

    def take(self, bench: Bench) -> Values:
        # Every policy crops and flips first, so the control does, too.
        model = HalfTrained(self, bench, control="ats:policy=none", rounds=self.rounds)
        search = Search(candidates=self.candidates, images=self.images, seed=self.seed)
        wanted = candidates(search)
        scored = bench.each({f"score of {write_policy((p,))}": p for p in wanted}, lambda p: model.scorer(p).plain())
        scores = [Score.read(dict(row)) for row in scored.values()]
        best = choose(scores, search, model.scorer.privacy(NO_POLICY))
        others = [policy for policy in wanted if policy not in parse_policies(best.policy)]
        kinds: dict[str, Sequence[Policy]] = {
            "none": [NO_POLICY],
            "random": others[: self.random],
            "searched": parse_policies(best.policy),
            "published": parse_policies(self.published),
        }

        def attacked(policies: Sequence[Policy]) -> dict[str, list[float]]:
            """Per victim the mean over the policies of a kind; the score of each policy."""
            pairs = [(fed.x, images) for fed, images in model.attack(policies, self.attack)]
            quality = {"PSNR": [psnr(*pair).tolist() for pair in pairs], "SSIM": [ssim(*pair).tolist() for pair in pairs]}
            means = {name: [fmean(values) for values in zip(*rows, strict=True)] for name, rows in quality.items()}
            return {**means, "score": [model.scorer.privacy(policy) for policy in policies]}

        results = bench.each({f"attack, {kind}": policies for kind, policies in kinds.items()}, attacked)
        values: Values = {}
        for kind in kinds:
            values |= {f"{kind} {name}": Value.of(numbers) for name, numbers in results[f"attack, {kind}"].items()}
        return values

    def work(self, private: int) -> list[MeasurementWork]:
        policies = 1 + self.random + Search().keep + self.published.count("+") + 1
        return self._workloads(private, self.candidates + policies, policies, [self.attack])


AnyMeasurement = Annotated[
    GradientSimilarity | FunctionScores | ScoreCorrelation | LayerSimilarity | PolicySearch | ObscuredAccuracy | Perturbations,
    Field(discriminator="kind"),
]
