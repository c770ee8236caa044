"""`--scale paper` is the paper: trainings, attacks, victims and defenses against what papers and their code state.

[P] is the paper, [C] its public code. Every training, attack and attacked network of the recipes at scale paper must be in
these tables, so nothing is reduced there without a word.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gradveil import attacks, defenses
from gradveil.attacks.base import Workload
from gradveil.attacks.counters.loda import LodaStationarity
from gradveil.attacks.matching.engine import MatchingAttack
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.core.gradients import ModelFunction
from gradveil.core.task import Task
from gradveil.defenses.batch.refiner.defense import Refiner
from gradveil.defenses.data.loda import resnet
from gradveil.defenses.data.loda.defense import Loda
from gradveil.defenses.gradient.dcs2 import DCS2, PRESETS
from gradveil.federation import central_plan
from gradveil.models import build
from gradveil.recipes.plan import _facts
from gradveil.recipes.recipe import ATTACK_METRICS, Scaled, all_names, load, trainings

SGD = {"optimizer": "sgd", "momentum": 0.9, "local_epochs": 1, "mode": "train"}
FLOWER = {**SGD, "clients": 10, "batch_size": 64, "fedsgd": False, "defended": 1}  # DCS2 [P] Experiments, [C] fl/
DEVICES = {"optimizer": "sgd", "clients": 10, "images": 5000, "batch_size": 128, "lr": 0.01, "fedsgd": True, "momentum": 0}
CENTRAL = {"clients": 1, "fedsgd": True, "mode": "train"}
NESTEROV = "sgd:momentum=0.9,nesterov=true,weight_decay=0.0005"


def epochs(count: int, images: int, batch: int) -> int:
    return count * -(-images // batch)


# Where a paper and its code say nothing.
UNSTATED = {"local_epochs": 1, "mode": "train", "schedule": "constant", "weight_decay": 0, "momentum": 0, "seeds": 5}

TRAININGS: dict[str, dict[str, object]] = {
    # DCS2 [C] scripts of fl/: images per client, rounds, rate and its decay, weight decay
    "dcs2 mnist": {**FLOWER, "model": "lenet", "images": 200, "rounds": 200, "lr": 0.01, "schedule": "exponential:gamma=0.99"},
    "dcs2 cifar10": {
        **FLOWER, "model": "convnet:width=32", "images": 2000, "rounds": 50, "lr": 0.01, "weight_decay": 0.001,
        "schedule": "exponential:gamma=0.99,restart=30,drop=0.1",
    },
    "dcs2 celeba": {
        **FLOWER, "model": "convnet:width=32", "images": 500, "rounds": 100, "lr": 0.001, "schedule": "exponential:gamma=0.99",
    },
    "dcs2 tinyimagenet": {
        **FLOWER, "model": "resnet18:stem=imagenet", "images": 2000, "rounds": 50, "lr": 0.01, "schedule": "constant",
    },
    "dcs2 stress": {**FLOWER, "model": "cnn", "images": 200, "rounds": 15, "lr": 0.05},  # ours
    # LODA [C]: ResNet18, SGD 0.05, batch 128, 200 epochs, ×0.1 at 100 and 150
    "loda cifar10": {
        **SGD, **CENTRAL, "model": "resnet18", "images": 49_500, "rounds": epochs(200, 49_500, 128), "lr": 0.05,
        "batch_size": 128, "weight_decay": 5e-4,
        "schedule": f"milestones:at={epochs(100, 49_500, 128)}/{epochs(150, 49_500, 128)}",
    },
    "loda svhn": {
        **SGD, **CENTRAL, "model": "resnet18", "images": 50_000, "rounds": epochs(200, 50_000, 128), "lr": 0.05,
        "batch_size": 128, "weight_decay": 5e-4,
        "schedule": f"milestones:at={epochs(100, 50_000, 128)}/{epochs(150, 50_000, 128)}",
    },
    # Refiner [P] V, training setting: 10 devices, 128 images per round and device, SGD of the server at 0.01
    "refiner mnist": {**DEVICES, "model": "lenet", "rounds": 1000},  # the paper states no network
    "refiner cifar10": {**DEVICES, "model": "convnet:width=64", "rounds": 200},
    # ATS [P] 5.1, 5.2 (200 epochs), [C] benchmark/: nesterov, 0.1, 5e-4, batch 128, ×0.1 at 3/8, 5/8, 7/8
    **{
        f"ats {data} {net}": {
            **CENTRAL, "model": model, "images": images, "rounds": epochs(200, images, 128), "batch_size": 128, "lr": 0.1,
            "optimizer": NESTEROV,
            "schedule": f"milestones:at={'/'.join(str(epochs(e, images, 128)) for e in (75, 125, 175))}",
        }
        for data, images in (("cifar100", 50_000), ("fashion", 60_000))
        for net, model in (("resnet20", "resnet20-4"), ("convnet", "convnet:width=64"))
    },
    # PRECODE [P] 4: Adam 0.001, batch 64, 300 epochs, three seeds
    **{
        f"precode {data} {model}": {
            **CENTRAL, "model": model, "images": images, "rounds": epochs(300, images, 64), "batch_size": 64,
            "optimizer": "adam", "lr": 0.001, "seeds": 3,
        }
        for data, images, models in (
            ("cifar", 50_000, ("smlp", "dmlp", "lenet")),
            ("cifar100", 50_000, ("dmlp", "lenet")),
            ("mednist", 47_163, ("dmlp", "lenet")),
        )
        for model in models
    },
}  # fmt: skip

# What is trained on. The pixels are those of the attacked network, the private part holds what the clients share.
TRAINED_ON = {
    "dcs2 mnist": {"mnist"},
    "dcs2 stress": {"mnist"},
    "dcs2 cifar10": {"cifar10:private=20000"},
    "dcs2 celeba": {"celeba", "celeba:public=cifar10"},  # Table 6: start points of CIFAR-10
    "dcs2 tinyimagenet": {"tinyimagenet:size=224"},  # [P] Datasets and Models
    "loda cifar10": {"cifar10:private=49500,public=cifar100"},  # [C], starts and extractor [P] 5.1
    "loda svhn": {"svhn:private=50000"},
    "refiner mnist": {"mnist:private=50000"},
    "refiner cifar10": {"cifar10:private=50000"},
    **{f"ats cifar100 {net}": {"cifar100:private=50000"} for net in ("resnet20", "convnet")},
    **{f"ats fashion {net}": {"fashion-mnist:private=60000,pad=2"} for net in ("resnet20", "convnet")},  # 32 of 36 pixels
    **{f"precode cifar {net}": {"cifar10:private=50000"} for net in ("smlp", "dmlp", "lenet")},
    **{f"precode cifar100 {net}": {"cifar100:private=50000"} for net in ("dmlp", "lenet")},
    **{f"precode mednist {net}": {"mednist:private=47163"} for net in ("dmlp", "lenet")},
}

# Iterations, weight of total variation, rate, signed, boxed, and whether PRECODE's noise is drawn anew.
ATTACKS = {
    "ig:paper=loda": (5_000, 1e-4, 0.1, True, True, False),  # LODA [P] 5.1 (TV), [C]
    "ig:paper=loda,tv=0.01": (5_000, 1e-2, 0.1, True, True, False),  # LODA [P] 5.1, SVHN
    "ig:paper=dcs2": (10_000, 1e-4, 0.1, False, False, False),  # DCS2 [C] dlg/
    "ig:paper=refiner": (4_000, 1e-4, 0.01, True, True, False),  # Refiner [P] Table I
    "ig:paper=ats": (4_800, 1e-4, 0.1, True, True, False),  # ATS [C] benchmark/
    "ig:paper=precode": (7_000, 1e-6, 0.01, True, True, True),  # PRECODE [P] 4
    "cpl:optimizer=adam,steps=7000,restarts=1": (7_000, 1e-6, 0.01, True, True, True),  # PRECODE [P] 5.4
}
# Attacks that state their numbers in their names, or are ours where a paper's is stronger or not public.
OTHERS = {
    "dcs2-joint",  # ours
    "ggl:steps=10000",  # DCS2 [C]
    "dcs2-average-start:steps=10000",  # DCS2 [P] Table 4
    "imprint:bins=10",  # DCS2 [C]
    "ggl:steps=4000,lr=0.01",  # Refiner [P] Table I
    "gradinversion:steps=4000,lr=0.01",  # Refiner [P] Table I
    "idlg:steps=300",  # Refiner [P] Table I
    "adam-cosine", "adam-l1", "adam-l2", "lbfgs-cosine", "lbfgs-l2", "sgd-cosine",  # ATS [P] 5.1, [C]
    "mixup-decode", "instahide-decode", "prune-mask",  # LODA [P] 3.2, [C]; mixing known, by closed forms
    *(f"loda-stationarity:edges=ignore,steps={n},prior=none" for n in (50, 100, 200, 400)),  # LODA [P] 5.1, by L-BFGS
    *(f"loda-stationarity:edges=ignore,steps=100,weight={w},prior=none" for w in ("0", "0.05", "0.25", "0.5", "1")),
    "loda-stationarity:edges=ignore,steps=100,weight=0.03333,prior=none",  # c 1, of LODA2's 30
    *(f"ig:paper=loda,tv={tv}" for tv in ("1e-5", "1e-4", "1e-3", "1e-2", "0.1")),  # LODA [P] 5.1, the grid
}  # fmt: skip

# Attacked network, victims and batch size, by paper and data.
VICTIMS = {
    ("loda", "cifar10"): ({"resnet18"}, {(10, 1), (50, 1)}),  # [C] one image per class; 50 mixtures, [P] 5.1
    ("loda", "svhn"): ({"resnet18"}, {(10, 1), (50, 1)}),
    ("dcs2", "mnist"): ({"lenet"}, {(64, 1)}),  # [C] n_data 64, batch 1
    ("dcs2", "cifar10"): ({"convnet:width=32"}, {(64, 1)}),
    ("dcs2", "celeba"): ({"convnet:width=32"}, {(64, 1)}),
    ("dcs2", "tinyimagenet"): ({"resnet18:stem=imagenet"}, {(64, 1)}),
    ("refiner", "mnist"): ({"lenet"}, {(50, 1)}),  # the paper states neither the network nor how many images
    ("refiner", "cifar10"): ({"convnet:width=64"}, {(50, 1)}),
    ("ats", "cifar100"): ({"resnet20-4", "convnet:width=64"}, {(100, 1)}),  # [P] 5.1: validation images, batch 1
    ("ats", "fashion-mnist"): ({"resnet20-4", "convnet:width=64"}, {(100, 1)}),
    ("precode", "cifar10"): ({"smlp", "dmlp", "lenet"}, {(128, 1), (16, 8), (8, 16)}),  # [P] 4, 5.5
    ("precode", "cifar100"): ({"dmlp", "lenet"}, {(128, 1)}),
    ("precode", "mednist"): ({"dmlp", "lenet"}, {(128, 1)}),
}
# What no scale has here, and the recipes whose page has to say so; of faces, what stands for them where they are not.
NOT_AT_HAND = {
    "dcs2/table2": ("pretrained ResNet18", "stand for CelebA"),
    "dcs2/table3": ("pretrained ResNet18",),
    "dcs2/table6": ("stand for CelebA",),
    "loda/table3": ("SVHN-extra",),
    "loda/table4": ("SVHN-extra",),
    "ats/figure3": ("without policy",),  # training images are scored as they are
    **{f"precode/table{number}": ("one of the paper's three seeds",) for number in (1, 2, 3, 4)},
}


@cache
def at_paper_scale(name: str) -> Scaled:
    return load(name).at("paper")


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_is_the_published_one(name: str) -> None:
    stated = trainings()[name]["paper"]
    assert isinstance(stated, dict)
    # Of a stated optimizer these are its own settings; how often is evaluated says nothing of the training.
    free = {"evaluate_every"} | ({"momentum", "weight_decay"} if ":" in str(stated["optimizer"]) else set())
    published = {**UNSTATED, **TRAININGS[name]}
    assert {k: v for k, v in stated.items() if k not in free} == {k: v for k, v in published.items() if k not in free}


def test_every_training_is_a_published_one() -> None:
    assert set(trainings()) == set(TRAININGS)
    for recipe in all_names():
        for audit in load(recipe).audits.values():
            if audit.get("utility"):
                named = [tree["paper"] for tree in trainings().values()]
                assert audit["utility"]["paper"] in named, recipe  # type: ignore[index, call-overload]


@pytest.mark.parametrize("name", all_names())
def test_a_training_has_all_the_images_that_it_states(name: str) -> None:
    """A plan takes fewer where the private part of the recipe's data is smaller."""
    for audit, spec in at_paper_scale(name).specs.items():
        if training := spec.utility:
            plan = training.plan(spec.local_training, spec.batch_size, _facts(str(spec.data), "paper").private, spec.seed)
            assert (plan.clients, plan.images_per_client) == (training.clients, training.images), audit
            stated = load(name).audits[audit]["utility"]
            kinds = [kind for kind, tree in trainings().items() if tree["paper"] == stated["paper"]]  # type: ignore[index, call-overload]
            assert any(str(spec.data) in TRAINED_ON[kind] for kind in kinds), audit


