"""One seed, one result; a run that was cut short goes on as if it had not been; folders are not mixed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gradveil.core.errors import UserError
from gradveil.core.settings import build
from gradveil.data import DataSet
from gradveil.federation import FederationPlan, History, train
from gradveil.storage.files import LOCK

SMALL: dict[str, Any] = {"clients": 3, "images_per_client": 12, "batch_size": 5, "lr": 0.1}
TIMES = {"seconds", "seconds_per_round", "cpu_seconds_per_round", "seconds_prepare"}


def same(one: History, other: History) -> None:
    assert all(torch.equal(one.state[n], other.state[n]) for n in one.state)
    a, b = one.to_json(), other.to_json()
    assert {k: v for k, v in a.items() if k not in TIMES} == {k: v for k, v in b.items() if k not in TIMES}


@pytest.mark.parametrize("defense", ["none", "gaussian:std=0.01", "mixup"])
def test_one_seed_one_result(plain: nn.Module, data: DataSet, defense: str) -> None:
    how = {"rounds": 3, "sampled": 2, "partition": "dirichlet", **SMALL}
    one = train(plain, data, defense, FederationPlan(seed=3, **how))
    same(one, train(plain, data, defense, FederationPlan(seed=3, **how)))
    other = train(plain, data, defense, FederationPlan(seed=4, **how))
    assert any(not torch.equal(one.state[n], other.state[n]) for n in one.state)


class Killed(Exception):
    """In place of a signal."""


def killed_after(rounds: int) -> Any:
    def progress(text: str, done: int, total: int) -> None:
        if text.startswith("training") and done == rounds:
            raise Killed

    return progress


@pytest.mark.parametrize("fedsgd", [False, True])
@pytest.mark.parametrize("network", ["plain", "normed", "dropping"])
def test_a_resumed_run_equals_an_undisturbed_one(
    request: pytest.FixtureRequest, data: DataSet, tmp_path: Path, network: str, fedsgd: bool
) -> None:
    module = request.getfixturevalue(network)
    how = {"rounds": 5, "fedsgd": fedsgd, "schedule": "exponential:gamma=0.9", **SMALL}
    undisturbed = train(module, data, "gaussian:std=0.001", FederationPlan(**how))
    for stop in (2, 4):
        with pytest.raises(Killed):
            train(module, data, "gaussian:std=0.001", FederationPlan(**how), folder=tmp_path, progress=killed_after(stop))
        assert len(json.loads((tmp_path / "history.json").read_text())["acc_test"]) == stop
    resumed = train(module, data, "gaussian:std=0.001", FederationPlan(**how), folder=tmp_path)
    same(undisturbed, resumed)
    stored = load_file(tmp_path / "state.safetensors")
    assert all(torch.equal(stored[n], t) for n, t in undisturbed.state.items())
    began = (tmp_path / "state.safetensors").stat().st_mtime_ns
    same(undisturbed, train(module, data, "gaussian:std=0.001", FederationPlan(**how), folder=tmp_path))
    assert (tmp_path / "state.safetensors").stat().st_mtime_ns == began  # nothing was left to do
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK, "history.json", "state.safetensors"]


@pytest.mark.parametrize("lost", [True, False])
def test_a_kill_between_the_state_and_the_curves_loses_nothing(
    plain: nn.Module, data: DataSet, tmp_path: Path, lost: bool
) -> None:
    train(plain, data, "none", FederationPlan(rounds=2, **SMALL), folder=tmp_path)
    curves = tmp_path / "history.json"
    expected = curves.read_bytes()
    curves.unlink() if lost else curves.write_text("{}")
    train(plain, data, "none", FederationPlan(rounds=2, **SMALL), folder=tmp_path)
    assert curves.read_bytes() == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.2}, "lr=0.1, not 0.2"),
        ({"rounds": 3}, "rounds=2, not 3"),
        ({"seed": 1}, "seed=0, not 1"),
        ({"defended": 1}, "defended=3, not 1"),
        ({"defense": "prune"}, "defense=none, not prune"),
    ],
)
def test_another_run_does_not_go_on_here(
    plain: nn.Module, data: DataSet, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    how = {"rounds": 2, **SMALL}
    train(plain, data, "none", FederationPlan(**how), folder=tmp_path)
    before = (tmp_path / "history.json").read_bytes()
    with pytest.raises(UserError, match=words):
        defense = change.pop("defense", "none")
        train(plain, data, defense, FederationPlan(**{**how, **change}), folder=tmp_path)
    assert (tmp_path / "history.json").read_bytes() == before


def test_another_model_or_other_images_do_not_go_on_here(
    plain: nn.Module, dropping: nn.Module, make_data: Any, tmp_path: Path
) -> None:
    train(plain, make_data(48), "none", FederationPlan(rounds=1, **SMALL), folder=tmp_path)
    with pytest.raises(UserError, match="another model"):
        train(dropping, make_data(48), "none", FederationPlan(rounds=1, **SMALL), folder=tmp_path)
    changed = make_data(48)
    changed.private.x[0] = 0
    with pytest.raises(UserError, match="other images"):
        train(plain, changed, "none", FederationPlan(rounds=1, **SMALL), folder=tmp_path)


def test_folders_that_cannot_be_used(plain: nn.Module, data: DataSet, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write there"):
        train(plain, data, "none", FederationPlan(rounds=1, **SMALL), folder=tmp_path / "file")
    (tmp_path / "history.json").write_text("{}")
    with pytest.raises(UserError, match="choose another folder"):
        train(plain, data, "none", FederationPlan(rounds=1, **SMALL), folder=tmp_path)
    (tmp_path / "state.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="not the state of a training run"):
        train(plain, data, "none", FederationPlan(rounds=1, **SMALL), folder=tmp_path)


def test_history_survives_json_even_after_a_disaster(plain: nn.Module, data: DataSet) -> None:
    history = train(plain, data, "none", FederationPlan(rounds=3, **{**SMALL, "lr": 1e18}))
    text = json.dumps(history.to_json(), allow_nan=False)
    back = History.from_json(json.loads(text), history.state)
    same(history, back)
    assert back.seconds == pytest.approx(history.seconds)


def test_rounds_to_counts_from_one_and_skips_what_was_not_measured() -> None:
    history = History(acc_test=[None, 0.4, None, 0.6, 0.5])
    assert [history.rounds_to(t) for t in (0.4, 0.5, 0.6, 0.7)] == [2, 4, 4, None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": "infline"}, "'inline' or 'flower'"),
        ({"rounds": 0}, "rounds=0"),
        ({"lr": float("nan")}, "lr"),
        ({"defended": 4}, "how many of the 3 clients"),
        ({"defended": "most"}, "how many of the 3 clients"),
        ({"sampled": 4}, "more clients than there are"),
        ({"images_per_client": 100}, "need 300 private images"),
        ({"partition": "random"}, "no partition 'random'"),
        ({"fedsgd": True, "local_epochs": 2}, "no local training"),
    ],
)
def test_bad_input_is_told_in_one_line(plain: nn.Module, data: DataSet, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        train(plain, data, "none", build(FederationPlan, {"rounds": 1, **SMALL, **change}, of="train"))
    assert "\n" not in str(error.value)
