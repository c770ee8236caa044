"""The filters of NVFlare and Flower under their counters: pictures come back, and under more of the filter they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import parse
from gradveil.attacks.counters.svt_likelihood import SvtLikelihood
from gradveil.attacks.matching.distances import limited
from gradveil.attacks.suite import suite_attacks
from gradveil.attacks.unit_length import unit_length
from gradveil.core.errors import UserError
from gradveil.data import DataSet
from gradveil.defenses import parse as parse_defense


def smooth() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        first, second = nn.Conv2d(1, 6, 5, stride=2, padding=2), nn.Conv2d(6, 6, 3, padding=1)
        return nn.Sequential(first, nn.Sigmoid(), second, nn.Sigmoid(), nn.Flatten(), nn.Linear(216, 3))


NET = smooth()
CHOSEN = "svt:fraction=0.5,epsilon=1e4,gamma=1,tau=0.001"


@pytest.mark.parametrize(
    ("attack", "defense", "level", "stronger"),
    [
        ("percentile-bounds", "percentile", 60, "percentile:percentile=98"),
        ("svt-likelihood:steps=400", f"{CHOSEN},noise_var=1e4", 22, "svt"),
        # Noise as FLIP sets it: a standard deviation of 4.8e-5 on updates of length 1.
        ("clip-aware", "flower-local:epsilon=1e5", 22, "flower-local"),
        ("noise-likelihood:steps=400", "flower-local:epsilon=1e5", 18, "flower-local"),
    ],
)
def test_pictures_come_back_and_more_of_the_filter_stops_it(
    attack: str, defense: str, level: float, stronger: str, observe_victims: Callable, shapes: DataSet, best_psnr: Callable
) -> None:
    common = {"data": shapes, "model": NET, "victims": 2}
    seen, truth = observe_victims(**common, defense=defense)
    quality = best_psnr(parse(attack)(seen, budget="quick"), truth)
    assert quality.min() >= level, quality
    hidden, truth = observe_victims(**common, defense=stronger)
    quality = best_psnr(parse(attack)(hidden, budget="quick"), truth)
    assert quality.max() < 16, quality


def test_bounds_alone_bring_a_picture_closer_than_their_values(
    observe_victims: Callable, shapes: DataSet, best_psnr: Callable
) -> None:
    """Nine of ten entries are sent, all at the limit: their signs, and that they are large."""
    seen, truth = observe_victims(data=shapes, model=NET, victims=1, defense="percentile:gamma=0.001")
    sent = torch.cat([t.flatten() for t in seen[0].update.tensors.values()])
    assert (sent.abs() == sent.abs().max()).float().mean() > 0.89
    bounds, values = (best_psnr(parse(name)(seen, budget="quick"), truth) for name in ("percentile-bounds", "prune-mask"))
    assert bounds.min() > 14 > 10 > values.max(), (bounds, values)


def test_the_counters_of_the_filters() -> None:
    wanted = {
        "percentile": {"percentile-bounds"},
        "svt": {"svt-likelihood"},
        "flower-local": {"clip-aware", "noise-likelihood"},
    }
    for defense, counters in wanted.items():
        attacks = suite_attacks(parse_defense(defense))
        assert counters <= set(attacks) and not {"layer-subsets", "expectation"} & set(attacks)


def test_each_is_for_one_filter(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, model=NET, victims=1)
    for attack, reason in (("percentile-bounds", "is not percentile"), ("svt-likelihood", "is not svt")):
        with pytest.raises(UserError, match=reason):
            parse(attack)(seen)


def test_an_entry_at_the_limit_asks_for_no_more_than_the_limit() -> None:
    target, limit = torch.tensor([[0.1, -0.2, 0.5, -0.5, 0.5]]), torch.tensor([0.5])
    ours = torch.tensor([[0.2, -0.4, 9.0, 0.6, 0.4]])
    (cut,) = limited([ours], [target], limit)
    # The first two entries tell that ours is twice as large; the third is large enough, the fourth has the wrong sign.
    assert cut[0].tolist() == pytest.approx([0.1, -0.2, 0.5, 0.3, 0.2])


def test_without_exact_entries_all_but_the_smallest_reach_the_limit() -> None:
    rng = torch.Generator().manual_seed(0)
    signs, zeros = torch.randn(1, 400, generator=rng).sign(), torch.zeros(1, 40)
    ours = torch.cat([torch.rand(1, 400, generator=rng) * signs, zeros], 1)
    for factor in (1.0, 1e-3):  # whatever the size of ours
        (cut,) = limited([factor * ours], [torch.cat([0.3 * signs, zeros], 1)], torch.tensor([0.3]))
        assert int((cut.abs() > 0.3 * (1 - 1e-5)).sum()) in (380, 381)
        assert float(cut.abs().max()) == pytest.approx(0.3) and float(cut[:, 400:].abs().max()) == 0


def test_several_updates_are_averaged_over_those_that_sent_an_entry(observe_victims: Callable, shapes: DataSet) -> None:
    spec = f"{CHOSEN},noise_var=100"
    (seen,), _ = observe_victims(data=shapes, model=NET, victims=1, defense=spec, updates=6)
    (plain,), _ = observe_victims(data=shapes, model=NET, victims=1)
    seen = unit_length(seen)

    def flat(tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([t.flatten() for t in tensors.values()])

    rows = torch.stack([flat(s.update.tensors) for s in seen.seen])
    times, mean = (rows != 0).sum(0), flat(SvtLikelihood().average(seen).update.tensors)
    assert torch.allclose(mean[times == 1], rows.sum(0)[times == 1])
    assert torch.allclose(mean[times == 4], rows.sum(0)[times == 4] / 4)
    # The noise that is left is what the attack expects: less by the number of updates, entry by entry.
    error = ((mean - flat(plain.update.tensors).clamp(-1, 1) / seen.knowledge.norm) ** 2 * times)[times > 0].sum()
    assert float(error) == pytest.approx(SvtLikelihood().expected_misfit(seen), rel=0.15)