@pytest.mark.parametrize("text", ATTACKS)
def test_an_attack_is_the_published_one(text: str) -> None:
    module = build("lenet", input_shape=(1, 28, 28), num_classes=10)
    attack = attacks.parse(text)
    assert isinstance(attack, MatchingAttack)
    task = Task(ModelFunction(module), (1, 28, 28), 10, torch.zeros(1), torch.ones(1))
    match = attack.match(Workload(task, "standard"))
    (tv,) = [prior.weight for prior in match.priors if isinstance(prior, TV)]
    assert isinstance(match.optimizer, Adam) and match.decay and match.restarts == 1
    how = (match.steps, tv, match.optimizer.lr, match.optimizer.signed, match.box, match.resample)
    assert how == ATTACKS[text]


@pytest.mark.parametrize("name", all_names())
def test_attacks_networks_and_victims_are_the_published_ones(name: str) -> None:
    paper, scaled = name.partition("/")[0], at_paper_scale(name)
    for cell in scaled.wanted():
        if cell.measure or cell.figure not in ATTACK_METRICS:
            continue
        assert cell.attack in ATTACKS or cell.attack in OTHERS, cell.attack
        spec = scaled.specs[cell.audit]
        models, batches = VICTIMS[paper, str(spec.data).partition(":")[0]]
        assert spec.model in models and (spec.victims, spec.batch_size) in batches
        assert spec.mode == "eval"  # inversefed and all that follow it
        assert spec.held_out is (paper == "ats") and spec.local_training.kind == "gradient"


