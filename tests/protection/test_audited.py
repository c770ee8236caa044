"""An exported protection: it acts as it was audited, and in other units not at all."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.protection.audited import Audited, units_of
from gradveil.protection.flower import protect_arrays

if TYPE_CHECKING:
    from conftest import AuditedClient

TRAINING = gv.LocalTraining(epochs=2, batch_size=4, lr=0.01)
LOCAL = {"local_epochs": 2, "local_batch_size": 4, "local_lr": 0.01, "batch_size": 8}
NOISE = "gaussian:std=0.0002"


def arrays(client: AuditedClient, victim: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    before = {name: t.numpy() for name, t in client.model().state_dict().items()}
    return before, {name: t.numpy() for name, t in client.trained(victim).items()}


def change(before: dict[str, Any], plain: dict[str, Any], sent: dict[str, Any]) -> float:
    """The length of what the defense changed, as a share of the plain update's."""
    names = [n for n in before if before[n].dtype.kind == "f" and "running" not in n]
    moved, changed = (
        np.sqrt(sum(((a[n].astype(float) - b[n]) ** 2).sum() for n in names)) for a, b in ((plain, before), (sent, plain))
    )
    return float(changed / moved)


# -- the same amount as in the audit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("defense", ["clip:norm=0.05", NOISE])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_update_of_a_plain_loop_changes_as_in_the_audit(local: AuditedClient, defense: str, victim: int) -> None:
    before, after = arrays(local, victim)
    sent = protect_arrays(before, after, local.export(defense), training=TRAINING, images=8)
    audited = local.changes(defense)[victim]
    assert audited is not None and audited.noise_ratio is not None and 0.2 < audited.noise_ratio < 5
    assert change(before, after, sent) == pytest.approx(audited.noise_ratio, rel=0.01)


def test_a_shield_changes_gradients_as_in_the_audit(single: AuditedClient) -> None:
    batch = single.case.batch(0)
    exported, gradients = single.export("clip:norm=0.05"), []
    for protection in (exported, "none"):
        # Mean and std come with the protection.
        task = {} if protection is exported else {"mean": exported.task.mean, "std": exported.task.std, "num_classes": 4}
        shield = gv.protect(single.model(), protection, data=(batch.x, batch.y), **task)  # type: ignore[arg-type]
        shield.model.zero_grad()
        shield.backward(batch.x, batch.y)
        gradients.append(torch.cat([p.grad.flatten() for p in shield.model.parameters() if p.grad is not None]))
    audited = single.changes("clip:norm=0.05")[0]
    ratio = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    assert audited is not None and ratio == pytest.approx(audited.noise_ratio, rel=1e-3)
    assert float(gradients[1].norm()) == pytest.approx(audited.norm, rel=1e-3)


# -- other units -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "images", "says"),
    [
        (gv.LocalTraining(epochs=2, batch_size=4, lr=0.1), 8, "learning rate 0.1, not 0.01"),
        (gv.LocalTraining(epochs=3, batch_size=4, lr=0.01), 8, "6 local steps, not 4"),
        (TRAINING, 16, "8 local steps, not 4"),
        (gv.LocalTraining(epochs=4, lr=0.01), 5, "5 images, not 8 or more"),
        (gv.LocalTraining(), 8, "it sends gradients, not weight differences"),
        (gv.LocalTraining(epochs=2, batch_size=4, lr=0.01, optimizer="adam"), 8, "optimizer adam, not sgd"),
        (gv.LocalTraining(epochs=2, batch_size=4, lr=0.01, mode="eval"), 8, "model in eval mode, not train"),
        (None, 8, "the learning rate, number of local epochs and batch size of this client cannot be known here"),
        (TRAINING, None, "state images="),
    ],
)
def test_other_units_are_refused_in_one_line(
    local: AuditedClient, training: gv.LocalTraining | None, images: int | None, says: str
) -> None:
    before, after = arrays(local)
    stated: Any = {k: v for k, v in {"training": training, "images": images}.items() if v is not None}
    with pytest.raises(UserError) as error:
        protect_arrays(before, after, local.export(NOISE), **stated)
    assert says in str(error.value) and "othing is sent" in str(error.value) and "\n" not in str(error.value)
    sent = protect_arrays(before, after, local.export(NOISE), beyond_audit=True, **stated)
    assert change(before, after, sent) > 0.1


