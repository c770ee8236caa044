"""Bring your own: models, images of any kind, and losses whose targets are no classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradveil as gv
from gradveil.cli import main
from gradveil.core.errors import UserError
from gradveil.core.losses import find_loss, loss_name, takes_classes
from gradveil.storage.updates import save_update
from gradveil.summary import AttackRow

QUICK: dict[str, Any] = {"defenses": "none", "victims": 2, "workers": 0, "quiet": True, "seed": 3}


def images(n: int = 40, shape: tuple[int, ...] = (1, 8, 8)) -> Tensor:
    return torch.rand((n, *shape), generator=torch.Generator().manual_seed(1))


def mlp(pixels: int, outputs: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 12), nn.Sigmoid(), nn.Linear(12, outputs))


def tags(n: int = 40) -> Tensor:
    return (torch.rand((n, 5), generator=torch.Generator().manual_seed(2)) > 0.5).float()


def ages(n: int = 40) -> Tensor:
    return 90 * torch.rand((n, 1), generator=torch.Generator().manual_seed(2))


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not linear in the targets."""
    return F.huber_loss(outputs, targets, delta=200.0)


def row(report: gv.Report, attack: str, defense: str = "none") -> AttackRow:
    found = next(d for d in report.summary.defenses if d.spec == defense)
    return next(a for a in found.attacks if a.spec.partition(":")[0] == attack)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [("multi-label", tags), ("regression", ages), (nn.BCEWithLogitsLoss, tags), (huber, ages), (nn.MSELoss(), ages)],
)
def test_images_are_rebuilt_under_losses_without_classes(loss: Any, targets: Callable[[], Tensor]) -> None:
    y = targets()
    report = gv.audit(data=(images(), y), model=mlp(64, y.shape[1]), loss=loss, attacks=["linear", "swift", "ggl"], **QUICK)
    for attack in ("linear", "swift"):
        found = row(report, attack)
        assert found.status == "ok", found
        assert found.psnr.min > 30, (attack, found.psnr)  # realistic: the targets were worked out
        assert found.label_accuracy is None
    refused = row(report, "ggl")
    assert refused.status == "not applicable"
    assert "built for class labels" in refused.error


def test_targets_of_a_batch_are_told_on_average_and_exact_ones_lead_closer() -> None:
    how: dict[str, Any] = {"data": (images(), tags()), "model": mlp(64, 5), "loss": "multi-label", "batch_size": 2}
    told = row(gv.audit(attacks=["ig:steps=200"], **how, **QUICK), "ig")
    granted = row(gv.audit(attacks=["ig:steps=200"], knowledge="paper", **how, **QUICK), "ig")
    assert told.status == granted.status == "ok"
    assert granted.psnr.mean > told.psnr.mean


def test_a_model_is_trained_and_attacked_under_its_own_loss() -> None:
    how: dict[str, Any] = {"data": (images(), ages() / 90), "model": mlp(64, 1), "loss": "regression"}
    for trained in ({"trained_rounds": 1}, {"trained_epochs": 1}):
        report = gv.audit(attacks=["linear"], **how, **trained, **{**QUICK, "defenses": ["dcs2", "clip"]})
        assert row(report, "linear").psnr.min > 30
        assert row(report, "linear", "clip").status == "ok"
        refused = row(report, "linear", "dcs2")
        assert refused.status == "not applicable"
        assert "are not classes" in refused.error


@pytest.mark.parametrize("shape", [(8, 6, 10), (2, 17, 5), (4, 9, 9), (1, 40, 33)])
def test_images_of_any_size_and_channel_count(shape: tuple[int, int, int], tmp_path: Path) -> None:
    y = torch.arange(40) % 4
    pixels = shape[0] * shape[1] * shape[2]
    report = gv.audit(data=(images(shape=shape), y), model=mlp(pixels, 4), attacks=["linear", "swift"], **QUICK)
    assert report.summary.case.input_shape == shape
    assert row(report, "linear").psnr.min > 30
    assert (report.save(tmp_path / "run") / "report.html").stat().st_size > 1000


OWN = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 7 * 9, 12), nn.Sigmoid(), nn.Linear(12, 3))

