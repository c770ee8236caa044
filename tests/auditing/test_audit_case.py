"""The ground an audit stands on: who the victims are, and what makes two cases the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from gradveil.attacks import parse as parse_attack
from gradveil.auditing.case import Case, draw_victims
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.core.types import Batch


def make(digits, **values):
    return Case(make_spec({"data": digits, "defenses": "none", "attacks": "ig", **values}))


def test_victims_are_spread_over_classes_and_no_image_is_taken_twice():
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 5)
    picked, _ = draw_victims(labels, 4, 3, generator(0))
    assert picked.shape == (4, 3)
    assert picked.flatten().unique().numel() == 12
    assert all(sorted(labels[batch].tolist()) == [0, 1, 2] for batch in picked)


def test_victims_follow_the_seed_alone():
    labels = torch.arange(30) % 3
    same = [draw_victims(labels, 4, 1, generator(7)) for _ in range(2)]
    assert all(torch.equal(*parts) for parts in zip(*same, strict=True))
    assert not torch.equal(same[0][0], draw_victims(labels, 4, 1, generator(8))[0])


def test_strangers_are_the_next_images_of_the_victims_classes():
    labels = torch.tensor([0] * 300 + [1] * 30 + [2] * 1 + [3] * 50)
    victims, strangers = draw_victims(labels, 3, 1, generator(5))
    classes = labels[victims.flatten()].tolist()
    assert len(set(classes)) == 3
    assert not set(victims.flatten().tolist()) & set(strangers.tolist()) and strangers.unique().numel() == len(strangers)
    counts = {label: int((labels[strangers] == label).sum()) for label in range(4)}
    available = {0: 40, 1: 29, 2: 0, 3: 40}  # 40 of each class as far as there are images
    assert counts == {label: available[label] if label in classes else 0 for label in range(4)}
    _, strangers = draw_victims(labels[:300], 10, 3, generator(5))
    assert len(strangers) == 120  # four for every victim where that is more


def test_within_a_class_chance_alone_says_who_is_victim_and_who_stranger():
    """Each of 10 images is a victim in about 2 of 10 draws, wherever it stands."""
    labels, times = torch.arange(30) % 3, torch.zeros(30)
    for seed in range(400):
        times[draw_victims(labels, 6, 1, generator(seed))[0].flatten()] += 1
    assert times.sum() == 2400
    assert (times - 80).abs().max() < 5 * (400 * 0.2 * 0.8) ** 0.5


def test_victims_strangers_and_distractors_are_three_disjoint_groups(digits):
    case = make(digits, victims=4, batch_size=2)
    groups = [case.data.private.x[case.victims.flatten()], case.data.private.x[case.strangers], case.distractors.x]
    images = torch.cat(groups).flatten(1)
    assert images.unique(dim=0).shape == images.shape
    assert torch.equal(case.tested.x, torch.cat(groups[:2]))
    total = len(case.data.private) + len(case.data.public) + len(case.data.test)
    assert len(images) == total
    assert case.slots.batch.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_copy_of_a_victim_is_no_distractor(shapes):
    first = make(shapes)
    copied = dataclasses.replace(shapes, test=Batch(first.batch(0).x, first.batch(0).y))
    assert len(make(copied).distractors) == len(first.distractors) - len(shapes.test)


def test_without_classes_strangers_come_from_all_images(shapes):
    targets = [Batch(part.x, part.x.flatten(1)[:, :3]) for part in (shapes.private, shapes.public, shapes.test)]
    data = dataclasses.replace(shapes, private=targets[0], public=targets[1], test=targets[2])
    case = make(data, loss="regression", victims=3)
    assert not case.data.has_classes
    assert case.slots.label.tolist() == [0, 0, 0] and set(case.slots.stranger_label.tolist()) == {0}
    assert set(case.distractors.y.tolist()) == {0}


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
