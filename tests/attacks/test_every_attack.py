"""What every attack keeps to, for all that are registered: a new one is tested the moment it exists.

Each is tried on several grounds: plain ones, the defense that it counters, the model that it tampers with. On each it
runs and gives pictures, or says in one line why it does not apply; and there is a ground on which it runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_modules
import pytest
import torch
from small_vit import ViT
from torch import nn

from gradveil import models
from gradveil.attacks import parse
from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import Workload
from gradveil.attacks.counters.dcs2 import joint
from gradveil.attacks.matching import fed_images, swift
from gradveil.attacks.registry import registry
from gradveil.attacks.suite import accepted_counters
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Reconstruction, Sighting, observe
from gradveil.core.types import Tensors, Update
from gradveil.data import DataSet
from gradveil.defenses import parse as parse_defense
from gradveil.defenses.base import Chain, Defense, Step
from gradveil.defenses.data.loda import extractors
from gradveil.defenses.registry import registry as defenses

EVERY = registry.names()
FEW = {"steps": 2, "epochs": 1}  # of defenses that optimise or train


def seeded(*layers: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(*(make() for make in layers))


MLP = seeded(nn.Flatten, lambda: nn.Linear(144, 10), nn.ReLU, lambda: nn.Linear(10, 3))
NORM = seeded(lambda: nn.Conv2d(1, 3, 5, stride=2), lambda: nn.BatchNorm2d(3), nn.ReLU, nn.Flatten, lambda: nn.Linear(48, 3))
SMOOTH = seeded(lambda: nn.Conv2d(1, 4, 5), nn.Sigmoid, lambda: nn.AvgPool2d(2), nn.Flatten, lambda: nn.Linear(64, 3))
VIT = odd_modules.build("transformer encoder")
PLAIN: dict[str, dict[str, Any]] = {
    "single": {},
    "linear first": {"model": MLP},
    "batch": {"batch_size": 2},
    "delta": {"training": LocalTraining(epochs=2, lr=0.1)},
    "batch norm": {"model": NORM},
    "transformer": {"model": VIT},
    "random defense": {"defense": "gaussian:std=0.01"},
    "seen twice": {"defense": "gaussian:std=0.01", "updates": 2},
}


SPANS = {"token-span": {"model": ViT()}, "patch-span": {"model": ViT(), "batch_size": 2}}  # where these two apply


def grounds(name: str) -> dict[str, dict[str, Any]]:
    found = dict(PLAIN) | ({"a span": SPANS[name]} if name in SPANS else {})
    for cls in defenses:
        if cls in registry[name].against:
            fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
            defense = cls(**{k: v for k, v in FEW.items() if k in fields}).spec
            found[f"counters {cls.name}"] = {"defense": defense}
            found[f"counters {cls.name} on a batch"] = {"defense": defense, "batch_size": 2}
    if registry[name].tamper is not Attack.tamper:
        found["tampered"] = {"tampering": name, "model": MLP}
    return found


def answers(attack: Attack, seen: list[Observation], seed: int = 0) -> list[Reconstruction] | str:
    """What it gives, or why it does not."""
    try:
        return attack(seen, seed=seed)
    except UserError as error:
        return str(error)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", EVERY)
def test_it_gives_pictures_or_says_why_not(
    name: str, observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "STEPS", 3)
    attack, ran = parse(name), []
    for title, ground in grounds(name).items():
        seen, _ = observe_victims(data=shapes, victims=2, level="upper-bound", **ground)
        kept = [{n: t.clone() for n, t in o.update.tensors.items()} for o in seen]
        found = answers(attack, seen)
        if isinstance(found, str):
            assert f"attack '{name}'" in found, f"{title}: {found}"
            assert "\n" not in found
            assert len(found) > len(f"attack '{name}' does not apply: .") + 10, "no reason"
            continue
        ran.append(title)
        again = answers(attack, seen)
        assert not isinstance(again, str)
        assert len(found) == len(seen)
        for one, other, observation in zip(found, again, seen, strict=True):
            size = observation.knowledge.batch_size
            assert one.images.shape == (size, *shapes.input_shape), title
            assert torch.isfinite(one.images).all(), title
            assert 0 <= float(one.images.min()) <= float(one.images.max()) <= 1
            assert one.labels is not None
            assert one.labels.shape == (size,)
            assert 0 <= int(one.labels.min()) <= int(one.labels.max()) < shapes.num_classes
            assert isinstance(one.score, float)
            assert one.seconds >= 0
            assert torch.equal(one.images, other.images), f"{title}: not by its seed alone"
            assert one.score == other.score or one.failed
        for observation, before in zip(seen, kept, strict=True):
            assert all(torch.equal(t, before[n]) for n, t in observation.update.tensors.items())
    assert ran, "it applies nowhere"


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", [cls.name for cls in registry if cls.against])
def test_a_counter_stays_finite_with_what_it_really_knows(
    name: str, observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "STEPS", 3)
    for title, ground in grounds(name).items():
        if title.startswith("counters"):
            seen, _ = observe_victims(data=shapes, victims=1, level="realistic", **ground)
            found = answers(parse(name), seen)
            assert isinstance(found, str) or [one.failed for one in found] == [None], title


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", EVERY)
def test_it_leaves_the_global_random_stream_alone(name: str, observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=1)
    before = torch.random.get_rng_state()
    answers(parse(name), seen)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", EVERY)
def test_it_can_be_read_and_read_about(name: str) -> None:
    cls = registry[name]
    text = inspect.getdoc(cls)
    assert text
    assert text != inspect.getdoc(Attack)
    assert inspect.getmodule(cls).__doc__  # type: ignore[union-attr]
    attack = cls()
    assert attack.spec == name
    assert parse(attack.spec) == attack
    assert cls.__call__ is Attack.__call__  # sealed: checks, seeds and times are the same for all
    for need in cls.needs:
        assert need in ("labels", "public", "secrets") or need.startswith("secret:")


@pytest.mark.parametrize("name", EVERY)
def test_its_docstring_explains_every_setting_and_has_an_example_that_runs(name: str) -> None:
    text = inspect.getdoc(registry[name]) or ""
    arguments = text.partition("Args:")[2].partition("Example:")[0]
    for field in dataclasses.fields(registry[name]):  # type: ignore[arg-type]
        assert re.search(rf"\b{field.name}\b", arguments), f"'{field.name}' is not explained"
    example = text.partition("Example: ")[2].split()
    assert example[:2] == ["gradveil", "audit"]
    options = dict(itertools.pairwise(example[2:]))
    assert type(parse(options["--attack"])) is registry[name]
    if not options.get("--defense", "mypackage").startswith("mypackage"):
        parse_defense(options["--defense"])
    assert set(options) & {"--model"} == set() or options["--model"].partition(":")[0] in models.MODELS


@pytest.mark.parametrize("name", EVERY)
def test_an_attack_among_the_counters_says_which_defenses_it_is_built_against_and_the_other_way_round(name: str) -> None:
    against = registry[name].against
    assert bool(against) == registry[name].__module__.startswith("gradveil.attacks.counters.")
    assert all(defenses[cls.name] is cls and name in accepted_counters(cls) for cls in against)


def test_what_an_attack_needs_must_be_granted(observe_victims: Callable, shapes: DataSet) -> None:
    class Demanding(Attack):
        """Knows everything."""

        name = "demanding"
        needs = frozenset({"labels", "secret:mixing"})

        def run(self, target: Target) -> Answer:
            return Answer(torch.zeros(target.shape), torch.zeros(target.shape[0]))

    for level, missing in (("realistic", "labels, secret:mixing"), ("paper", "secret:mixing"), ("upper-bound", None)):
        seen, _ = observe_victims(data=shapes, victims=1, level=level, defense="mixup")
        if missing is None:
            assert len(Demanding()(seen)) == 1
        else:
            with pytest.raises(UserError, match=f"needs {missing}, which knowledge '{level}' does not grant"):
                Demanding()(seen)


def test_an_answer_that_is_not_finite_is_recorded_as_failed(observe_victims: Callable, shapes: DataSet) -> None:
    class Broken(Attack):
        """Divides by zero for the second victim."""

        name = "broken"

        def run(self, target: Target) -> Answer:
            x = torch.zeros(target.shape)
            x[1] = float("nan")
            return Answer(x, torch.zeros(target.shape[0]))

    seen, _ = observe_victims(data=shapes, victims=2)
    fine, failed = Broken()(seen)
    assert fine.failed is None
    assert failed.failed
    assert torch.isfinite(failed.images).all()


# -- the size of an update ---------------------------------------------------------------------------------------------

# About 1e-30, 1e30, 1e-20 and 1e20; powers of two, as rounded digits may decide where a search is unstable.
FACTORS = [(2.0**power, t) for t, powers in ((torch.float64, (-100, 100)), (torch.float32, (-67, 67))) for power in powers]
TOGETHER = ("mixup-decode", "instahide-decode")  # take all victims for those of one client


def half_sizes(observation: Observation, scaled: Callable) -> list[Observation]:
    """In half precision, so large that it holds the digits of all entries that matter: 2¹⁰ and 2¹⁴ at most."""
    largest = max(float(t.abs().max()) for s in observation.seen for t in s.update.tensors.values())
    return [scaled(observation, 2.0**power / largest, torch.float16) for power in (10, 14)]


def applicable(name: str, observe_victims: Callable, data: DataSet) -> Observation:
    """One victim in the first setting in which the attack applies; settings of the defense that it counters come first."""
    ordered = sorted(grounds(name).items(), key=lambda item: not item[0].startswith(("counters", "tampered")))
    for level in ("realistic", "upper-bound"):
        for _, ground in ordered:
            (seen,), _ = observe_victims(data=data, victims=1, level=level, **ground)
            if parse(name).why_not(seen) is None and not isinstance(answers(parse(name), [seen]), str):
                return seen
    raise AssertionError("it applies nowhere")


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", EVERY)
def test_an_attack_rebuilds_the_same_from_an_update_of_any_size(
    name: str, observe_victims: Callable, scaled: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extractors, "STEPS", 3)
    one, attack = applicable(name, observe_victims, shapes), parse(name)
    sizes = [one, *(scaled(one, factor, dtype) for factor, dtype in FACTORS)]
    for group in (sizes, half_sizes(one, scaled)):
        found = [attack([o])[0] for o in group] if name in TOGETHER else attack(group, cache=tmp_path)
        assert [r.failed for r in found] == [None] * len(group)
        for other in found[1:]:
            assert_same(other, found[0])


def assert_same(one: Reconstruction, other: Reconstruction) -> None:
    torch.testing.assert_close(one.images, other.images, rtol=0, atol=1e-3)
    assert one.score == pytest.approx(other.score, rel=1e-2, abs=1e-4)
    assert (one.labels is None) == (other.labels is None)
    if one.labels is not None and other.labels is not None:
        torch.testing.assert_close(one.labels, other.labels, rtol=0, atol=1e-3)


# -- tensors that are no parameters ------------------------------------------------------------------------------------

OTHERS = {
    "weight": torch.ones(3, 5),
    "fc.weight.more": torch.full((3, 10), 1e30),
    "num_batches_tracked": torch.tensor(7),
    "fc.bias\n": torch.full((3,), torch.nan),
    "complex": torch.ones(2, 2, dtype=torch.complex64),
    "half": torch.ones(4, dtype=torch.float16),
    "bool": torch.tensor([True]),
    "": torch.zeros(0, 3),
}


class SendsOthers(Defense):
    """Sends tensors that are no parameters, first and last."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        half = len(OTHERS) // 2
        return dict(list(OTHERS.items())[:half]) | tensors | dict(list(OTHERS.items())[half:])