def scans():
    random = torch.Generator().manual_seed(0)
    return torch.rand(60, 2, 7, 9, generator=random), (torch.rand(60, 3, generator=random) > 0.5).float()

def weighted():
    return nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]))

def pairwise(outputs, targets):
    return ((outputs - targets) ** 2).mean()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


def test_the_command_line_takes_factories_for_model_data_and_loss(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--data", f"{own}:scans", "--model", f"{own}:net", "--victims", "2", "--workers", "0", "--quiet"]
    for loss in (f"{own}:weighted", f"{own}:pairwise", "torch.nn:MSELoss"):
        out = f"runs/{loss.partition(':')[2]}"
        options = ["--loss", loss, "--defense", "clip", "--attack", "linear", "--out", out]
        assert main(["audit", *common, *options, "--fail-if", "worst.psnr.min < 30"]) == 0
        text = (Path(out) / "audit.yaml").read_text()
        assert f"loss: {loss}" in text
    assert main(["audit", *common, "--out", "runs/none"]) == 2
    assert "or a loss that takes rows of numbers" in capsys.readouterr().err
    assert main(["audit", *common, "--loss", "multilabel", "--out", "runs/none"]) == 2
    assert "did you mean 'multi-label'?" in capsys.readouterr().err
    assert main(["audit", *common, "--loss", "torch.nn:Linear", "--out", "runs/none"]) == 2
    assert main(["audit", *common, "--loss", "regression", "--utility", "--out", "runs/none"]) == 2
    assert "the utility is an accuracy" in capsys.readouterr().err
    assert not Path("runs/none").exists()


def test_training_takes_a_loss_too(own: str) -> None:
    common = ["--data", f"{own}:scans", "--model", f"{own}:net", "--clients", "2", "--rounds", "2", "--quiet"]
    assert main(["train", *common, "--loss", f"{own}:weighted", "--out", "runs/trained"]) == 0
    import json

    record = json.loads(Path("runs/trained/history.json").read_text())
    assert record["acc_test"] == [None, None]
    assert record["loss"][1] < record["loss"][0]


def test_a_captured_update_under_its_own_loss(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    net, x, y = mlp(64, 5), images(1), tags(1)
    F.binary_cross_entropy_with_logits(net(x), y).backward()
    update = gv.Update({n: p.grad for n, p in net.named_parameters() if p.grad is not None}, "gradient", 1)
    save_update("update.safetensors", update, input_shape=[1, 8, 8], num_classes=5)
    found = gv.attack_update("update.safetensors", net, loss="multi-label", attacks=["swift", "dlg"])
    answer = found.by_attack["swift"]
    assert float((answer.images - x).abs().max()) < 0.01
    assert answer.labels is not None
    assert torch.allclose(answer.labels, y, atol=1e-3)
    assert "class labels" in found.not_applicable["dlg"]
    with pytest.raises(UserError, match="no targets explain|cannot be told"):
        gv.attack_update("update.safetensors", net, loss=lambda o, t: 0 * (o - t).square().mean(), attacks=["swift"])


def test_what_a_loss_is() -> None:
    assert find_loss("torch.nn.functional:mse_loss") is F.mse_loss
    assert isinstance(find_loss("torch.nn:CrossEntropyLoss"), nn.CrossEntropyLoss)
    assert takes_classes(find_loss("cross-entropy"), 10)
    assert takes_classes(nn.CrossEntropyLoss(label_smoothing=0.1), 10)
    assert not any(takes_classes(find_loss(name), outputs) for name in ("multi-label", "regression") for outputs in (1, 2, 3))
    assert loss_name(nn.HuberLoss(delta=2.0)) == loss_name(nn.HuberLoss(delta=2.0))
    assert loss_name(huber) != loss_name(find_loss("regression"))
    with pytest.raises(UserError, match="is a Tensor; give a function"):
        find_loss("torch:pi") if isinstance(torch.pi, Tensor) else find_loss(torch.ones(1))  # type: ignore[arg-type]


def test_a_loss_on_class_numbers_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    report = gv.audit(
        data=(images(), torch.arange(40) % 4), model=mlp(64, 4), loss=smooth, attacks=["linear", "swift"], **QUICK
    )
    assert row(report, "swift").status == "ok"
    assert row(report, "swift").label_accuracy == 1