def test_the_adaptive_attack_on_loda_takes_the_published_weight() -> None:
    """LODA [P] 5.1: c 1, whatever c the defense has; the attack's weight is a share of it. The grid has 0, 1, 5, 10, 20."""
    weights: dict[str, set[float]] = {}
    for name in all_names():
        for cell in at_paper_scale(name).wanted():
            attack = attacks.parse(cell.attack) if cell.attack else None
            if isinstance(attack, LodaStationarity):
                (part,) = [part for part in defenses.parse(cell.defense).parts if isinstance(part, Loda)]
                weights.setdefault(name, set()).add(round(attack.weight * part.c, 3))
    assert weights.pop("loda/grids") == {0, 1, 5, 10, 20}
    assert weights == {key: {1} for key in ("loda/table2", "loda/table4", "loda/figure2")}


def test_attacked_networks_are_trained_as_published() -> None:
    ats, precode = at_paper_scale("ats/table1").specs["c_res"], at_paper_scale("precode/figure7").specs["lenet 8 50"]
    plan = central_plan(ats.trained_by, ats.trained_epochs, 0)
    assert (plan.epochs, plan.lr, plan.batch_size, plan.milestones) == (200, 0.1, 128, (75, 125, 175))
    assert "nesterov=True" in plan.optimizer and "weight_decay=0.0005" in plan.optimizer
    plan = central_plan(precode.trained_by, precode.trained_epochs, 0)
    assert (plan.epochs, plan.lr, plan.batch_size, plan.optimizer) == (50, 0.001, 64, "adam")


