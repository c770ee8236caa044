"""Fishing: one image of a batch makes the gradient before the classifier, and only on the model that the server sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradveil.attacks import parse
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import seeded

with seeded(0):
    # Sigmoids leave no zeros in the signals, by which an honest server tells the images of a batch apart exactly.
    MLP = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Sigmoid(), nn.Linear(64, 10))
GROUND = {"model": MLP, "victims": 3, "batch_size": 16}


def test_one_image_of_a_batch_is_read_exactly_that_an_honest_server_does_not_get(
    observe_victims: Callable, best_psnr: Callable
) -> None:
    seen, truth = observe_victims(**GROUND, tampering="fishing")
    fished = best_psnr(parse("fishing")(seen), truth)
    assert (fished.amax(1) >= 100).sum() >= 2, fished
    assert (fished >= 40).sum(1).max() == 1, "of a batch, the others stay grey"
    honest, same = observe_victims(**GROUND)
    assert best_psnr(parse("linear")(honest), same).max() < 45
    for defense in ("gaussian:std=1", "dpsgd:clip=1,noise=1"):
        noisy, hidden = observe_victims(**GROUND, tampering="fishing", defense=defense)
        assert best_psnr(parse("fishing")(noisy), hidden).max() < 16


def test_a_fished_image_is_rebuilt_through_convolutions(observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(model="lenet", victims=1, batch_size=16, tampering="fishing", seed=1)
    assert best_psnr(parse("fishing")(seen), truth).max() >= 30


def test_without_public_images_the_only_image_of_a_class_sends_its_gradient_alone() -> None:
    model = parse("fishing").tamper(MLP, (1, 28, 28), batch_size=8)
    x, y = torch.rand(8, 1, 28, 28), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])

    def gradient(rows: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x[:rows]), y[:rows], reduction="sum")
        return torch.autograd.grad(loss, [model[1].weight])[0]

    assert gradient(1).norm() > 0
    assert torch.allclose(gradient(8), gradient(1))


@pytest.mark.parametrize(
    ("ground", "reason"),
    [({}, "one row of weights"), ({"tampering": "fishing", "training": LocalTraining(epochs=2, lr=0.1)}, "single gradients")],
)
def test_where_it_does_not_apply_it_says_why(ground: dict[str, object], reason: str, observe_victims: Callable) -> None:
    seen, _ = observe_victims(model=MLP, victims=1, batch_size=4, **ground)
    with pytest.raises(UserError, match=f"attack 'fishing' does not apply: .*{reason}"):
        parse("fishing")(seen)
