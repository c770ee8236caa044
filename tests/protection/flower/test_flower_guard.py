"""The helper in a training function: every stage acts, draws differ from round to round, encodings do not."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradveil import attacks
from gradveil.core.errors import UserError
from gradveil.core.hashing import digest
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.defenses.base import Step
from gradveil.protection.flower import network, protect, receive

pytest.importorskip("flwr", reason="gradveil.flower needs flwr")

Make = Callable[..., Any]
HOW = {"mean": [0.5], "std": [0.25]}


def train(guard: Any, data: DataSet, steps: int = 3) -> Any:
    optimizer = torch.optim.SGD(guard.model.parameters(), lr=0.1)
    for rows in torch.arange(8 * steps).split(8):
        optimizer.zero_grad()
        guard.backward(data.private.x[rows], data.private.y[rows])
        optimizer.step()
    return guard.reply(loss=0.5)


def sent_back(reply: Any) -> dict[str, torch.Tensor]:
    return reply.content.array_records["arrays"].to_torch_state_dict()


def test_without_a_defense_it_is_the_plain_loop(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    received = copy.deepcopy(net)
    with torch.no_grad():
        received[4].bias += 1  # the server's weights, not the ones the client's network began with
    guard = protect(message(arrays=received.state_dict()), context, net, "none", shapes.private, buffers="send", **HOW)
    reply = train(guard, shapes)
    optimizer = torch.optim.SGD(received.parameters(), lr=0.1)
    for rows in torch.arange(24).split(8):
        optimizer.zero_grad()
        F.cross_entropy(received((shapes.private.x[rows] - 0.5) / 0.25), shapes.private.y[rows]).backward()
        optimizer.step()
    for name, value in received.state_dict().items():
        assert torch.allclose(sent_back(reply)[name].to(value), value, rtol=1e-3, atol=1e-5), name
    assert dict(reply.content["metrics"]) == {"num-examples": len(shapes.private), "loss": 0.5}


def test_the_update_stage_acts_once_on_all_steps(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    before = copy.deepcopy(net.state_dict())
    guard = protect(message(arrays=before), context, net, "prune:ratio=0.9", shapes.private, **HOW)
    found = sent_back(train(guard, shapes))["4.weight"] - before["4.weight"]
    assert float((found == 0).float().mean()) == pytest.approx(0.9, abs=0.01)  # of each step it would be far less


def test_the_model_stage_changes_what_both_sides_run(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    plain = message(arrays=net.state_dict())
    with pytest.raises(UserError, match="the model from the server lacks"):
        protect(plain, context, copy.deepcopy(net), "precode:k=4", shapes.private)
    agreed = network(copy.deepcopy(net), "precode:k=4", (1, 12, 12))
    guard = protect(message(arrays=agreed.state_dict()), context, copy.deepcopy(net), "precode:k=4", shapes.private)
    reply = train(guard, shapes)
    assert set(sent_back(reply)) == set(agreed.state_dict()) != set(net.state_dict())


class Scramble(Defense):
    """A data-stage defense whose encoding is random."""

    fed: list[torch.Tensor]
    random = True

    def __init__(self) -> None:
        self.fed = []

    def data(self, batch: Batch, step: Step) -> Batch:
        return Batch(step.rng.uniform(batch.x.shape), batch.y)

    def batch(self, batch: Batch, step: Step) -> Batch:
        self.fed.append(batch.x)
        return batch


def test_images_are_encoded_once_for_all_rounds_and_clients_differ(
    net: nn.Module, message: Make, context: Any, shapes: DataSet
) -> None:
    from flwr.app import Context, RecordDict

    stranger = Context(run_id=1, node_id=8, node_config={}, state=RecordDict(), run_config={})
    found = []
    for who in (context, context, stranger):
        defense = Scramble()
        guard = protect(message(arrays=net.state_dict()), who, copy.deepcopy(net), defense, shapes.private)
        train(guard, shapes, steps=1)
        found.append(defense.fed[0])
    assert torch.equal(found[0], found[1])  # a second round, as in a new process: all it has is the context
    assert not torch.equal(found[0], shapes.private.x[:8])
    assert not torch.equal(found[0], found[2])


def test_noise_differs_from_round_to_round(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    before = copy.deepcopy(net.state_dict())
    one, two = (
        sent_back(protect(message(arrays=before), context, net, "gaussian:std=1", shapes.private).reply())["4.weight"]
        for _ in range(2)
    )
    assert not torch.equal(one, two)
    assert float((one - before["4.weight"]).std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"4.weight": torch.zeros(3, 301)}, "'4.weight' as 3×301"),
        ({"4.bias": torch.full((3,), float("nan"))}, "not finite in '4.bias'"),
        ({"5.weight": torch.zeros(3)}, "has '5.weight'"),
    ],
)
def test_a_model_from_the_server_is_not_trusted(
    net: nn.Module, message: Make, context: Any, shapes: DataSet, change: dict[str, torch.Tensor], words: str
) -> None:
    sent = message(arrays={**net.state_dict(), **change})
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(UserError, match=words):
        protect(sent, context, net, "none", shapes.private)
    with pytest.raises(UserError, match=words):
        receive(net, sent.content["arrays"])
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


def test_the_log_warns_of_a_classifier_that_fishes_for_images(
    net: nn.Module, message: Make, caplog: pytest.LogCaptureFixture, shapes: DataSet
) -> None:
    receive(net, message(arrays=net.state_dict()).content["arrays"])
    assert not caplog.records
    fishing = attacks.parse("fishing").tamper(net, shapes.input_shape, batch_size=8)
    receive(net, message(arrays=fishing.state_dict()).content["arrays"])
    assert "the rows of '4.weight' from the server are one row" in caplog.text


def test_training_that_diverged_sends_nothing(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    guard = protect(message(arrays=net.state_dict()), context, net, "none", shapes.private)
    with torch.no_grad():
        guard.model[4].bias.fill_(float("inf"))
    with pytest.raises(UserError, match="not finite in '4.bias'; nothing is sent"):
        guard.reply()


class Answer(Defense):
    """Returns in the update stage whatever a test has it return."""

    def __init__(self, answer: Callable[[Tensors], object]):
        self.answer = answer

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return self.answer(tensors)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda t: {}, "returned nothing for '0.weight'"),
        (lambda t: t.clear() or t, "returned nothing for '0.weight'"),
        (lambda t: {n: v for n, v in t.items() if n != "4.bias"}, "returned nothing for '4.bias'"),
        (lambda t: {**t, "4.bias": t["4.bias"] * float("nan")}, "not finite in '4.bias'"),
        (lambda t: {**t, "4.bias": t["4.bias"] + 1e300}, "not finite in '4.bias'"),
        (lambda t: {**t, "4.bias": t["4.bias"] + 0j}, "'4.bias' holds torch.complex128"),
    ],
)
def test_an_answer_that_is_not_complete_sends_nothing(
    net: nn.Module, message: Make, context: Any, shapes: DataSet, answer: Callable[[Tensors], object], words: str
) -> None:
    guard = protect(message(arrays=net.state_dict()), context, net, Answer(answer), shapes.private)
    with pytest.raises(UserError, match=words):
        train(guard, shapes, steps=1)


def test_statistics_that_are_not_finite_send_nothing(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    guard = protect(message(arrays=net.state_dict()), context, net, "none", shapes.private)
    guard.model[1].running_var.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite in '1.running_var'; nothing is sent"):
        guard.reply()


def test_no_name_of_a_weight_leaves_unprotected(message: Make, context: Any, shapes: DataSet) -> None:
    """Tied weights have two names; a frozen layer that moved all the same is part of the update."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 144), nn.Linear(144, 144), nn.Linear(144, 3))
    net[2].weight, net[3].weight.requires_grad = net[1].weight, False
    before = copy.deepcopy(net.state_dict())
    guard = protect(message(arrays=before), context, net, "gaussian:std=1", shapes.private)
    still = sent_back(guard.reply())
    assert torch.equal(still["3.weight"], before["3.weight"])
    with torch.no_grad():
        guard.model[3].weight += 0.1
    sent = sent_back(guard.reply())
    for name in ("1.weight", "3.weight"):
        assert float((sent[name] - guard.model.state_dict()[name]).std()) == pytest.approx(1, abs=0.2)
    assert torch.equal(sent["1.weight"], sent["2.weight"])  # one draw: two would average out


