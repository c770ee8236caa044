"""The mod: the reply of an unchanged training function leaves protected, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.core.errors import UserError
from gradveil.core.hashing import digest
from gradveil.core.types import Tensors
from gradveil.defenses import Defense
from gradveil.defenses.base import Step
from gradveil.protection.flower import mod

pytest.importorskip("flwr", reason="gradveil.flower needs flwr")

Make = Callable[..., Any]


def training(step: float = 1.0, key: str = "arrays", **more: dict[str, torch.Tensor]) -> Any:
    """A training function that moves every float by a random step, and sends its names in another order."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    def train(message: Any, context: Any) -> Any:
        rng = torch.Generator().manual_seed(1)
        state = next(iter(message.content.array_records.values())).to_torch_state_dict()
        moved = {n: t + step * torch.rand(t.shape, generator=rng) if t.is_floating_point() else t + 1 for n, t in state.items()}
        records = {key: ArrayRecord(dict(reversed(moved.items())))}
        records |= {name: ArrayRecord(dict(tensors)) for name, tensors in more.items()}
        return Message(RecordDict({**records, "metrics": MetricRecord({"num-examples": 5})}), reply_to=message)

    return train


def states(message: Any, key: str = "arrays") -> dict[str, torch.Tensor]:
    return message.content.array_records[key].to_torch_state_dict()


def test_the_update_leaves_pruned_and_all_else_as_it_was(net: nn.Module, message: Make, context: Any) -> None:
    sent = message(arrays=net.state_dict())
    plain = training()(sent, context)
    found = mod("prune:ratio=0.9")(sent, context, training())
    before, after, true = net.state_dict(), states(found), states(plain)
    assert list(after) == list(true)  # the order in which the client sent them
    for name in ("0.weight", "4.weight", "4.bias"):
        kept = after[name] != before[name]
        assert int(kept.sum()) == max(1, round(0.1 * kept.numel() + 0.49))
        assert torch.allclose(after[name][kept], true[name][kept])
    sent_as_they_are = states(mod("prune:ratio=0.9", buffers="send")(sent, context, training()))
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(after[name], before[name])  # withheld
        assert torch.equal(sent_as_they_are[name], true[name])
        assert not torch.equal(true[name], before[name])
    assert found.content["metrics"] == plain.content["metrics"]
    assert found.metadata.reply_to_message_id == sent.metadata.message_id


def test_several_records_are_one_update(net: nn.Module, message: Make, context: Any) -> None:
    other = {"0.weight": torch.zeros(50)}  # the same name in another record
    sent = message(arrays=net.state_dict(), head=other)
    answer = training(head={"0.weight": torch.full((50,), 9.0)})
    found = mod("clip:norm=1.0")(sent, context, answer)
    changes = [states(found, "head")["0.weight"]]
    changes += [t - net.state_dict()[n] for n, t in states(found).items() if n.split(".")[1] in ("weight", "bias")]
    assert float(sum(c.double().square().sum() for c in changes)) == pytest.approx(1, rel=1e-3)
    assert float(changes[0].norm()) > 0.9  # nearly all of it


def test_a_record_that_was_not_received_stays(net: nn.Module, message: Make, context: Any) -> None:
    sent = message(arrays=net.state_dict())
    answer = training(features={"x": torch.ones(3)})
    refused = mod("prune")(sent, context, answer)
    assert refused.has_error()
    assert "'features' was not received" in refused.error.reason
    passed = mod("prune", passed=["features"])(sent, context, answer)
    assert torch.equal(states(passed, "features")["x"], torch.ones(3))
    renamed = mod("prune:ratio=0.9")(sent, context, training(key="weights"))  # one in, one out: no doubt which
    assert float((states(renamed, "weights")["4.weight"] == net.state_dict()["4.weight"]).float().mean()) > 0.85


def test_broken_training_sends_a_reason_and_nothing_else(net: nn.Module, message: Make, context: Any) -> None:
    found = mod("prune")(message(arrays=net.state_dict()), context, training(step=float("nan")))
    assert found.has_error()
    assert not found.has_content()
    assert "not finite" in found.error.reason


class Broken(Defense):
    """Sends values that are not finite, or nothing at all."""

    def __init__(self, factor: float | None):
        self.factor = factor

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {} if self.factor is None else {name: t * self.factor for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("factor", "words"), [(float("nan"), "not finite"), (1e300, "not finite"), (None, "returned nothing for")]
)
def test_an_answer_of_the_defense_that_is_not_complete_stays(
    net: nn.Module, message: Make, context: Any, factor: float | None, words: str
) -> None:
    refused = mod(Broken(factor))(message(arrays=net.state_dict()), context, training())
    assert refused.has_error()
    assert not refused.has_content()
    assert words in refused.error.reason