def test_steps_count_and_not_how_they_come_about(local: AuditedClient) -> None:
    before, after = arrays(local)
    for training, images in ((gv.LocalTraining(epochs=4, lr=0.01), 9), (gv.LocalTraining(batch_size=2, lr=0.01), 8)):
        assert protect_arrays(before, after, local.export(NOISE), training=training, images=images)


def test_steps_are_counted_as_local_training_makes_them() -> None:
    for epochs, size, accumulate, images in itertools.product((1, 3), (None, 2, 5, 9), (1, 2, 4), (1, 4, 5, 7)):
        training = gv.LocalTraining(epochs=epochs, batch_size=size, accumulate=accumulate, lr=0.1)
        steps = training.steps(images)
        assert units_of(training, images).steps == len(steps)
        assert training.number_of_mini_batches(images) == sum(map(len, steps))
    assert units_of(gv.LocalTraining(), 7).steps == 1
    assert units_of(gv.LocalTraining(epochs=10**9, batch_size=1, lr=0.1), 10**9).steps == 10**18


def test_a_shield_warns_once_of_batches_smaller_than_audited(single: AuditedClient, caplog: pytest.LogCaptureFixture) -> None:
    batch = single.case.batch(0)
    shield = gv.protect(single.model(), single.export(NOISE), data=(batch.x, batch.y))
    caplog.clear()
    shield.backward(batch.x, batch.y)
    assert not caplog.messages
    for _ in range(2):
        shield.backward(batch.x[:3], batch.y[:3])
    assert caplog.messages == ["a batch of 3 images; the audit was with 8, and more of an image is in a smaller one"]


def test_a_shield_does_not_act_on_weight_differences(local: AuditedClient) -> None:
    data = (local.case.batch(0).x, local.case.batch(0).y)
    with pytest.raises(UserError, match="a shield acts on the gradient of a batch, the audit was on weight differences"):
        gv.protect(local.model(), local.export(NOISE), data=data, training=TRAINING)
    mixed = local.export("mixup")  # acts on batches alone
    assert gv.protect(local.model(), mixed, data=data, training=TRAINING).defense.spec == "mixup"
    with pytest.raises(UserError, match="learning rate 0.2, not 0.01"):
        gv.protect(local.model(), mixed, data=data, training=gv.LocalTraining(epochs=2, batch_size=4, lr=0.2))
    with pytest.raises(UserError, match="cannot be known here; state training="):
        gv.protect(local.model(), mixed, data=data)


def test_another_task_is_refused(single: AuditedClient, local: AuditedClient) -> None:
    x, y = single.case.batch(0).x, single.case.batch(0).y
    exported = single.export(NOISE)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ((x, y), {"mean": [0.9]}, "another mean or std"),
        ((x, y), {"std": [1.0, 1.0]}, "another mean or std"),
        ((x, y), {"num_classes": 7}, "7 classes"),
    ]
    for data, options, says in wrong:
        with pytest.raises(UserError, match=says):
            gv.protect(single.model(), exported, data=data, **options)
    with pytest.raises(UserError, match="model in eval mode, not train"):
        gv.protect(single.model().eval(), exported, data=(x, y))
    smaller = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 4))
    with pytest.raises(UserError, match="2 trained tensors, not the 8 of Sequential"):
        gv.protect(smaller, exported, data=(x, y))
    assert gv.protect(smaller, exported, data=(x, y), beyond_audit=True)
    before, after = arrays(local)
    del after["6.bias"]
    with pytest.raises(UserError, match="7 trained tensors, not the 8"):
        protect_arrays(before, after, local.export(NOISE), training=TRAINING, images=8)
    with pytest.raises(UserError, match="buffers are sent, and the audit was without --sends-statistics"):
        protect_arrays(before, after, local.export(NOISE), training=TRAINING, images=8, buffers="send")