def test_noise_hangs_on_the_model_received(
    net: nn.Module, message: Make, context: Any, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends one message id twice must not be able to take two answers' noise off one another."""

    def noise(change: float, spec: str = "gaussian:std=1") -> torch.Tensor:
        state = {n: t + change if t.is_floating_point() else t for n, t in net.state_dict().items()}
        sent = message(arrays=state)
        sent.metadata.__dict__["_message_id"] = "one"
        guard = protect(sent, context, copy.deepcopy(net), spec, shapes.private)
        if spec.startswith("gaussian"):
            return sent_back(guard.reply())["4.weight"] - state["4.weight"]
        guard.backward(shapes.private.x[:8], shapes.private.y[:8])
        return guard.model[4].weight.grad

    assert float((noise(0) - noise(0)).std()) > 1
    assert float((noise(0, "dpsgd") - noise(0, "dpsgd")).std()) > 0
    monkeypatch.setattr("secrets.token_bytes", bytes)  # a system whose randomness has failed
    assert torch.allclose(noise(0), noise(0), atol=1e-6)
    assert float((noise(0) - noise(1)).std()) > 1


def test_images_encoded_before_stay_when_others_join(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    fed = []
    for rows in (slice(0, 12), slice(4, 24)):
        defense = Scramble()
        guard = protect(message(arrays=net.state_dict()), context, copy.deepcopy(net), defense, shapes.private[rows])
        guard.backward(shapes.private.x[4:12], shapes.private.y[4:12])
        fed.append(defense.fed[0])
    assert torch.equal(*fed)


def test_each_round_is_logged(
    net: nn.Module, message: Make, context: Any, shapes: DataSet, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="gradveil"):
        train(protect(message(arrays=net.state_dict()), context, net, "prune", shapes.private), shapes)
    logged = [record.getMessage() for record in caplog.records if record.name == "gradveil"]
    (line,) = logged
    withheld = "1.running_mean, 1.running_var, 1.num_batches_tracked"
    assert re.fullmatch(rf"'prune' acted on 6 tensors and changed the update by \d\d\.\d%; 3 withheld \(.*\): {withheld}", line)


def test_buffers_are_withheld_unless_asked_for(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    before = copy.deepcopy(net.state_dict())
    for buffers in ("withhold", "send"):
        made = copy.deepcopy(net)
        guard = protect(message(arrays=before), context, made, "prune", shapes.private, buffers=buffers)
        sent = sent_back(train(guard, shapes))
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(sent[name], before[name]) == (buffers == "withhold")
            assert not torch.equal(guard.model.state_dict()[name], before[name])


def test_a_model_trained_beside_the_guard_does_not_leave(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    guard = protect(message(arrays=net.state_dict()), context, net, "mixup", shapes.private)
    with torch.no_grad():
        guard.model[4].bias += 0.1
    with pytest.raises(UserError, match="trained without guard.backward"):
        guard.reply()


def test_evidence_of_a_round_and_of_a_refusal(
    net: nn.Module, message: Make, context: Any, shapes: DataSet, tmp_path: Path
) -> None:
    path, sent = tmp_path / "evidence.jsonl", message(arrays=net.state_dict())
    guard = protect(sent, context, net, "prune", shapes.private, evidence=path, buffers="send")
    reply = train(guard, shapes)
    with torch.no_grad():
        guard.model[4].bias.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        guard.reply()
    left, refused = (json.loads(line) for line in path.read_text().splitlines())
    assert (left["door"], left["protected"], len(left["unprotected"]), left["withheld"]) == ("guard", 6, 3, [])
    assert left["sha256"] == digest("", sent_back(reply))
    assert "not finite" in refused["refused"]


def test_a_hanging_or_talking_defense_tells_the_server_nothing(
    net: nn.Module, message: Make, context: Any, shapes: DataSet
) -> None:
    class Talks(Defense):
        def batch(self, batch: Batch, step: Step) -> Batch:
            raise ValueError(f"pixels {batch.x.flatten()[:3].tolist()}")

    class Hangs(Defense):
        def update(self, tensors: Tensors, step: Step) -> Tensors:
            time.sleep(20)
            return tensors

    guard = protect(message(arrays=net.state_dict()), context, net, Talks(), shapes.private)
    with pytest.raises(UserError) as refused:
        guard.backward(shapes.private.x[:4], shapes.private.y[:4])
    assert str(refused.value) == "the defense raised ValueError; nothing is sent."
    guard = protect(message(arrays=net.state_dict()), context, net, Hangs(), shapes.private, deadline=0.2)
    with pytest.raises(UserError, match=r"more than the 0.2 s"):
        train(guard, shapes)


def test_texts_about_private_data_stay_here(
    net: nn.Module, message: Make, context: Any, shapes: DataSet, caplog: pytest.LogCaptureFixture
) -> None:
    class Patients(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            raise OSError("no file 'patient-0815.png'")

    with pytest.raises(UserError) as refused:
        protect(message(arrays=net.state_dict()), context, net, "none", Patients())
    assert str(refused.value) == "reading the data raised UserError; nothing is sent."
    assert "patient-0815" in caplog.text
    guard = protect(message(arrays=net.state_dict()), context, net, "none", shapes.private)
    for x, y in ((shapes.private.x + 7.25, shapes.private.y), (shapes.private.x, shapes.private.y + 40)):
        with pytest.raises(UserError) as refused:
            guard.backward(x[:4], y[:4])
        assert str(refused.value) == "guard.backward raised UserError; nothing is sent."


def test_metrics_are_few_single_numbers(net: nn.Module, message: Make, context: Any, shapes: DataSet) -> None:
    guard = protect(message(arrays=net.state_dict()), context, net, "none", shapes.private)
    with pytest.raises(UserError, match="'images' of 'metrics' is no single number"):
        guard.reply(images=shapes.private.x.flatten().tolist())
    with pytest.raises(UserError, match="66 metrics"):
        guard.reply(**{f"x{i}": 0.5 for i in range(65)})
