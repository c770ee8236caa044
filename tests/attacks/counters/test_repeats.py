"""Several sightings of one batch: the draws of a random defense average out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.generic.repeats import merge
from gradveil.core.errors import UserError
from gradveil.core.observation import Observation, Sighting
from gradveil.core.randomness import generator
from gradveil.core.types import Update


def seen_again(one: Observation, times: int, change: Callable) -> Observation:
    sightings = []
    for i in range(times):
        rng = generator("again", i)
        tensors = {n: change(t, rng) for n, t in one.update.tensors.items()}
        sightings.append(Sighting(one.state, Update(tensors)))
    return replace(one, seen=tuple(sightings))


def noisy(t: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return t + 0.05 * torch.randn(t.shape, generator=rng)


def thinned(t: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return t * (torch.rand(t.shape, generator=rng) < 0.3)


def test_noise_and_random_gaps_average_out(observe_victims: Callable) -> None:
    (one,), _ = observe_victims(victims=1)
    sent = one.update.tensors
    many = merge(seen_again(one, 100, noisy))
    assert len(many.seen) == 1
    errors = torch.cat([(many.update.tensors[n] - t).flatten() for n, t in sent.items()])
    assert errors.std() == pytest.approx(0.005, rel=0.05)
    whole = merge(seen_again(one, 60, thinned)).update.tensors
    assert all(torch.allclose(whole[n], t, atol=1e-6) for n, t in sent.items())


def test_states_stay_apart(observe_victims: Callable) -> None:
    (one,), _ = observe_victims(victims=1)
    later = {n: t + 0.1 for n, t in one.state.items()}
    twice = [*seen_again(one, 2, noisy).seen, Sighting(later, one.update)]
    merged = merge(replace(one, seen=tuple(twice)))
    assert [s.state is state for s, state in zip(merged.seen, (one.state, later), strict=True)] == [True, True]


def test_a_digit_comes_back_that_one_update_hides(observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(victims=2)
    once = best_psnr(parse("swift:restarts=0,cycles=0,adam_steps=0")([seen_again(o, 1, thinned) for o in seen]), truth)
    often = best_psnr(parse("repeats")([seen_again(o, 30, thinned) for o in seen]), truth)
    assert once.max() < 15
    assert often.min() > 30


def test_one_sighting_or_equal_ones_are_refused(observe_victims: Callable) -> None:
    (one,), _ = observe_victims(victims=1)
    with pytest.raises(UserError, match="no state was seen with more than one"):
        parse("repeats")([one])
    with pytest.raises(UserError, match="nothing to average"):
        parse("repeats")([seen_again(one, 2, lambda t, rng: t)])