def with_others(o: Observation) -> Observation:
    """As if the defense had sent more: in the update, and in every round that an attack rehearses."""
    parts = o.knowledge.defense.parts if o.knowledge.defense else ()
    defense = Chain([*(p for p in parts if isinstance(p, Defense)), SendsOthers()])
    update = [Update({**OTHERS, **s.update.tensors}, s.update.kind, s.update.examples) for s in o.seen]
    seen = [Sighting(s.state, u, s.group) for s, u in zip(o.seen, update, strict=True)]
    sent = observe(o.task, seen).seen
    return dataclasses.replace(o, seen=sent, knowledge=dataclasses.replace(o.knowledge, defense=defense))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", EVERY)
def test_tensors_that_are_no_parameters_change_no_answer(
    name: str, observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extractors, "STEPS", 3)
    plain, attack = applicable(name, observe_victims, shapes), parse(name)
    more = with_others(plain)
    assert more.update.others.keys() == OTHERS.keys()
    assert list(more.update.tensors) == plain.model.trainable
    one, other = (attack([o], cache=tmp_path)[0] for o in (plain, more))
    assert one.failed is None and other.failed is None
    assert torch.equal(one.images, other.images)
    assert one.score == other.score
    assert one.labels is not None and other.labels is not None and torch.equal(one.labels, other.labels)


