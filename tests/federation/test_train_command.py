"""`gradveil train` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradveil.cli.options import with_options
from gradveil.cli.train import command
from gradveil.core.errors import UserError

app = typer.Typer()
app.command()(with_options(command))
SMALL = "--data mnist-5k:limit=600 --clients 3 --rounds 2 --model lenet --lr 0.1"


def run(options: str) -> str:
    result = CliRunner().invoke(app, options.split())
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_it_writes_curves_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    options = f"{SMALL} --defense gaussian:std=0.001 --defended 1 --out {tmp_path / 'run'}"
    text = run(options)
    record = json.loads((tmp_path / "run" / "history.json").read_text())
    for curve in ("acc_test", "acc_train", "acc_sensitive", "loss", "seconds_per_round", "bytes_sent"):
        assert len(record[curve]) == 2
    assert record["events"] == []
    assert record["seconds"] > 0
    assert record["configuration"]["images_per_client"] is None  # all 240 private images
    assert f"{record['acc_test'][-1]:.1%}" in text
    assert run(options) == text
    with pytest.raises(UserError, match="holds a training run with seed=0, not 1"):
        run(f"{options} --seed 1")


def test_quiet_says_nothing_and_the_default_folder_is_the_commands_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(f"{SMALL} --quiet") == ""
    assert run(f"{SMALL} --quiet --defense prune:ratio=0.5") == ""
    assert len(list(Path("runs").glob("train-*/history.json"))) == 2


def test_clients_can_draw_poisson_samples(tmp_path: Path) -> None:
    defense = "--defense dpsgd:noise=0.5 --batch-size 8"
    run(f"{SMALL} {defense} --sampling poisson --out {tmp_path / 'poisson'}")
    run(f"{SMALL} {defense} --out {tmp_path / 'shuffled'}")
    records = [json.loads((tmp_path / name / "history.json").read_text()) for name in ("poisson", "shuffled")]
    assert [record["configuration"]["sampling"] for record in records] == ["poisson", "shuffled"]
    assert records[0]["events"] == [] and records[0]["loss"] != records[1]["loss"]
    for wrong, message in (
        ("--fedsgd", "FedSGD sends one gradient per round"),
        ("--model resnet18", "BatchNorm in training mode"),
        ("--defense soteria", "'soteria' needs images in every batch"),
    ):
        with pytest.raises(UserError, match=message):
            run(f"{SMALL} --sampling poisson {wrong} --out {tmp_path / 'wrong'}")
    assert not (tmp_path / "wrong").exists()


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for wrong in (
        *("--defense pruen", "--partition dirichlet:alpha=no", "--defended 9", "--model lenett", "--rounds 0"),
        "--engine carrier-pigeon",
    ):
        with pytest.raises(UserError):
            run(f"{SMALL} --out {out} {wrong}")
    assert not out.exists()
