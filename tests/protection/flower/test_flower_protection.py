"""An exported protection in a Flower client: it changes the update as in the audit, or nothing leaves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import gradveil as gv
from gradveil.core.types import Tensors
from gradveil.protection.flower import mod, protect

pytest.importorskip("flwr", reason="gradveil.flower needs flwr")

if TYPE_CHECKING:
    from conftest import AuditedClient

Make = Callable[..., Any]
NOISE = "gaussian:std=0.0002"
CONFIG = {"learning-rate": 0.01, "local-epochs": 2, "batch-size": 4}
TRAINING = gv.LocalTraining(epochs=2, batch_size=4, lr=0.01)


def client(local: AuditedClient, victim: int = 0, **metrics: float) -> Any:
    """A training function: a plain PyTorch loop on the images of a victim."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    def train(message: Any, context: Any) -> Any:
        records = {"arrays": ArrayRecord(local.trained(victim)), "metrics": MetricRecord({"num-examples": 8, **metrics})}
        return Message(RecordDict(records), reply_to=message)

    return train


@pytest.fixture
def sent(local: AuditedClient, message: Make) -> Any:
    from flwr.app import ConfigRecord

    outgoing = message(arrays=local.model().state_dict())
    outgoing.content["config"] = ConfigRecord({"lr": 0.01, "server-round": 1})
    return outgoing


@pytest.fixture
def context() -> Any:
    from flwr.app import Context, RecordDict

    return Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config=dict(CONFIG))


def states(message: Any) -> Tensors:
    assert not message.has_error(), message.error.reason
    tensors: Tensors = message.content.array_records["arrays"].to_torch_state_dict()
    return tensors


def flat(state: Tensors, start: Tensors) -> Tensor:
    names = [n for n in start if start[n].is_floating_point() and "running" not in n]
    return torch.cat([(state[n].double() - start[n].double()).flatten() for n in names])


@pytest.mark.parametrize("defense", ["clip:norm=0.05", NOISE])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_mod_changes_the_update_as_in_the_audit(
    local: AuditedClient, sent: Any, context: Any, tmp_path: Path, defense: str, victim: int
) -> None:
    file = local.export(defense).save(tmp_path / "protection.json")
    start, plain = local.model().state_dict(), local.trained(victim)
    protected = states(mod(file)(sent, context, client(local, victim)))
    update, outgoing = flat(plain, start), flat(protected, start)
    audited = local.changes(defense)[victim]
    assert audited is not None and audited.norm is not None and audited.cosine is not None
    assert float(update.norm()) == pytest.approx(audited.norm, rel=1e-3)
    assert float((outgoing - update).norm() / update.norm()) == pytest.approx(audited.noise_ratio, rel=0.01)
    cosine = float(outgoing @ update / outgoing.norm() / update.norm())
    assert cosine == pytest.approx(audited.cosine, rel=0.01)
    assert torch.equal(protected["1.running_mean"], start["1.running_mean"])
    assert not torch.equal(plain["1.running_mean"], start["1.running_mean"])


def test_log_and_evidence_say_that_it_acted(
    local: AuditedClient, sent: Any, context: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, evidence = local.export(NOISE).save(tmp_path / "protection.json"), tmp_path / "evidence.jsonl"
    with caplog.at_level(logging.INFO, logger="gradveil"):
        states(mod(file, evidence=evidence)(sent, context, client(local)))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gradveil"]
    record = json.loads(evidence.read_text())
    assert record["protection"][:12] in line and len(record["protection"]) == 64
    assert "audited for weight differences after 4 steps at learning rate 0.01" in line and "changed the update by" in line
    assert "3 withheld (the received ones go back): arrays/1.running_mean" in line
    assert record["units"] == {"kind": "delta", "steps": 4, "lr": 0.01} and len(record["withheld"]) == 3


def test_flowers_log_shows_it_where_no_other_is_set_up(
    local: AuditedClient, sent: Any, context: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("gradveil"), "hasHandlers", lambda: False)  # as in an app of Flower
    with caplog.at_level(logging.INFO, logger="flwr"):
        states(mod(local.export(NOISE))(sent, context, client(local)))
    (record,) = [record for record in caplog.records if "acted on" in record.getMessage()]
    assert record.name == "flwr" and record.getMessage().startswith(f"gradveil: '{NOISE}' acted on 8 tensors")


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        ({"learning-rate": 0.1}, {}, "the learning rate is 0.01 by lr of the message and 0.1 by learning-rate of the run"),
        ({"local-epochs": 3}, {}, "6 local steps, not 4"),
        ({"batch-size": 8}, {}, "2 local steps, not 4"),
        ({"batch-size": None}, {}, "the batch size of this client cannot be known here; state training="),
        ({"batch-size": None, "local-epochs": None}, {}, "the number of local epochs and batch size of this client"),
        (
            {},
            {"training": gv.LocalTraining(epochs=2, batch_size=4, lr=0.2)},
            "0.01 by learning-rate of the run and 0.2 by training",
        ),
        ({}, {"training": gv.LocalTraining(epochs=2, batch_size=4, lr=0.01, optimizer="adam")}, "optimizer adam, not sgd"),
        ({}, {"images": 7}, "7 images, not 8 or more"),
        ({"batch-size": "four"}, {}, "'the client's settings': batch_size='four'"),
    ],
)
def test_other_units_send_a_reason_and_nothing_else(
    local: AuditedClient, sent: Any, context: Any, config: dict[str, Any], options: Any, says: str
) -> None:
    context.run_config = {k: v for k, v in {**CONFIG, **config}.items() if v is not None}
    refused = mod(local.export(NOISE), **options)(sent, context, client(local))
    assert refused.has_error() and not refused.has_content()
    assert says in refused.error.reason and "\n" not in refused.error.reason
    allowed = mod(local.export(NOISE), **options, beyond_audit=True)(sent, context, client(local))
    assert float(flat(states(allowed), local.trained(0)).norm()) > 0