def test_defenses_are_the_published_ones() -> None:
    """Crafting of DCS2 [C], Refiner [P] V and LODA [P] 5.1; noise and pruning at every gradient [P] all."""
    seen = set()
    for name in all_names():
        for cell in at_paper_scale(name).wanted():
            for part in defenses.parse(cell.defense).parts:
                seen.add(type(part).__name__)
                if isinstance(part, DCS2):
                    assert (part.steps, part.lr, part.enough, part.divide, part.margin) == (1000, 0.1, 1, True, 0.5)
                    assert part.lambda_x is None and part.lambda_z is None  # those of the preset
                if isinstance(part, Refiner):
                    assert part.steps == 100 or name == "refiner/table3"
                    assert part.beta == 1 or name == "refiner/table2"
                    assert (part.tau, part.epochs) == (0.95, 20)
                if isinstance(part, Loda):
                    assert (part.steps, part.lr, part.fall, part.relative, part.extractor) == (
                        500,
                        0.1,
                        False,
                        False,
                        "resnet18",
                    )
                    assert part.c == {"loda1": 20, "loda2": 30, "loda3": 1}[part.variant] or name in (
                        "loda/table5",
                        "loda/table6",
                    )
    assert {"DCS2", "Refiner", "Loda", "ATS", "Precode", "MixUp", "InstaHide", "Soteria", "Prune", "Gaussian"} <= seen
    assert PRESETS["mnist"] == (0.01, 0.01, 300) and PRESETS["tinyimagenet"] == (0.001, 0.01, 400)  # DCS2 [C]
    assert (resnet.EPOCHS, resnet.BATCH, resnet.RATE, resnet.DECAY) == (200, 128, 0.1, 5e-4)  # LODA [C]


@pytest.mark.parametrize(("name", "words"), NOT_AT_HAND.items())
def test_what_cannot_be_had_is_named(name: str, words: tuple[str, ...]) -> None:
    reduced = " ".join(load(name).reduced.split())
    assert all(word in reduced for word in words)


def test_no_recipe_lacks_that_word() -> None:
    """Where faces, pretrained networks or SVHN's extra part are asked for, and whose accuracies cannot be run at all."""
    for name in all_names():
        for spec in at_paper_scale(name).specs.values():
            data = str(spec.data)
            asked = data.startswith(("celeba", "svhn")) or (data.startswith("tinyimagenet") and "resnet18" in str(spec.model))
            assert not asked or name in NOT_AT_HAND