def test_an_update_without_a_parameter_or_with_another_shape_is_refused_in_one_line(
    observe_victims: Callable, shapes: DataSet
) -> None:
    (seen,), _ = observe_victims(data=shapes, victims=1)
    first, *rest = seen.model.trainable
    tensors = seen.update.tensors
    for wrong, says in (
        ({n: tensors[n] for n in rest}, f"has no tensor for the parameter '{first}'"),
        ({**tensors, first: torch.zeros(2)}, rf"'{first}' is \(2,\), the model's is \("),
    ):
        with pytest.raises(ValueError, match=says):
            observe(seen.task, [Sighting(seen.state, Update(wrong))])


# -- cost --------------------------------------------------------------------------------------------------------------

FACTOR = 4  # within which an attack's word about its iterations must be right
CLOSED = {"linear": "linear first", "april": "transformer", **dict.fromkeys(SPANS, "a span")}  # and where they apply
LADDERS = ((swift, "LADDER"), (swift, "FINISH"), (swift, "CYCLE"), (fed_images, "LADDER"), (joint, "LADDER"))


@pytest.mark.parametrize("name", EVERY)
def test_it_says_what_it_will_cost(
    name: str, observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches are shortened by the settings that both the search and the attack's word about it go by."""
    monkeypatch.setattr(extractors, "STEPS", 3)
    monkeypatch.setattr(Workload, "steps", lambda _, steps, least=200, signed=False: min(steps, 20))
    for module, ladder in LADDERS:
        monkeypatch.setattr(module, ladder, tuple((weight, 10) for weight, _ in getattr(module, ladder)))
    monkeypatch.setattr(fed_images, "POLISH", (1e-7, 10))
    fields = {f.name for f in dataclasses.fields(registry[name])}  # type: ignore[arg-type]
    attack = registry[name](**{k: 12 for k in ("steps", "look") if k in fields})
    # It is tried where it counters a defense, also on a smooth net that no closed form unrolls.
    counters = [ground for title, ground in grounds(name).items() if title.startswith(("counters", "tampered"))]
    tried = [{**ground, **more} for ground in counters or [PLAIN["seen twice"]] for more in ({}, {"model": SMOOTH})]
    used = []
    closed = [grounds(name)[CLOSED[name]]] if name in CLOSED else []
    for ground in [*tried, *closed]:
        seen, _ = observe_victims(data=shapes, victims=1, level="upper-bound", **ground)
        found = answers(attack, seen)
        if isinstance(found, str):
            continue
        size = seen[0].knowledge.batch_size
        cost = attack.cost(Workload(seen[0].task, "standard", size, public_images=len(shapes.public)))
        assert cost.rows >= 1
        assert found[0].iterations <= FACTOR * cost.iterations, ground
        used.append(found[0].iterations)
    assert used, "it applies nowhere"
    assert cost.iterations <= FACTOR * max(used)