def test_complex_arrays_and_broken_statistics_do_not_leave(net: nn.Module, message: Make, context: Any) -> None:
    sent = message(arrays={"w": torch.ones(3, dtype=torch.complex64)})
    refused = mod("gaussian:std=1")(sent, context, training())
    assert refused.has_error()
    assert "'arrays/w' holds complex64" in refused.error.reason
    broken = {**net.state_dict(), "1.running_var": torch.full((3,), float("nan"))}
    assert mod("gaussian:std=1")(message(arrays=broken), context, training()).has_error()


def test_noise_hangs_on_the_model_received_and_is_new_every_time(
    net: nn.Module, message: Make, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends one message id twice must not be able to take two answers' noise off one another."""

    def noise(change: float, name: str = "one") -> torch.Tensor:
        state = {n: t + change if t.is_floating_point() else t for n, t in net.state_dict().items()}
        sent = message(arrays=state)
        sent.metadata.__dict__["_message_id"] = name
        plain = states(training()(sent, context))["4.weight"]
        return states(mod("gaussian:std=1")(sent, context, training()))["4.weight"] - plain

    assert float((noise(0) - noise(0)).std()) > 1  # two draws: 1.41
    monkeypatch.setattr("secrets.token_bytes", bytes)  # a system whose randomness has failed
    assert torch.allclose(noise(0), noise(0), atol=1e-5)
    assert float((noise(0) - noise(1)).std()) > 1
    assert float((noise(0) - noise(0, "two")).std()) > 1


def test_each_round_is_logged(net: nn.Module, message: Make, context: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gradveil"):
        mod("prune:ratio=0.7")(message(arrays=net.state_dict()), context, training())
    logged = [record.getMessage() for record in caplog.records if record.name == "gradveil"]
    (line,) = logged
    acted, *withheld = line.split("; ")
    words, _, percent = acted.removesuffix("%").rpartition(" ")
    assert words == "'prune:ratio=0.7' acted on 6 tensors and changed the update by"
    assert float(percent) == pytest.approx(100 * 0.7**1.5, abs=1)  # of uniform values
    assert withheld[0].startswith("3 withheld (the received ones go back): arrays/1.num_batches_tracked, arrays/1.running_var")
    caplog.clear()
    mod("prune:ratio=0.7", buffers="send")(message(arrays=net.state_dict()), context, training())
    (record,) = [record for record in caplog.records if record.name == "gradveil"]
    assert record.levelname == "WARNING"
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert name in record.getMessage().partition("3 leave unprotected: ")[2]


def test_evaluation_and_errors_pass_through(net: nn.Module, message: Make, context: Any) -> None:
    from flwr.app import Error, Message, MetricRecord, RecordDict

    sent = message("evaluate", arrays=net.state_dict())
    answer = Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5})}), reply_to=sent)
    assert mod("prune")(sent, context, lambda m, c: answer) is answer
    sent = message(arrays=net.state_dict())
    error = Message(Error(2, "no memory"), reply_to=sent)
    assert mod("prune")(sent, context, lambda m, c: error) is error


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize(
    "facts", [{"x": [0.5, 0.25]}, {"x": b"pixels"}, {"x": "0.5 " * 51}, {f"x{i}": i / 2 for i in range(65)}], ids=str
)
def test_metrics_are_few_single_numbers(kind: str, facts: dict[str, Any], message: Make, context: Any) -> None:
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

    sent = message(kind)
    numbers = all(isinstance(v, float | list) for v in facts.values())
    record = MetricRecord(facts) if numbers else ConfigRecord(facts)
    answer = Message(RecordDict({"facts": record}), reply_to=sent)
    refused = mod("prune")(sent, context, lambda m, c: answer)
    assert refused.has_error() and "may hold private data" in refused.error.reason
    assert mod("prune", passed=["facts"])(sent, context, lambda m, c: answer) is answer
    allowed = {"loss": 0.5, "correct": 3, "whole": True, "status": "0.5 " * 50}
    answer = Message(RecordDict({"facts": ConfigRecord(allowed)}), reply_to=sent)
    assert mod("prune")(sent, context, lambda m, c: answer) is answer


