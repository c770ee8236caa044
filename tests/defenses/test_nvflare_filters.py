"""`percentile` and `svt` against NVFlare 2.9.0: its filters ran on the same arrays, and what they sent is written here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradveil.core.gradients import ModelFunction
from gradveil.core.randomness import SecretStream, Stream, generator
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.defenses import Step, parse


def sent(spec: str, tensors: Tensors, data: DataSet, rng: Stream | None = None) -> Tensors:
    function = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)))
    batch = Batch(data.private.x[:1], data.private.y[:1])
    return parse(spec).update(tensors, Step(data.task(function), function.state(), batch, rng or generator(0)))


def few() -> Tensors:
    i = torch.arange(24, dtype=torch.float64)
    a, b = (0.03 * torch.sin(1 + 1.7 * i)).float().view(4, 6), (0.004 * torch.cos(2.3 * i[:7])).float()
    return {"a": a, "b": b, "c": torch.tensor(0.5)}


# The sum and the sum of squares of what NVFlare sent of `a` and of `b`, and how many entries of each were zero.
RECORDED = {
    "percentile=10,gamma=0.01": (0.01779684, 0.0020576366, 1, 0.00069842, 4.89544e-05, 3),
    "percentile=50,gamma=0.01": (0.01, 0.0015, 9, 0.0, 0.0, 7),
    "percentile=0,gamma=0.001,steps=4": (0.00797343, 0.0003620468, 0, 0.00350629, 5.4644e-05, 0),
    "percentile=100,gamma=0.02": (0.0, 0.0, 24, 0.0, 0.0, 7),
    "percentile=37.5,gamma=0.002,steps=3": (0.018, 0.000684, 5, 0.0, 0.0, 7),
}


@pytest.mark.parametrize("settings", RECORDED)
def test_percentile_sends_what_nvflare_sent(settings: str, shapes: DataSet) -> None:
    out = sent(f"percentile:{settings}", few(), shapes)
    facts = [f(out[name]) for name in "ab" for f in (torch.sum, lambda t: (t**2).sum(), lambda t: (t == 0).sum())]
    assert [float(fact) for fact in facts] == pytest.approx(RECORDED[settings], rel=1e-5, abs=1e-8)
    assert out["c"] == 0.5  # a single number leaves as it is


@pytest.mark.parametrize("percentile", [0, 10, 33.3, 90])
@pytest.mark.parametrize("steps", [1, 5])
def test_percentile_by_its_formula(percentile: float, steps: int, shapes: DataSet) -> None:
    plain = {"w": torch.randn(40, 30, generator=generator(1)), "b": torch.randn(40, generator=generator(2))}
    scaled = {name: t.numpy() / steps for name, t in plain.items()}
    cutoff = np.percentile(np.concatenate([np.abs(t).ravel() for t in scaled.values()]), percentile)
    out = sent(f"percentile:percentile={percentile},gamma=0.2,steps={steps}", plain, shapes)
    for name, t in scaled.items():
        expected = np.where(np.abs(t) < cutoff, 0, np.clip(t, -0.2, 0.2)) * steps
        assert np.allclose(out[name].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("spec", ["percentile:percentile=50", "prune:ratio=0.5", "prune:ratio=0.5,scope=global"])
def test_entries_that_are_held_back_do_not_even_tell_their_sign(spec: str, shapes: DataSet) -> None:
    out = sent(spec, {"w": torch.randn(40, 30, generator=generator(1))}, shapes)["w"]
    held_back = out[out == 0]
    assert len(held_back) == 600 and not torch.signbit(held_back).any()


def many() -> Tensors:
    i = torch.arange(20_000, dtype=torch.float64)
    return {"w": (2e-5 * torch.sin(0.7 * i)).view(100, 200), "b": 2e-5 * torch.cos(i[:50]), "s": torch.tensor(3.0)}


# Means over 40 runs of NVFlare: entries of `w` sent, mean absolute value of them after the clamp and mean size of their
# noise (both in millionths).
SENT = {
    "steps=2": (1814.7, 12.72, 398.95),
    "fraction=0.3,epsilon=1e6,noise_var=1e9,tau=9.9e-6": (4574.2, 9.999, 0.0),
    "fraction=0.3,epsilon=1e6,noise_var=1e9,tau=9.9e-6,replace=false": (5999.5, 9.999, 0.0),
    "fraction=0.2,epsilon=3e3,noise_var=2,tau=5e-6": (3349.3, 8.618, 10.063),
    "fraction=0.2,epsilon=3e3,noise_var=2,tau=5e-6,replace=false": (4000.3, 8.622, 10.036),
}


def _measured(out: Tensor, plain: Tensor, limit: float) -> list[float]:
    mask, clamped = out != 0, plain.clamp(-limit, limit)
    return [float(mask.sum()), float(clamped[mask].abs().mean()) * 1e6, float((out - clamped)[mask].abs().mean()) * 1e6]


@pytest.mark.parametrize("settings", SENT)
def test_svt_sends_as_many_entries_as_large_and_as_noisy_as_nvflare(settings: str, shapes: DataSet) -> None:
    plain, limit = many(), 2e-5 if "steps" in settings else 1e-5
    runs = [sent(f"svt:{settings}", plain, shapes, generator(seed, "svt")) for seed in range(12)]
    assert all(run["s"] == 3 for run in runs)  # a single number leaves as it is
    count, size, noise = np.mean([_measured(run["w"], plain["w"], limit) for run in runs], axis=0)
    # At the most four standard errors of the mean of our runs and of theirs.
    assert count == pytest.approx(SENT[settings][0], rel=0.015)
    assert size == pytest.approx(SENT[settings][1], rel=0.015)
    assert noise == pytest.approx(SENT[settings][2], rel=0.03, abs=1e-6)


def test_svt_draws_from_a_secret_stream_too(shapes: DataSet) -> None:
    out = sent("svt:fraction=0.2,epsilon=3e3,noise_var=2,tau=5e-6", many(), shapes, SecretStream(b"key"))
    count, size, noise = _measured(out["w"], many()["w"], 1e-5)
    assert count == pytest.approx(3350, rel=0.05) and size == pytest.approx(8.62, rel=0.05)
    assert noise == pytest.approx(10, rel=0.1)
