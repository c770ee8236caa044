"""The ground an audit stands on: who the victims are, and what makes two cases the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil.attacks import parse as parse_attack
from gradveil.auditing.case import Case, pick_victims
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.core.randomness import generator


def make(digits, **values):
    return Case(make_spec({"data": digits, "defenses": "none", "attacks": "ig", **values}))


def test_victims_are_spread_over_classes_and_no_image_is_taken_twice():
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 5)
    picked = pick_victims(labels, 4, 3, generator(0))
    assert picked.shape == (4, 3)
    assert picked.flatten().unique().numel() == 12
    assert all(sorted(labels[batch].tolist()) == [0, 1, 2] for batch in picked)


def test_victims_follow_the_seed_alone():
    labels = torch.arange(30) % 3
    same = [pick_victims(labels, 4, 1, generator(7)) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], pick_victims(labels, 4, 1, generator(8)))


def test_too_many_victims_are_refused(digits):
    with pytest.raises(UserError, match="500 victims with 2 images each need 1000 private images"):
        make(digits, victims=500, batch_size=2)


def test_the_identity_follows_what_results_rest_on_and_nothing_else(digits):
    first = make(digits)
    assert make(digits, pictures="none", defenses=["clip"]).id == first.id
    for change in ({"seed": 1}, {"victims": 3}, {"knowledge": "paper"}, {"model": "lenet4"}, {"budget": "standard"}):
        assert make(digits, **change).id != first.id, change


def test_objects_are_known_by_their_content(digits):
    def net(scale: float) -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
        module[1].weight.data.mul_(scale)
        return module

    with torch.random.fork_rng():
        same, other = [make(digits, model=net(s)) for s in (1.0, 1.0)], make(digits, model=net(2.0))
    assert same[0].id == same[1].id != other.id
    assert same[0].names["model"].startswith("Sequential@")


def test_a_users_module_stays_as_it_is(digits):
    module = nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).train()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    case = make(digits, model=module)
    case.task(case.defenses["none"], parse_attack("audit_methods:Crooked"))
    assert module.training
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_a_trained_state_is_put_in_but_what_a_malicious_server_changed_stays(digits):
    case = make(digits)
    none = case.defenses["none"]
    _, untrained = case.task(none)
    trained = {n: torch.full_like(t, 0.25) for n, t in untrained.items()}
    _, state = case.task(none, trained=trained)
    assert all(torch.equal(state[n], trained[n]) for n in trained)
    _, tampered = case.task(none, parse_attack("audit_methods:Crooked"), trained)
    last = list(tampered)[-1]
    assert torch.equal(tampered[last], trained[last] * 2)
    assert all(torch.equal(tampered[n], trained[n]) for n in trained if n != last)