def test_statistics_leave_where_they_were_audited(audited: Callable[..., AuditedClient]) -> None:
    client = audited(**LOCAL, sends_statistics=True)
    exported, (before, after) = client.export(NOISE), arrays(client)
    assert len(exported.task.parameters) == 8 and not any("running" in name for name in exported.task.parameters)
    sent = protect_arrays(before, after, exported, training=TRAINING, images=8, buffers="send")
    assert (sent["1.running_mean"] == after["1.running_mean"]).all() and (after["1.running_mean"] != 0).all()


def test_a_report_without_a_folder_exports_nothing(local: AuditedClient) -> None:
    with pytest.raises(UserError, match="export needs the stored cells"):
        gv.Report(local.report.summary).export(NOISE)
    with pytest.raises(UserError, match="no defense is recommended, so name one"):
        local.report.export()


def test_frozen_parameters_go_back_as_they_came(local: AuditedClient) -> None:
    exported = local.export(NOISE)
    trained = {name: shape for name, shape in exported.task.parameters.items() if not name.startswith("0.")}
    update = {
        "training": gv.LocalTraining(epochs=2, batch_size=4, lr=0.01, frozen=("0.*",)),
        "task": exported.task.model_copy(update={"parameters": trained}),
    }
    before, after = arrays(local)
    sent = protect_arrays(before, after, exported.model_copy(update=update), training=TRAINING, images=8)
    assert all((sent[n] == before[n]).all() for n in ("0.weight", "0.bias"))
    assert (sent["4.weight"] != after["4.weight"]).mean() > 0.99


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_path_stands_for_its_protection_and_the_log_names_it(
    local: AuditedClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = local.export("clip:norm=0.05").save(tmp_path / "protection.json")
    before, after = arrays(local)
    evidence = tmp_path / "evidence.jsonl"
    with caplog.at_level(logging.INFO, logger="gradveil"):
        protect_arrays(before, after, str(file), training=TRAINING, images=8, evidence=evidence)
    record = json.loads(evidence.read_text())
    sha256 = Audited.of(file).sha256
    assert record["protection"] == sha256 and record["units"] == {"kind": "delta", "steps": 4, "lr": 0.01}
    assert record["beyond_audit"] is False
    ratio = local.export("clip:norm=0.05").measured.noise_ratio
    (line,) = caplog.messages
    assert f"in the audit {ratio.min:.1%} to {ratio.max:.1%}" in line and "'clip:norm=0.05' acted on 8 tensors" in line
    assert f"protection {sha256[:12]}, audited for weight differences after 4 steps at learning rate 0.01" in line
    assert "3 withheld (the received ones go back): 1.running_mean, 1.running_var, 1.num_batches_tracked" in line


def test_an_update_of_unusual_length_is_a_warning(local: AuditedClient, caplog: pytest.LogCaptureFixture) -> None:
    before, after = arrays(local)
    tenfold = {n: before[n] + 10 * (after[n] - before[n]) if after[n].dtype.kind == "f" else after[n] for n in after}
    protect_arrays(before, tenfold, local.export(NOISE), training=TRAINING, images=8)
    (record,) = caplog.records
    norm = local.export(NOISE).measured.norm
    assert record.levelname == "WARNING" and f"in the audit {norm.min:.3g} to {norm.max:.3g}" in record.getMessage()


def test_code_of_another_version_is_refused(local: AuditedClient) -> None:
    other = local.export(NOISE).model_copy(update={"versions": {"gaussian": 99}})
    with pytest.raises(UserError, match=r"version \d of 'gaussian', not 99"):
        Audited.of(other)
    assert Audited.of(other, {"beyond_audit": True}).defense.spec == NOISE


def test_a_file_imports_nothing(local: AuditedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    for text in ("evil:Class", "clip+evil:Class"):
        with pytest.raises(UserError, match="no defense is registered as 'evil' here"):
            Audited.of(local.export(NOISE).model_copy(update={"defense": text}))
    loss = local.export("mixup")
    loss = loss.model_copy(update={"task": loss.task.model_copy(update={"loss": "evil:loss"})})
    data = (local.case.batch(0).x, local.case.batch(0).y)
    with pytest.raises(UserError, match="give it as loss="):
        gv.protect(local.model(), loss, data=data, training=TRAINING)


def test_only_a_protection_takes_what_is_audited() -> None:
    with pytest.raises(UserError, match="training: only an exported protection"):
        protect_arrays({}, {}, "clip", training=TRAINING)