def test_units_are_checked_before_training_where_they_are_known(local: AuditedClient, sent: Any, context: Any) -> None:
    def never(message: Any, context: Any) -> Any:
        raise AssertionError("trained")

    context.run_config = {**CONFIG, "local-epochs": 3}
    refused = mod(local.export(NOISE), images=8)(sent, context, never)
    assert refused.has_error() and "6 local steps, not 4" in refused.error.reason


def test_stated_training_needs_no_config(local: AuditedClient, sent: Any, context: Any, message: Make) -> None:
    context.run_config = {}
    silent = message(arrays=local.model().state_dict())
    silent.content["config"]["lr"] = 0.01
    del silent.content["config"]["lr"]
    states(mod(local.export(NOISE), training=TRAINING)(silent, context, client(local)))


def test_the_number_of_images_must_be_known(local: AuditedClient, sent: Any, context: Any) -> None:
    def nameless(message: Any, context: Any) -> Any:
        reply = client(local)(message, context)
        del reply.content["metrics"]["num-examples"]
        return reply

    refused = mod(local.export(NOISE))(sent, context, nameless)
    assert refused.has_error() and "state images=" in refused.error.reason
    states(mod(local.export(NOISE), images=8)(sent, context, nameless))
    refused = mod(local.export(NOISE), images=8)(sent, context, client(local, **{"num-examples": 12}))
    assert refused.has_error() and "trained on 12 images, images=8 was stated" in refused.error.reason


def test_what_was_audited_on_gradients_does_not_act_on_weights(
    single: AuditedClient, local: AuditedClient, sent: Any, context: Any
) -> None:
    refused = mod(single.export(NOISE))(sent, context, client(local))
    assert refused.has_error() and "it sends weight differences, not gradients" in refused.error.reason


def test_other_messages_need_no_units(local: AuditedClient, context: Any, message: Make) -> None:
    from flwr.app import Message, MetricRecord, RecordDict

    context.run_config = {}
    asked = message("evaluate", arrays=local.model().state_dict())
    reply = mod(local.export(NOISE))(
        asked, context, lambda m, c: Message(RecordDict({"m": MetricRecord({"a": 1})}), reply_to=m)
    )
    assert not reply.has_error()


def test_a_guard_acts_as_in_the_audit(local: AuditedClient, sent: Any, context: Any, caplog: pytest.LogCaptureFixture) -> None:
    batch, exported = local.case.batch(0), local.export("clip:norm=0.05")

    def trained(steps: int, **options: Any) -> Any:
        guard = protect(sent, context, local.model(), exported, data=(batch.x, batch.y), **options)
        optimizer = torch.optim.SGD(guard.model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            part = slice(4 * (step % 2), 4 * (step % 2) + 4)
            guard.backward(batch.x[part], batch.y[part])
            optimizer.step()
        return guard

    start = {n: t.clone() for n, t in local.model().state_dict().items()}
    with caplog.at_level(logging.INFO, logger="gradveil"):
        outgoing = flat(states(trained(4).reply()), start)
    assert float(outgoing.norm()) == pytest.approx(0.05, rel=1e-3)
    assert any("audited for weight differences after 4 steps" in text for text in caplog.messages)
    with pytest.raises(gv.UserError, match="5 calls of backward, not 4"):
        trained(5).reply()
    context.run_config = {**CONFIG, "batch-size": 8}
    with pytest.raises(gv.UserError, match="2 local steps, not 4"):
        trained(2)
    assert trained(2, beyond_audit=True).reply()