def test_the_text_of_an_exception_stays_here(
    net: nn.Module, message: Make, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def train(message: Any, context: Any) -> Any:
        raise ValueError("pixels 0.123")

    refused = mod("prune")(message(arrays=net.state_dict()), context, train)
    assert refused.error.reason == "gradveil: the training function raised ValueError; nothing is sent."
    assert "pixels 0.123" in caplog.text


def test_only_answers_to_training_hold_arrays(net: nn.Module, message: Make, context: Any) -> None:
    for kind in ("evaluate", "query.gradients"):
        refused = mod("prune")(message(kind, arrays=net.state_dict()), context, training())
        assert refused.has_error() and "'arrays' is no answer to training" in refused.error.reason
    assert mod("prune")(message("train.again", arrays=net.state_dict()), context, training()).has_content()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": torch.full((3,), float("nan"))}, "not finite in 'features/x'"),
        ({"x": torch.ones(3, dtype=torch.complex64)}, "'features/x' holds complex64"),
        ({"x": torch.ones(4)}, "other names, shapes or kinds"),
        ({"x": torch.ones(3, dtype=torch.float64)}, "other names, shapes or kinds"),
        ({"x": torch.ones(3), "y": torch.ones(3)}, "other names, shapes or kinds"),
    ],
)
def test_what_is_passed_is_checked_and_named(
    net: nn.Module, message: Make, context: Any, caplog: pytest.LogCaptureFixture, arrays: Tensors, words: str
) -> None:
    sent = message(arrays=net.state_dict(), features={"x": torch.zeros(3)})
    refused = mod("prune", passed=["features"])(sent, context, training(features=arrays))
    assert refused.has_error() and words in refused.error.reason
    passed = mod("prune", passed=["features"])(sent, context, training(features={"x": torch.ones(3)}))
    assert torch.equal(states(passed, "features")["x"], torch.ones(3))
    assert "1 leave unprotected: features/x" in caplog.text


def test_weights_as_whole_numbers_do_not_leave(net: nn.Module, message: Make, context: Any) -> None:
    """A client that quantises by itself: no defense acts on whole numbers."""
    from flwr.app import ArrayRecord, Message, RecordDict

    def train(received: Any, context: Any) -> Any:
        whole = {n: (100 * t).to(torch.int8) for n, t in states(received).items()}
        return Message(RecordDict({"arrays": ArrayRecord(whole)}), reply_to=received)

    for buffers in ("withhold", "send"):
        refused = mod("prune", buffers=buffers)(message(arrays=net.state_dict()), context, train)
        assert refused.has_error() and "received as float32 and is now int8" in refused.error.reason


def test_evidence_names_what_left_and_what_did_not(net: nn.Module, message: Make, context: Any, tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    protected = mod("gaussian", evidence=path, passed=["features"], deadline=60)
    sent = message(arrays=net.state_dict(), features={"x": torch.zeros(3)})
    reply = protected(sent, context, training(features={"x": torch.ones(3)}))
    protected(sent, context, training(step=float("nan"), features={"x": torch.ones(3)}))
    kept, refused = (json.loads(line) for line in path.read_text().splitlines())
    assert (kept["door"], kept["protected"], kept["unprotected"]) == ("mod", 6, ["features/x"])
    assert sorted(kept["withheld"]) == [f"arrays/1.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")]
    left = {f"{key}/{n}": t for key in ("arrays", "features") for n, t in states(reply, key).items()}
    assert kept["sha256"] == digest("", left)
    assert "not finite" in refused["refused"]


def test_names_that_collide_send_nothing(message: Make, context: Any) -> None:
    sent = message(**{"a": {"b/c": torch.ones(2)}, "a/b": {"c": torch.ones(2)}})
    refused = mod("prune")(sent, context, training(**{"a": {"b/c": torch.ones(2)}, "a/b": {"c": torch.ones(2)}}))
    assert refused.has_error() and not refused.has_content()


def test_a_broken_message_is_refused_before_training(net: nn.Module, message: Make, context: Any) -> None:
    from flwr.app import Array

    sent = message(arrays=net.state_dict())
    sent.content["arrays"]["4.bias"] = Array("float32", (3,), "numpy.ndarray", b"")
    refused = mod("prune")(sent, context, lambda m, c: pytest.fail("trained"))
    assert refused.has_error() and "'4.bias' cannot be read" in refused.error.reason


def test_other_defenses_are_refused_before_any_round() -> None:
    with pytest.raises(UserError, match="'loda' acts on more than the update that leaves"):
        mod("loda")


def test_in_an_app_only_the_training_is_protected(net: nn.Module, message: Make, context: Any) -> None:
    """The stock app and the one with the line changed: the same evaluation, another update."""
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    def app(**options: Any) -> Any:
        made = ClientApp()
        made.train(**options)(training())

        @made.evaluate()
        def evaluate(received: Any, context: Any) -> Any:
            total = sum(float(t.sum()) for t in states(received).values())
            return Message(RecordDict({"metrics": MetricRecord({"sum": total})}), reply_to=received)

        return made

    stock, protected = app(), app(mods=[mod("prune:ratio=0.9")])
    sent, asked = message(arrays=net.state_dict()), message("evaluate", arrays=net.state_dict())
    assert stock(asked, context).content["metrics"] == protected(asked, context).content["metrics"]
    plain, pruned = (states(a(sent, context))["4.weight"] - net.state_dict()["4.weight"] for a in (stock, protected))
    assert float((plain == 0).float().mean()) == 0
    assert float((pruned == 0).float().mean()) == pytest.approx(0.9, abs=0.01)
