"""What a defense costs: on the audited model, with the audited local training, seed by seed beside the undefended one."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from gradveil.auditing.case import Case
from gradveil.auditing.cells import compute
from gradveil.auditing.cost import CURVES, CostTrainings, PairedLoss, _with_validation, last_mean, utility_plan, utility_row
from gradveil.auditing.limits import NO_LIMITS
from gradveil.auditing.plan import make_plan
from gradveil.auditing.spec import AuditSpec, make_spec
from gradveil.auditing.utility import UtilityTraining, in_words, sends_as_audited
from gradveil.auditing.work import Work
from gradveil.cli import audit as audit_command
from gradveil.cli.options import parser_of
from gradveil.core.errors import UserError
from gradveil.core.local_training import optimizer
from gradveil.core.types import Batch
from gradveil.data import DataSet
from gradveil.federation import FederationPlan, History, train
from gradveil.federation.rounds import Federation
from gradveil.storage.run_folder import Outcome, StoredCell


def bright_halves(count: int, seed: int) -> Batch:
    """Images of two classes: the left or the right half is brighter."""
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    x = torch.rand(count, 1, 6, 6, generator=random) * 0.6
    x[y == 0, :, :, :3] += 0.15
    x[y == 1, :, :, 3:] += 0.15
    return Batch(x, y)


@pytest.fixture
def data() -> DataSet:
    parts = [bright_halves(count, seed) for seed, count in enumerate((120, 20, 60))]
    return DataSet("halves", *parts, num_classes=2, class_names=("a", "b"), mean=torch.tensor([0.4]), std=torch.tensor([0.2]))


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


class Nothing:
    """A store without cells."""

    cache: Path | None = None

    def outcome(self, key: str) -> StoredCell:
        raise KeyError(key)

    def tensors(self, key: str) -> dict[str, torch.Tensor]:
        raise KeyError(key)


def case_of(data: DataSet, model: object = None, **settings: object) -> Case:
    settings = {"victims": 2, "defenses": "clip:norm=0.01", "attacks": "ig:steps=1", "seed": 3, **settings}
    return Case(make_spec({"data": data, "model": net() if model is None else model, **settings}))


def cell_of(case: Case, defense: str = "none") -> StoredCell:
    cell = make_plan(case).of("utility", defense)[0]
    outcome, _ = compute(Work(cell, case, Nothing(), lambda done, total: None, NO_LIMITS))
    return StoredCell.of(cell, outcome)


def same_curves(outcome: Outcome, history: History, number: str = "") -> None:
    for name in ("acc_test", "acc_train"):
        assert outcome.history[f"{name}{number}"] == tuple(getattr(history, name)), name


# -- the training is that of the audit -----------------------------------------------------------------------------------


def test_weight_differences_are_trained_by_clients_like_the_audited_ones(data: DataSet) -> None:
    local = {"local_epochs": 2, "local_batch_size": 2, "local_lr": 0.1, "local_accumulate": 2}
    local["local_optimizer"] = "sgd:momentum=0.5,nesterov=true,weight_decay=0.001"
    case = case_of(data, batch_size=4, utility={"rounds": 3, "seeds": 1, "lr_grid": 1}, **local)
    plan = FederationPlan(
        rounds=3, clients=30, images_per_client=4, sampled=10, local_epochs=2, batch_size=2, accumulate=2, lr=0.1,
        optimizer="sgd:momentum=0.5,nesterov=true,weight_decay=0.001", mode="train", seed=3,
    )  # fmt: skip
    audited = dataclasses.replace(case.training, sends_statistics=True)
    used = utility_plan(case).local_training(0)
    assert optimizer(used.optimizer) == optimizer(audited.optimizer)
    assert dataclasses.replace(used, optimizer="sgd") == dataclasses.replace(audited, optimizer="sgd")
    same_curves(cell_of(case), train(case.server, data, "none", plan))
    same_curves(cell_of(case, "clip:norm=0.01"), train(case.server, data, "clip:norm=0.01", plan))


def test_single_gradients_are_trained_with_fedsgd_on_batches_of_the_audited_size(data: DataSet) -> None:
    case = case_of(
        data, batch_size=3, mode="eval", utility={"rounds": 4, "seeds": 1, "lr_grid": "1", "schedule": "step:every=2"}
    )
    plan = FederationPlan(
        rounds=4, clients=10, images_per_client=12, fedsgd=True, batch_size=3, mode="eval", schedule="step:every=2", seed=3
    )
    assert utility_plan(case) == plan
    assert in_words(plan) == "FedSGD with batches of 3 images, model in eval mode, 10 clients with 12 images each, 4 rounds"
    same_curves(cell_of(case), train(case.server, data, "none", plan))


def test_frozen_parameters_stay_and_the_weights_of_the_user_are_the_first_ones(data: DataSet, tmp_path: Path) -> None:
    module, file = net(), tmp_path / "weights.pt"
    torch.nn.init.zeros_(module[4].weight)
    torch.save(module.state_dict(), file)
    settings = {"frozen": ("1.*",), "weights": str(file), "utility": {"rounds": 2, "seeds": 2, "lr_grid": "1"}}
    case = case_of(data, net(), **settings)
    assert utility_plan(case).frozen == ("1.*",)
    for number in (0, 1):  # both begin with these weights
        plan = dataclasses.replace(utility_plan(case), seed=3 + number)
        same_curves(cell_of(case), train(module, data, "none", plan), f"@{number}" if number else "")


def test_fewer_images_than_asked_for_and_stated_numbers(data: DataSet) -> None:
    plan = UtilityTraining(clients=4, images=90, batch_size=8, lr=0.3, momentum=0.0).plan(AuditSpec().local_training, 1, 120, 0)
    assert (plan.clients, plan.images_per_client, plan.sampled, plan.batch_size) == (4, 30, None, 8)
    assert (plan.lr, plan.momentum, plan.fedsgd, plan.rounds, plan.evaluate_every) == (0.3, 0.0, True, 20, 1)
    many = UtilityTraining().plan(AuditSpec().local_training, 1, 10**6, 0)
    assert (many.rounds, many.evaluate_every, many.clients, many.images_per_client) == (300, 15, 10, 200)
    adam = make_spec({"local_optimizer": "adamw", "local_lr": 0.001, "batch_size": 8}).local_training
    plan = UtilityTraining(weight_decay=0.5).plan(adam, 8, 10**6, 0)
    assert plan.local_training(0).optimizer == "adamw:beta1=0.9,beta2=0.999,eps=1e-08,weight_decay=0.5"
    assert (plan.clients, plan.images_per_client, plan.sampled, plan.rounds) == (250, 8, 10, 125)
    averaged = UtilityTraining(fedsgd=False).plan(AuditSpec().local_training, 1, 10**6, 0)
    assert averaged == FederationPlan(clients=10, images_per_client=200)


@pytest.mark.parametrize(
    ("audited", "changes"),
    [
        ({}, {"batch_size": 2, "mode": "eval", "fedsgd": False}),
        ({"batch_size": 8, "local_lr": 0.1, "local_batch_size": 4, "local_optimizer": "sgd:momentum=0.9"}, {
            "batch_size": 2, "mode": "eval", "fedsgd": True, "lr": 0.2, "images": 9, "local_epochs": 2, "momentum": 0.0,
            "weight_decay": 0.1, "optimizer": "adam", "accumulate": 2, "schedule": "step",
        }),
    ],
)  # fmt: skip
def test_it_is_told_whether_clients_send_what_was_audited(audited: dict[str, object], changes: dict[str, object]) -> None:
    spec = make_spec(audited)
    rest = {"rounds": 7, "clients": 5, "partition": "classes", "defended": 2, "seeds": 1}

    def as_audited(**stated: object) -> bool:
        plan = make_spec({**audited, "utility": stated}).utility.plan(spec.local_training, spec.batch_size, 1000, 0)
        return sends_as_audited(plan, spec.local_training, spec.batch_size)

    assert as_audited() and as_audited(**rest)
    for name, value in changes.items():
        assert not as_audited(**{name: value}), name


@pytest.mark.parametrize(
    ("utility", "message"),
    [
        ({"local_epochs": 2}, "FedSGD sends one gradient per round"),
        ({"schedule": "cosine"}, "schedule"),
        ({"lr_grid": "1,-4"}, "lr_grid"),
        ({"lr_grid": ""}, "lr_grid"),
        ({"optimizer": "lion", "fedsgd": False}, "optimizer"),
        ({"clients": 3, "defended": 4}, "defended"),
        ({"lr": 0}, "lr"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_once(utility: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_spec({"utility": utility})


def test_every_field_of_a_federated_training_can_be_set() -> None:
    of_plan = {field.name for field in dataclasses.fields(FederationPlan)}
    # The seed and frozen parameters are the audit's, the server's learning rate is what is chosen.
    elsewhere = {"seed", "frozen", "server_lr", "images_per_client", "engine", "deadline", "cosine_every"}
    assert set(UtilityTraining.model_fields) == (of_plan - elsewhere) | {"images", "model", "seeds", "lr_grid"}


def test_the_printed_command_gives_the_same_spec() -> None:
    utility = {
        "model": "cnn", "seeds": 5, "lr_grid": [0.5, 1, 2], "rounds": 7, "clients": 4, "images": 30, "sampled": 2,
        "partition": "dirichlet:alpha=0.5", "fedsgd": False, "local_epochs": 2, "batch_size": 16, "accumulate": 2,
        "optimizer": "sgd:nesterov=true,momentum=0.9", "lr": 0.3, "momentum": 0.5, "weight_decay": 0.01, "mode": "eval",
        "schedule": "exponential:gamma=0.9", "evaluate_every": 2, "defended": 2, "sampling": "poisson",
    }  # fmt: skip
    assert set(utility) == set(UtilityTraining.model_fields)
    spec = make_spec({"utility": utility, "defenses": ["dpsgd:noise=0.5"], "victims": 3, "max_loss": 5.0})
    printed = spec.command()
    assert printed is not None
    context = parser_of(audit_command.command).make_context("audit", shlex.split(printed)[2:])
    read: list[AuditSpec] = []

    def record(case: Case, *_: object) -> None:
        read.append(case.spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_command, "_show_plan", record)
        context.params["plan"] = True
        context.command.invoke(context)
    assert read == [spec]


# -- a learning rate of its own --------------------------------------------------------------------------------------------


def test_the_learning_rate_is_chosen_without_the_test_images(data: DataSet) -> None:
    settings = {"utility": {"rounds": 6, "seeds": 1, "lr_grid": "0.01,1,4"}, "batch_size": 2}
    before = cell_of(case_of(data, **settings))
    poisoned = dataclasses.replace(data, test=Batch(torch.rand_like(data.test.x), 1 - data.test.y))
    after = cell_of(case_of(poisoned, **settings))
    tried = [name for name in before.history if name.startswith("acc_validation@")]
    assert {"acc_validation@0.01", "acc_validation@1", "acc_validation@4"} <= set(tried)
    assert {name: after.history[name] for name in tried} == {name: before.history[name] for name in tried}
    assert before.server_lr == after.server_lr
    assert before.history["acc_test"] != after.history["acc_test"]
    best = max(last_mean(before.history[name]) or 0 for name in tried)
    error = (best * (1 - best) / 24) ** 0.5  # of 24 validation images
    assert (last_mean(before.history[f"acc_validation@{before.server_lr:g}"]) or 0) >= best - error


def test_validation_images_are_the_clients_own_and_are_not_trained_on(data: DataSet) -> None:
    for plan in (FederationPlan(clients=5, images_per_client=20), FederationPlan(clients=50, images_per_client=2, sampled=5)):
        split, smaller = _with_validation(data, plan)
        held = data.private[:100].x.flatten(1)
        parts = torch.cat([split.private.x, split.test.x]).flatten(1)
        assert len(split.test) == 20 and torch.equal(parts[parts[:, 0].argsort()], held[held[:, 0].argsort()])
        assert smaller.clients * (smaller.images_per_client or 0) == 80
        assert len(Federation(net(), split, "none", smaller).images) == 80
    assert smaller.images_per_client == 2 and smaller.sampled == 5  # clients as small as before
    with pytest.raises(UserError, match="too few images"):
        _with_validation(data, FederationPlan(clients=1, images_per_client=1))


def test_a_defense_that_shrinks_updates_gets_a_larger_learning_rate(data: DataSet) -> None:
    dp = "dpsgd:clip=0.01,noise=0.001"
    settings = {"utility": {"rounds": 10, "seeds": 1, "lr_grid": "1,64", "lr": 0.1}, "batch_size": 4, "defenses": dp}
    case = case_of(data, **settings)
    none, private = cell_of(case), cell_of(case, dp)
    assert none.server_lr == 1.0 and private.server_lr is not None and private.server_lr >= 64.0
    fixed = train(case.server, data, dp, utility_plan(case))
    own = train(case.server, data, dp, dataclasses.replace(utility_plan(case), server_lr=private.server_lr))
    same_curves(private, own)
    assert (last_mean(tuple(own.acc_test)) or 0) > (last_mean(tuple(fixed.acc_test)) or 1) + 0.1
    row = utility_row(case, private, none)
    assert row is not None and (row.lr, row.server_lr, row.seeds, row.rounds) == (0.1, private.server_lr, 1, 10)
    assert row.tried[:3] == (1.0, 64.0, 256.0)


def test_rates_beyond_the_grid_are_tried_until_the_model_learns_and_a_larger_one_is_no_better(data: DataSet) -> None:
    def rates(lr: float, grid: str) -> tuple[float | None, list[float]]:
        cell = cell_of(case_of(data, batch_size=4, utility={"rounds": 20, "seeds": 1, "lr_grid": grid, "lr": lr}))
        return cell.server_lr, [float(name.split("@")[1]) for name in cell.history if name.startswith("acc_validation")]

    slow, tried = rates(1e-3, "1,4")  # neither teaches anything in so few rounds
    assert tried[:3] == [1.0, 4.0, 16.0] and len(tried) <= 5 and slow is not None and slow >= 16
    assert sorted(rates(0.1, "0.25,1,64")[1]) == [0.25, 1.0, 64.0], "a model that learns best within the grid needs no more"
    assert rates(1e-3, "1") == (1.0, []), "a single rate is what the user wants"


class Trainings(CostTrainings):
    """Trainings whose accuracies are known beforehand, by the learning rate: in the choice, and after it."""

    in_choice: ClassVar[dict[float, float]]
    after: ClassVar[dict[float, float]]

    def _train(self, turn: int, plan: FederationPlan, data: DataSet) -> History:
        accuracy = (self.in_choice if plan.rounds == self._short.rounds else self.after)[plan.server_lr]
        curve = [accuracy] * plan.rounds
        return SimpleNamespace(**dict.fromkeys(CURVES, curve), events=[])  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("in_choice", "after", "rate"),
    [
        ({1.0: 0.83, 0.25: 0.60, 4.0: 0.50}, {1.0: 0.85}, 1.0),
        ({1.0: 0.83, 0.25: 0.82, 4.0: 0.50}, {1.0: 0.85}, 1.0),  # the best, even by little
        ({1.0: 0.95, 0.25: 0.80, 4.0: 0.50}, {1.0: 0.50, 0.25: 0.85}, 0.25),  # it failed after all
        ({1.0: 0.95, 0.25: 0.52, 4.0: 0.50}, {1.0: 0.50}, 1.0),  # nothing smaller teaches anything
        ({1.0: 0.60, 0.25: 0.80, 4.0: 0.50, 1 / 16: 0.90, 1 / 64: 0.70}, {1 / 16: 0.85}, 1 / 16),  # noise wants small steps
        ({1.0: 0.51, 0.25: 0.52, 4.0: 0.50, 16.0: 0.50, 1 / 16: 0.80, 1 / 64: 0.55}, {1 / 16: 0.85}, 1 / 16),
    ],
)
def test_a_rate_at_which_trainings_fail_is_given_up_for_a_smaller_one(
    data: DataSet, in_choice: dict[float, float], after: dict[float, float], rate: float
) -> None:
    case = case_of(data, utility={"rounds": 8, "seeds": 2}, batch_size=4)
    work = Work(make_plan(case).of("utility", "none")[0], case, Nothing(), lambda done, total: None, NO_LIMITS)
    assert case.spec.utility is not None
    trainings = Trainings(work, case.spec.utility)
    trainings.in_choice, trainings.after = in_choice, after  # type: ignore[misc]
    outcome = trainings.run()
    assert outcome.server_lr == rate and outcome.history["acc_test"][-1] == after[rate]
    assert outcome.history["acc_validation@1"][-1] == in_choice[1.0]


def test_the_server_learning_rate_of_fedsgd_is_a_factor_on_the_learning_rate(data: DataSet) -> None:
    plan = FederationPlan(rounds=3, clients=4, images_per_client=20, fedsgd=True, batch_size=5, lr=0.2, weight_decay=0.01)
    one = train(net(), data, "none", plan)
    two = train(net(), data, "none", dataclasses.replace(plan, lr=0.05, server_lr=4.0))
    for name, tensor in one.state.items():
        torch.testing.assert_close(two.state[name], tensor)


# -- paired seeds ----------------------------------------------------------------------------------------------------------


def test_trainings_of_one_seed_are_alike_in_all_but_the_defense(data: DataSet) -> None:
    idle = "clip:norm=1e9"  # changes nothing
    utility = {"rounds": 3, "seeds": 3, "lr_grid": "1", "partition": "dirichlet:alpha=0.5"}
    case = case_of(data, batch_size=4, defenses=idle, utility=utility)
    none, clipped = cell_of(case), cell_of(case, idle)
    names = {f"{curve}{number}" for curve in ("acc_test", "acc_train", "acc_sensitive") for number in ("", "@1", "@2")}
    assert {name: none.history[name] for name in names} == {name: clipped.history[name] for name in names}
    assert len({none.history[f"acc_train{number}"] for number in ("", "@1", "@2")}) == 3
    row = utility_row(case, clipped, none)
    assert row is not None and (row.pdm, row.std, row.low, row.high, row.seeds) == (0.0, 0.0, 0.0, 0.0, 3)


def test_a_named_model_begins_with_other_weights_for_each_seed(data: DataSet) -> None:
    utility = {"rounds": 1, "seeds": 2, "lr_grid": "1", "lr": 1e-9}  # nothing is learnt
    histories = cell_of(case_of(data, "smlp", utility=utility)).history
    assert histories["acc_train"] != histories["acc_train@1"]
    histories = cell_of(case_of(data, net(), utility=utility)).history
    assert histories["acc_train"] == histories["acc_train@1"]  # the user's own weights


def stored(*curves: tuple[float, ...], **others: tuple[float, ...]) -> StoredCell:
    history = {f"acc_test@{i}" if i else "acc_test": curve for i, curve in enumerate(curves)}
    names = {"key": "", "kind": "utility", "defense": "", "attack": "", "tensors_sha256": None, "server_lr": 1.0}
    return StoredCell(history={**history, **others}, **names)


def test_the_loss_is_that_of_the_last_rounds_with_students_interval_of_pairs(data: DataSet) -> None:
    case = case_of(data, utility={"seeds": 3, "rounds": 5})
    clean = stored((0.0, 0.1, 0.9, 0.8, 0.7), (0.0, 0.0, 0.6, 0.6, 0.6), (0.0, 0.0, 0.9, 0.9, 0.9))
    defended = stored((1.0, 1.0, 0.7, 0.7, 0.7), (1.0, 1.0, 0.5, 0.5, 0.5), (1.0, 1.0, 0.6, 0.6, 0.6))
    row = utility_row(case, defended, clean)
    assert row is not None and row.acc_test == pytest.approx(0.6) and row.pdm == pytest.approx(100 * (1 - 0.6 / (2.3 / 3)))
    lost = 100 * np.array([0.1, 0.1, 0.3]) / (2.3 / 3)
    interval = stats.ttest_1samp(lost, 0.0).confidence_interval(0.95)
    assert (row.low, row.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert row.std == pytest.approx(lost.std(ddof=1))
    assert PairedLoss.of([0.5], [0.6]) is None and PairedLoss.of([0.5, 0.4], [0.6]) is None


def test_a_round_that_other_work_slowed_down_does_not_count_as_cost(data: DataSet) -> None:
    case = case_of(data, utility={"seeds": 1, "rounds": 3})
    clean = stored((0.9, 0.9, 0.9), seconds_per_round=(1.0, 1.0, 1.0))
    defended = stored((0.9, 0.9, 0.9), seconds_per_round=(2.0, 90.0, 2.0))
    row = utility_row(case, defended, clean)
    assert row is not None and row.overhead == 2.0 and row.seconds_per_round == 2.0
    clean = stored((0.9, 0.9, 0.9), seconds_per_round=(1.0, 1.0, 1.0), cpu_seconds_per_round=(1.0, 1.0, 1.0))
    defended = stored((0.9, 0.9, 0.9), seconds_per_round=(9.0, 9.0, 9.0), cpu_seconds_per_round=(3.0, 3.0, 3.0))
    row = utility_row(case, defended, clean)
    assert row is not None and row.overhead == 3.0 and row.seconds_per_round == 9.0


# -- without the defended clients ------------------------------------------------------------------------------------------


def test_the_control_without_the_defended_clients_trains_on_the_others_alone(data: DataSet) -> None:
    utility = {"rounds": 8, "clients": 2, "images": 60, "batch_size": 60, "defended": 1, "seeds": 1, "lr_grid": "1", "lr": 0.02}
    case = case_of(data, mode="eval", utility=utility)
    none, clipped = cell_of(case), cell_of(case, "clip:norm=0.01")
    others = Federation(net(), data, "none", utility_plan(case)).shares[1]
    alone = dataclasses.replace(utility_plan(case), clients=1, defended="all")
    wanted = train(case.server, dataclasses.replace(data, private=data.private[others]), "none", alone).acc_test
    assert none.history["acc_absent"] == tuple(wanted) != none.history["acc_test"]
    assert "acc_absent" not in clipped.history
    row = utility_row(case, clipped, none)
    assert row is not None and row.acc_absent == last_mean(tuple(wanted))


def test_with_all_clients_defended_there_is_no_such_control(data: DataSet) -> None:
    case = case_of(data, utility={"rounds": 1, "seeds": 1, "lr_grid": "1"})
    none = cell_of(case)
    row = utility_row(case, none, none)
    assert "acc_absent" not in none.history and row is not None and row.acc_absent is None


def test_another_model_is_named(data: DataSet) -> None:
    case = case_of(data, frozen=("1.*",), utility={"rounds": 1, "seeds": 1, "lr_grid": "1", "model": "smlp"})
    none = cell_of(case)
    row = utility_row(case, none, none)
    assert row is not None and row.model == "smlp" and not row.audited_model and row.audited_updates
    own = case_of(data, utility={"rounds": 1, "seeds": 1, "lr_grid": "1"})
    row = utility_row(own, none, none)
    assert row is not None and row.model == own.names["model"] and row.audited_model
