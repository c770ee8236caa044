"""Real federations: what is audited is what a plain PyTorch client with the same settings sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_loop import difference, trained
from torch import Tensor, nn

import gradveil as gv
from gradveil import cli, models
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.presets import PRESETS
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.core.local_training import freeze
from gradveil.core.randomness import generator, seeded
from gradveil.core.types import Tensors
from gradveil.data import load
from gradveil.storage.run_folder import RunFolder


def audited(case: Case, folder: Path) -> Tensors:
    """The update of the first victim as the audit stored it."""
    run_audit(case, Execution(out=folder, workers=0))
    cell = next(c for c in make_plan(case).of("observe", "none") if not c.attack)
    stored = RunFolder(folder).tensors(cell.key)
    return {name.removeprefix("0/0/update/"): t for name, t in stored.items() if name.startswith("0/0/update/")}


def plain_client(case: Case, module: nn.Module) -> tuple[Tensors, nn.Module]:
    """The same round by a plain loop, with the same orders of images and the same dropped units."""
    spec, training, batch = case.spec, case.training, case.batch(0)
    freeze(module, training.frozen)
    random = generator(spec.seed, "order", 0, 0)
    orders = [torch.arange(len(batch)) if not e else random.permutation(len(batch)) for e in range(training.epochs)]
    x = (batch.x - case.data.mean.view(-1, 1, 1)) / case.data.std.view(-1, 1, 1)
    with seeded(spec.seed, 0, 0, "dropout"):
        after = trained(module, x, batch.y, training, orders, case.loss)
    return difference(module, after, training), after


def cosine_and_ratio(one: Tensors, other: Tensors) -> tuple[float, float]:
    a, b = (torch.cat([t[name].flatten() for name in other]).double() for t in (one, other))
    return float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())


@pytest.mark.parametrize("name", PRESETS)
def test_the_audited_update_is_that_of_a_plain_client(name: str, tmp_path: Path) -> None:
    values = {"preset": name, "victims": 2, "attacks": "linear", "pictures": "shown", "defenses": "none"}
    try:
        case = Case(make_spec(values))
    except UserError as error:
        if "GRADVEIL_DATA" in str(error) or "no folder" in str(error):
            pytest.skip(str(error))
        raise
    sent = audited(case, tmp_path / "run")
    shape, classes = case.data.input_shape, case.data.num_classes
    expected, after = plain_client(case, models.build(case.spec.model, input_shape=shape, num_classes=classes))
    assert cosine_and_ratio(sent, expected) == pytest.approx((1.0, 1.0), abs=1e-4)
    buffers = {n: b for n, b in after.named_buffers() if b.is_floating_point()} if case.training.sends_statistics else {}
    assert set(sent) == {*expected, *buffers}
    for path, value in buffers.items():
        assert torch.allclose(sent[path], value, rtol=1e-3, atol=1e-4), path


class Dropping(nn.Module):
    """A user's residual network with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.build("resnet20:width=4", input_shape=(1, 28, 28), num_classes=16)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.body(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "local", [{}, {"local_epochs": 2, "local_batch_size": 4, "local_optimizer": "adam", "local_lr": 0.001}]
)
def test_a_users_network_is_audited_as_it_trains(local: dict[str, object], tmp_path: Path) -> None:
    with seeded(0):
        module = Dropping()
    values = {"model": module, "batch_size": 8, "victims": 2, "attacks": "linear", "defenses": "none", **local}
    case = Case(make_spec(values))
    sent = audited(case, tmp_path / "run")
    expected, _ = plain_client(case, module)
    assert cosine_and_ratio(sent, expected) == pytest.approx((1.0, 1.0), abs=1e-3)
    # … which is not what it would send in evaluation mode.
    other = audited(Case(make_spec({**values, "mode": "eval"})), tmp_path / "eval")
    assert cosine_and_ratio(other, expected)[0] < 0.9


def test_an_option_replaces_a_setting_of_a_preset() -> None:
    spec = make_spec({"preset": "small-clients", "victims": 3, "local_lr": 0.5})
    assert (spec.victims, spec.local_lr, spec.model, spec.batch_size) == (3, 0.5, "femnist-cnn", 10)
    assert spec.command() == (
        "gradveil audit --model femnist-cnn --victims 3 --batch-size 10 --local-batch-size 5 --local-lr 0.5"
    )


def test_presets_are_listed_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "presets"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in PRESETS)
    assert cli.main(["audit", "--preset", "flower-quikstart"]) == 2
    assert "flower-quickstart" in capsys.readouterr().err


def test_a_preset_in_python_and_in_a_file(tmp_path: Path) -> None:
    report = gv.audit(preset="small-clients", victims=2, defenses="none", attacks="linear", quiet=True)
    assert "mini-batches of 5 with sgd at learning rate 0.1, model in train mode" in report.summary.scope
    file = tmp_path / "audit.yaml"
    file.write_text("preset: small-clients\nvictims: 2\n")
    assert (
        cli.main(["audit", "--config", str(file), "--defense", "none", "--attack", "linear", "--out", str(tmp_path / "run")])
        == 0
    )


def test_scans_have_several_labels_each() -> None:
    from gradveil.data.medical import LABELS, mednist_labels

    try:
        load("mednist")
    except UserError as error:
        pytest.skip(str(error))
    x, y = mednist_labels()
    assert y.shape == (len(x), len(LABELS))
    assert set(y.unique().tolist()) == {0.0, 1.0}
    assert (y.sum(dim=1) == 2).all()
