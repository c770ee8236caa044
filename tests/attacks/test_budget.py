"""Budgets in nominal CPU seconds: small networks get all steps of an attack, large ones what the seconds allow."""

from typing import Any

import torch
from torch import nn

from gradveil.attacks.budget import SECONDS, Budget, Workload
from gradveil.attacks.counters.noise_likelihood import WEIGHTS, NoiseLikelihood
from gradveil.attacks.matching.features import FeatureInversion
from gradveil.attacks.matching.swift import DISTANCES, Swift
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.losses import DEFAULT, find_loss
from gradveil.core.task import Task


def work(width: int, budget: Budget = "quick", images: int = 1, **training: Any) -> Workload:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))
    task = Task(ModelFunction(model, find_loss(DEFAULT), "eval"), (1, 8, 8), 4, torch.zeros(1), torch.ones(1))
    return Workload(task, budget, images, LocalTraining(**training))


def test_a_small_network_gets_all_steps_and_a_large_one_those_that_fit() -> None:
    assert work(16).steps(1_000) == 500 and work(16, "thorough").steps(1_000) == 4_000
    large = work(2**21)  # 143 million multiply-adds
    assert large.evaluations < 500 and large.steps(1_000) == large.evaluations
    longer = SECONDS["standard"] / SECONDS["quick"]
    assert 0 <= work(2**21, "standard").evaluations - longer * large.evaluations < longer
    assert large.steps(10) == 10 and work(2**21, images=1024).steps(1_000) == 20


def test_signed_steps_by_differences_are_cheaper_where_they_are_taken() -> None:
    large, delta = work(2**21), work(2**21, lr=0.1)
    assert large.allows_differences and large.signed_evaluations > 3 * large.evaluations
    assert large.steps(10_000, signed=True) == large.signed_evaluations
    assert not delta.allows_differences and delta.signed_evaluations == delta.evaluations  # weights are sent
    assert not work(16).allows_differences


def test_images_epochs_and_mini_batches_are_counted() -> None:
    width = 2**14
    one, eight = work(width).evaluations, work(width, images=8).evaluations
    assert eight < one < 8 * eight
    epochs = work(width, images=8, lr=0.1, epochs=2).evaluations
    assert epochs == eight // 2
    assert work(width, images=8, lr=0.1, epochs=2, batch_size=4).evaluations < epochs


def test_on_a_large_network_swift_spends_its_seconds_on_one_search() -> None:
    swift, small, large = Swift(), work(16), work(2**21)
    assert swift.cost(small).rows == len(DISTANCES)
    assert swift.cost(large) == (large.steps(swift.adam_steps, signed=True), 1, 0)
    assert Swift(adam_steps=0).cost(large) == swift.cost(large)  # nothing else is affordable


def test_the_inversion_of_features_stays_within_the_budget_of_every_network() -> None:
    inversion = FeatureInversion()
    assert inversion.cost(work(16)).rows == inversion.starts
    for width in (2**14, 2**18, 2**20, 2**21, 2**23):
        large = work(width)
        cost = inversion.cost(large)
        assert cost.iterations * cost.rows <= large.evaluations
        assert 2 * cost.iterations * cost.rows >= min(large.evaluations, inversion.cost(work(16)).iterations)  # and uses it


def test_all_priors_of_noise_likelihood_together_keep_within_the_budget() -> None:
    attack, small, large = NoiseLikelihood(), work(16), work(2**21)
    assert attack.cost(small).iterations == small.steps(1_500)
    assert attack.cost(large).iterations * len(WEIGHTS) <= large.signed_evaluations
