"""Certificates against the best attack there is: a matched filter on gradients that are orthogonal and as long as allowed.

An honest mechanism is never identified significantly more often than its certificate allows. A mechanism that adds less
noise than it says, makes a release that was not counted, or does not draw its batches in secret, is.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import betainc
from torch import nn

import gradveil as gv
from gradveil.certification import gaussian
from gradveil.certification.certificate import Certificate, certify
from gradveil.certification.mechanism import Mechanism, Releases
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.defenses import Defense, Setup, parse
from gradveil.defenses.gradient.dpsgd import DpSgd

RUNS = 1000
PIXELS, M = 60, 40  # images and candidates where the client itself is attacked


def p_above(successes: int, limit: float) -> float:
    """Exact binomial test: the probability of so many successes or more where the limit is the rate."""
    return 1.0 if successes == 0 else float(betainc(successes, RUNS - successes + 1, limit))


def products(rng: np.random.Generator, noise: float, m: int, taken: np.ndarray) -> np.ndarray:
    """The product of each release with each candidate's gradient (releases × m) in units of the bound.

    The gradients are orthogonal, so the products are independent. The first candidate took part in the releases `taken`.
    """
    values = noise * rng.standard_normal((len(taken), m))
    values[:, 0] += taken
    return values


def identified(noise: float, m: int, releases: int, seed: int) -> int:
    """How often the candidate with the largest sum of products is the right one, where all releases count."""
    rng = np.random.default_rng(seed)
    return sum(products(rng, noise, m, np.ones(releases)).sum(axis=0).argmax() == 0 for _ in range(RUNS))


@pytest.mark.parametrize("mu", [0.76, 1.8634, 3.2])
@pytest.mark.parametrize("m", [11, 1001])
def test_the_best_line_up_reaches_the_integral_and_stays_below_the_certificate(mu: float, m: int) -> None:
    noise = math.sqrt(2) / mu
    successes = identified(noise, m, releases=2, seed=100)
    expected = gaussian.line_up_success(mu, m)
    assert abs(successes - RUNS * expected) <= 4 * math.sqrt(RUNS * expected * (1 - expected)) + 1
    limit = certify(Mechanism("test", noise), Releases(rounds=2), m=m).upper
    assert p_above(successes, limit) > 0.001
    assert limit - expected < 0.1


@pytest.mark.parametrize("m", [11, 1001])
def test_noise_divided_by_the_root_of_two_is_detected(m: int) -> None:
    promise = certify(Mechanism("test", 1.0), Releases(rounds=4), m=m)
    assert p_above(identified(1 / math.sqrt(2), m, releases=4, seed=101), promise.upper) < 1e-6


@pytest.mark.parametrize("m", [11, 1001])
def test_a_release_that_was_not_counted_is_detected(m: int) -> None:
    noise = 1 / 1.8634
    promise = certify(Mechanism("test", noise), Releases(rounds=1), m=m)
    assert p_above(identified(noise, m, releases=2, seed=102), promise.upper) < 1e-6


def test_an_update_that_is_clipped_as_a_whole_keeps_its_certificate_too() -> None:
    promise = certify(Mechanism("test", 0.7, "update"), Releases(rounds=2), m=101)
    successes = identified(0.7, 101, releases=2, seed=103)
    assert p_above(successes, promise.upper) > 0.001
    assert successes > RUNS * (promise.upper - 0.1)


def identified_by_their_client(defense: Defense, rounds: int, seed: int) -> int:
    """The same with the updates of a client of the project.

    Images have one bright pixel each, so their gradients at zero weights are orthogonal; the defense clips all of them. The
    client holds the candidate 0 and 20 images that are no candidates.
    """
    function = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 2, bias=False)), mode="eval")
    state = {name: torch.zeros_like(value) for name, value in function.state().items()}
    task = Task(function, (1, 1, PIXELS), 2, torch.zeros(1), torch.ones(1))
    held = [0, *range(PIXELS - 20, PIXELS)]
    batch = Batch(torch.eye(PIXELS)[held].view(-1, 1, 1, PIXELS), torch.zeros(len(held), dtype=torch.long))
    client = prepare_client(defense, LocalTraining(), Setup(task, state, batch, seed=seed))
    successes = 0
    for run in range(RUNS):
        weights = torch.stack([client.round(state, batch, run, r)[0].tensors["1.weight"] for r in range(rounds)]).sum(dim=0)
        # The gradient of an image of class 0 at zero weights is as long in both rows, with opposite signs.
        successes += int((weights[1] - weights[0])[:M].argmax()) == 0
    return successes


def test_the_noise_that_the_client_really_adds_keeps_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the defense of the project itself: what it clips, how it averages, and the noise that it adds."""
    method = parse("dpsgd:noise=1.1,clip=0.02")
    assert isinstance(method, DpSgd)
    promise = gv.certify(method, rounds=2, line_up=M)
    successes = identified_by_their_client(method, 2, seed=100)
    expected = gaussian.line_up_success(math.sqrt(2) / 1.1, M)
    assert abs(successes - RUNS * expected) <= 4 * math.sqrt(RUNS * expected * (1 - expected)) + 1
    assert p_above(successes, promise.upper) > 0.001
    monkeypatch.setattr(DpSgd, "std", lambda self, examples: self.multiplier * self.clip / examples / math.sqrt(2))
    assert p_above(identified_by_their_client(method, 2, seed=101), promise.upper) < 1e-6


class TestSampling:
    """0.8 noise, 4 epochs of 20 batches."""

    NOISE, EPOCHS, BATCHES, M = 0.8, 4, 20, 101

    @pytest.fixture(scope="class")
    def promise(self) -> Certificate:
        pytest.importorskip("opacus", reason="the accountants are those of Opacus")
        releases = Releases(rounds=self.EPOCHS, sampling="poisson", sample_rate=1 / self.BATCHES)
        return certify(Mechanism("test", self.NOISE), releases, m=self.M)

    def likelihood(self, values: np.ndarray) -> np.ndarray:
        """The log-likelihood ratio of each candidate where nobody knows which batches it was in: the best statistic."""
        ratio = np.exp((values - 0.5) / self.NOISE**2)
        return np.log1p((ratio - 1) / self.BATCHES).sum(axis=0)

    def test_secret_batches_keep_the_certificate(self, promise: Certificate) -> None:
        rng, successes = np.random.default_rng(104), 0
        for _ in range(RUNS):
            taken = rng.random(self.EPOCHS * self.BATCHES) < 1 / self.BATCHES
            successes += self.likelihood(products(rng, self.NOISE, self.M, taken)).argmax() == 0
        assert p_above(successes, promise.upper) > 0.001
        assert successes > 3 * RUNS / self.M  # the attack works

    def test_shuffled_batches_that_were_accounted_as_secret_are_detected(self, promise: Certificate) -> None:
        """Who knows the order, as of a data set that is read in its own order, leaves the other batches out."""
        rng, successes = np.random.default_rng(105), 0
        for _ in range(RUNS):
            taken = np.zeros((self.EPOCHS, self.BATCHES))
            taken[:, 7] = 1
            values = products(rng, self.NOISE, self.M, taken.ravel())
            successes += values[taken.ravel() == 1].sum(axis=0).argmax() == 0
        assert p_above(successes, promise.upper) < 1e-6
        honest = certify(Mechanism("test", self.NOISE), Releases(rounds=self.EPOCHS, sampling="shuffled"), m=self.M)
        assert p_above(successes, honest.upper) > 0.001
