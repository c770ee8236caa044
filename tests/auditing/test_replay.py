"""Rounds of a real app, audited again: its model, its weights and its local training, with simulated victims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradveil import cli, models
from gradveil.auditing.replay import replayed_rounds
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.core.types import Update
from gradveil.storage.files import write_tensors
from gradveil.storage.updates import save_update
from gradveil.summary import Summary

FACTS = {"lr": 0.05, "local_epochs": 2, "local_batch_size": 4, "local_optimizer": "sgd:momentum=0.9"}


def captured(folder: Path, *rounds: int, examples: int = 8, **facts: object) -> Path:
    """As `gradveil.flower.capture` writes it."""
    for number in rounds:
        module = models.build("lenet", input_shape=(1, 28, 28), num_classes=10, seed=number)
        place = folder / f"round-{number:03d}"
        write_tensors(place / "before.safetensors", module.state_dict())
        for client in (11, 12):
            tensors = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
            save_update(place / f"client-{client}.safetensors", Update(tensors, "delta", examples), **{**FACTS, **facts})
    return folder


def test_a_round_is_read_with_its_weights_and_its_training(tmp_path: Path) -> None:
    rounds = replayed_rounds(captured(tmp_path, 1, 3), {"victims": 2})
    assert list(rounds) == ["round-001", "round-003"]
    spec = make_spec(rounds["round-003"])
    training = spec.local_training
    assert (training.lr, training.epochs, training.batch_size, training.optimizer) == (0.05, 2, 4, "sgd:momentum=0.9")
    assert len(training.steps(spec.batch_size)) == 4  # not the number of epochs
    assert (spec.batch_size, spec.victims, spec.mode) == (8, 2, "train")
    assert spec.weights == str(tmp_path / "round-003" / "before.safetensors")
    assert list(replayed_rounds(tmp_path / "round-001", {})) == ["round-001"]


def test_large_clients_are_simulated_with_fewer_images_and_options_go_first(tmp_path: Path) -> None:
    folder = captured(tmp_path, 1, examples=500)
    assert replayed_rounds(folder, {})["round-001"]["batch_size"] == 16
    assert replayed_rounds(folder, {"batch_size": 2, "local_lr": 0.1})["round-001"] | {"weights": ""} == {
        **{"weights": "", "batch_size": 2, "local_lr": 0.1, "local_epochs": 2, "local_batch_size": 4},
        "local_optimizer": "sgd:momentum=0.9",
    }


def test_what_is_no_capture_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no captured round"):
        replayed_rounds(tmp_path, {})
    folder = captured(tmp_path / "a", 1, lr=None)
    with pytest.raises(UserError, match="does not say the learning rate; give --local-lr"):
        replayed_rounds(folder, {})
    folder = captured(tmp_path / "b", 1, local_epochs="many")
    with pytest.raises(UserError, match="local_epochs"):
        replayed_rounds(folder, {})
    folder = captured(tmp_path / "c", 1)
    (folder / "round-001" / "client-12.safetensors").unlink()
    other = {name: torch.zeros(1) for name in "ab"}
    save_update(folder / "round-001" / "client-13.safetensors", Update(other, "delta", 8), **{**FACTS, "local_epochs": 5})
    with pytest.raises(UserError, match=r"clients trained with different local_epochs \('?2'?, '?5'?\); give --local-epochs"):
        replayed_rounds(folder, {})
    assert replayed_rounds(folder, {"local_epochs": 2})


def test_the_command_audits_every_round_with_the_weights_of_the_app(tmp_path: Path) -> None:
    folder = captured(tmp_path / "capture", 1, 2, examples=2)
    words = ["--model", "lenet", "--defense", "none", "--attack", "ig:steps=2", "--victims", "2", "--quiet"]
    assert cli.main(["audit", "--replay", str(folder), *words, "--out", str(tmp_path / "runs")]) == 0
    first, second = (Summary.read(tmp_path / "runs" / name) for name in ("round-001", "round-002"))
    assert first.case.weights == str(folder / "round-001" / "before.safetensors")
    assert first.case.local_steps == 2 and "momentum=0.9 at learning rate 0.05" in first.scope
    assert first.defenses[0].attacks[0].psnr != second.defenses[0].attacks[0].psnr
    assert cli.main(["audit", "--replay", str(folder), *words, "--junit", str(tmp_path / "x.xml")]) == 2
