"""The size of an update makes no difference: a defense may change it at will, and hides nothing by it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import gradveil as gv
from gradveil.attacks import parse
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.matching.fed_images import signal_size
from gradveil.attacks.unit_length import least_agreement, unit_length
from gradveil.core.local_training import LocalTraining
from gradveil.core.types import Tensors
from gradveil.data import DataSet

SIZES = (1e-20, 1.0, 1e20)
FACTORS = [(1e-30, torch.float64), (1e30, torch.float64), (1e-20, torch.float32), (1e20, torch.float32)]


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining(epochs=2, lr=0.1)])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_labels_are_inferred_from_an_update_of_any_size(
    size: int, training: LocalTraining, observe_victims: Callable, scaled: Callable, shapes: DataSet
) -> None:
    (one,), _ = observe_victims(data=shapes, victims=1, batch_size=size, training=training)
    expected = infer_labels(unit_length(one))
    for factor, dtype in FACTORS:
        assert torch.equal(infer_labels(unit_length(scaled(one, factor, dtype))), expected)


@pytest.mark.parametrize("target", [[0.7, 0.3, 0, 0, 0], [0.5, 0.25, 0.25, 0, 0], [0, 0, 1.0, 0, 0]])
def test_mixed_labels_are_read_from_a_signal_of_any_size(target: list[float]) -> None:
    y = torch.tensor(target)
    for belief, factor in product((torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]), torch.tensor([1 - 4e-6, *[1e-6] * 4])), SIZES):
        signal = factor * (belief - y)
        torch.testing.assert_close(belief - signal_size(belief, signal) * signal, y, rtol=0, atol=1e-6)


def test_all_updates_of_an_observation_are_divided_by_one_number(
    observe_victims: Callable, scaled: Callable, shapes: DataSet
) -> None:
    (one,), _ = observe_victims(data=shapes, victims=1, updates=3, defense="gaussian:std=0.5")
    one.seen[1].update.tensors["buffer"] = torch.full((3,), 7.0)
    for factor, dtype in [(1.0, torch.float32), *FACTORS]:
        unit = unit_length(scaled(one, factor, dtype))
        before, after = (torch.stack([length(s.update.tensors) for s in o.seen]) for o in (one, unit))
        torch.testing.assert_close(after, before / before.square().mean().sqrt(), rtol=1e-5, atol=0)
        assert unit.knowledge.norm == pytest.approx(float(before.square().mean().sqrt()), rel=1e-5)
        assert unit.knowledge.noise is not None
        assert unit.knowledge.noise.std == pytest.approx(0.5 / unit.knowledge.norm)
        assert all(t.dtype == torch.float32 for n, t in unit.update.tensors.items())
    assert torch.equal(unit_length(one).seen[1].update.tensors["buffer"], torch.full((3,), 7.0))  # no parameter
    assert torch.equal(one.seen[1].update.tensors["buffer"], torch.full((3,), 7.0))


def length(tensors: Tensors) -> Tensor:
    return torch.cat([t.flatten() for n, t in tensors.items() if n != "buffer"]).norm()


@pytest.mark.parametrize("name", ["swift", "rgap", "idlg"])
def test_updates_that_hold_nothing_are_recorded_as_failures(
    name: str, observe_victims: Callable, shapes: DataSet, hurried: int
) -> None:
    seen, _ = observe_victims(data=shapes, victims=3)
    empty, broken = (seen[i].update.tensors for i in (0, 2))
    empty.update({n: torch.zeros_like(t) for n, t in empty.items()})
    broken["conv.weight" if "conv.weight" in broken else next(iter(broken))].view(-1)[0] = float("nan")
    found = parse(name)(seen)
    assert [r.failed for r in found] == ["the update is zero everywhere", None, "the update holds values that are not finite"]
    assert torch.equal(found[1].images, parse(name)(seen[1:2])[0].images)
    assert all(bool(r.images.isfinite().all()) for r in found)


# -- defenses that change the size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["swift", "clip-aware", "rgap", "swift:closed=false,restarts=0,cycles=0,adam_steps=0"])
def test_clipping_to_next_to_nothing_hides_nothing(attack: str, observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(victims=2, defense="clip:norm=1e-20")
    assert best_psnr(parse(attack)(seen, budget="quick"), truth).min() >= (40 if "closed" in attack else 100)


def test_noise_is_judged_against_the_size_of_what_it_is_added_to(observe_victims: Callable, best_psnr: Callable) -> None:
    attack, quality = parse("noise-likelihood:steps=150"), []
    for clip in ("1", "1e-8"):
        seen, truth = observe_victims(victims=2, defense=f"dpsgd:clip={clip},noise=0.001")
        quality.append(best_psnr(attack(seen), truth).mean())
    assert quality[0] >= 18
    assert quality[1] == pytest.approx(float(quality[0]), abs=0.5)


def test_an_audit_of_clipping_to_next_to_nothing_says_that_it_leaks() -> None:
    report = gv.audit(defenses=["clip:norm=1e-20"], attacks=["rgap"], victims=4, workers=0)
    assert [d.verdict for d in report.summary.defenses if d.spec.startswith("clip")] == ["leaks"]


def test_agreement_with_the_undefended_update(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=4)
    plain, other = seen[0].update.tensors, seen[3].update.tensors
    for factor in (1e-30, 1.0, 1e30):
        assert least_agreement({n: t.double() * factor for n, t in plain.items()}, plain) == pytest.approx(1)
    assert least_agreement({n: -t for n, t in plain.items()}, plain) == -1
    assert least_agreement({n: torch.zeros_like(t) for n, t in plain.items()}, plain) == -1
    assert least_agreement({n: t for n, t in list(plain.items())[1:]}, plain) == -1
    assert least_agreement({n: t + float("nan") for n, t in plain.items()}, plain) == -1
    assert least_agreement(other, plain) < 0.999
    name = next(iter(plain))
    assert least_agreement({**plain, name: 1.2 * plain[name]}, plain) < 0.999  # one tensor by another factor
    assert least_agreement({**plain, name: plain[name].flip(0)}, plain) < 0.999
