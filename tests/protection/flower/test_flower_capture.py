"""What the server sees, on disk: complete, readable by the attack, and never in the way of a round."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradveil as gv
from gradveil import metrics
from gradveil.data import DataSet
from gradveil.protection.flower import capture
from gradveil.storage.updates import load_update

pytest.importorskip("flwr", reason="gradveil.flower needs flwr")

Make = Callable[..., Any]


def reply_of(sent: Any, state: dict[str, torch.Tensor], node: int, examples: int) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": examples})})
    found = Message(content, reply_to=sent)
    found.metadata.__dict__["_src_node_id"] = node
    return found


class OneNode:
    """A grid of one node that is always there."""

    def get_node_ids(self) -> list[int]:
        return [7]


def strategy(folder: Path, **options: Any) -> Any:
    from flwr.serverapp.strategy import FedAvg

    return capture(FedAvg(min_train_nodes=1, min_available_nodes=1), folder, **options)


def send(strategy: Any, state: dict[str, torch.Tensor], round: int = 1) -> Any:
    from flwr.app import ArrayRecord, ConfigRecord

    config = ConfigRecord({"lr": 0.1})
    (sent,) = strategy.configure_train(round, ArrayRecord(state), config, OneNode())
    return sent


def test_every_reply_is_written_and_the_strategy_works_as_before(net: nn.Module, message: Make, tmp_path: Path) -> None:
    message()  # sets up a run to write messages in
    watched = strategy(tmp_path, input_shape=[1, 12, 12], num_classes=3)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    sent = send(watched, before)
    after = {n: t + 1 for n, t in before.items()}
    arrays, _ = watched.aggregate_train(1, iter([reply_of(sent, after, 7, 4), reply_of(sent, before, 8, 12)]))
    assert torch.allclose(torch.tensor(arrays["4.bias"].numpy()), before["4.bias"] + 0.25)  # 4 of 16 examples

    folder = tmp_path / "round-001"
    names = sorted(p.name for p in folder.iterdir())
    assert names == sorted(["before.safetensors", *(f"{k}-{n}.safetensors" for k in ("buffers", "client") for n in (7, 8))])
    stored = load_file(folder / "before.safetensors")
    assert all(torch.equal(stored[n], t) for n, t in before.items())
    update, facts = load_update(folder / "client-7.safetensors")
    assert set(update.tensors) == {n for n, _ in net.named_parameters()}
    assert all(torch.allclose(t, torch.ones_like(t)) for t in update.tensors.values())
    assert (update.kind, update.examples) == ("delta", 4)
    known = {"lr": 0.1, "input_shape": [1, 12, 12], "num_classes": 3, "round": 1}
    assert facts == {**known, "reported": {"metrics": {"num-examples": 4}}}
    assert set(load_file(folder / "buffers-7.safetensors")) == {n for n, _ in net.named_buffers()}


def spoiled(how: str, sent: Any, state: dict[str, torch.Tensor]) -> Any:
    """A reply of node 8 that is broken in one way."""
    from flwr.app import Array, MetricRecord

    reply = reply_of(sent, {n: t + 1 for n, t in state.items()}, 8, 4)
    arrays = reply.content["arrays"]
    header = np.lib.format.header_data_from_array_1_0(np.zeros(3, np.float32)) | {"shape": (10**11,)}
    lying = io.BytesIO()
    np.lib.format.write_array_header_1_0(lying, header)
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    bodies = {"empty": b"", "lying": lying.getvalue(), "pickle": pickled.getvalue(), "text": b"not an array"}
    bodies["unbalanced"] = lying.getvalue().replace(b"}", b"(", 1)
    values = {"nan": torch.full((3,), math.nan), "shape": torch.zeros(9), "complex": torch.ones(3, dtype=torch.complex64)}
    weights: dict[str, Any] = {"inf": math.inf, "not-a-number": math.nan, "zero": 0, "negative": -3, "list": [4, 4]}
    if how in bodies:
        arrays["4.bias"] = Array("float32", (3,), "numpy.ndarray", bodies[how])
    elif how == "type":
        arrays["4.bias"] = Array("float32", (3,), "pickle", arrays["4.bias"].data)
    elif how == "claim":
        arrays["4.bias"] = Array("float64", (3,), "numpy.ndarray", arrays["4.bias"].data)
    elif how in values:
        arrays["4.bias"] = Array(values[how].numpy())
    elif how in weights:
        reply.content["metrics"] = MetricRecord({"num-examples": weights[how]})
    elif how == "no-weight":
        reply.content["metrics"] = MetricRecord({"loss": 1.0})
    else:
        del reply.content[how]
    return reply


BROKEN = ["empty", "lying", "pickle", "text", "type", "claim", "nan", "shape", "complex", "inf", "not-a-number", "zero"]
BROKEN += ["unbalanced", "negative", "list", "no-weight", "arrays", "metrics"]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_reply_never_stops_a_round(
    net: nn.Module, message: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The others are averaged as if it had not come, and the log says why."""
    message()
    watched = strategy(tmp_path)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    sent = send(watched, before)
    good = reply_of(sent, {n: t + 2 for n, t in before.items()}, 7, 4)
    with caplog.at_level("WARNING"):
        arrays, _ = watched.aggregate_train(1, [spoiled(how, sent, before), good])
    assert torch.allclose(torch.tensor(arrays["4.bias"].numpy()), before["4.bias"] + 2)
    assert {p.name for p in (tmp_path / "round-001").glob("client-*")} == {"client-7.safetensors"}
    (logged,) = [m for m in caplog.messages if "left out" in m]
    assert logged.startswith("gradveil: the reply of node 8 is left out: ") and "\n" not in logged


def test_replies_that_do_not_agree_leave_the_model_as_it_is(net: nn.Module, message: Make, tmp_path: Path) -> None:
    from flwr.app import Error, Message

    message()
    watched = strategy(tmp_path)
    sent = send(watched, net.state_dict())
    one, two = (reply_of(sent, net.state_dict(), node, 1) for node in (7, 8))
    two.content["metrics"]["extra"] = 1.0  # FedAvg raises an error for names that differ
    assert watched.aggregate_train(1, [one, two]) == (None, None)
    assert watched.aggregate_train(1, [Message(Error(2, "gone"), reply_to=sent)]) == (None, None)


@pytest.mark.parametrize("metric", [1.0, [1.0, 2.0]], ids=["number", "list"])
def test_one_client_with_other_names_does_not_stop_the_others(
    metric: float | list[float], net: nn.Module, message: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message()
    watched = strategy(tmp_path)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    sent = send(watched, before)
    replies = [reply_of(sent, {n: t + 2 for n, t in before.items()}, node, 1) for node in (7, 8, 9)]
    replies[0].content["metrics"]["extra"] = metric
    with caplog.at_level("WARNING"):
        arrays, _ = watched.aggregate_train(1, replies)
    assert torch.allclose(torch.tensor(arrays["4.bias"].numpy()), before["4.bias"] + 2)
    assert "gradveil: the reply of node 7 is left out: its records differ from the others'" in caplog.messages


@pytest.mark.parametrize(
    ("metrics", "examples"),
    [({"list": [0.1] * 100_000}, 4), ({"x" * 100_000: 1}, 4), ({"num-examples": 1e300}, 999_999), ({"loss": float("nan")}, 4)],
    ids=["list", "name", "examples", "nan"],
)
def test_no_client_makes_the_record_of_its_update_unreadable(
    metrics: dict[str, Any], examples: int, net: nn.Module, message: Make, tmp_path: Path
) -> None:
    message()
    watched = strategy(tmp_path)
    reply = reply_of(send(watched, net.state_dict()), {n: t + 1 for n, t in net.state_dict().items()}, 7, 4)
    for name, value in metrics.items():
        reply.content["metrics"][name] = value
    watched.aggregate_train(1, [reply])
    file = tmp_path / "round-001" / "client-7.safetensors"
    update, facts = load_update(file)
    assert update.examples == examples and "reported" in facts
    assert file.stat().st_size < 50_000


def test_a_folder_that_cannot_be_written_costs_the_capture_and_not_the_round(
    net: nn.Module, message: Make, tmp_path: Path
) -> None:
    message()
    watched = strategy(tmp_path)
    sent = send(watched, net.state_dict())
    (tmp_path / "round-001" / "client-7.safetensors").mkdir()
    arrays, _ = watched.aggregate_train(1, [reply_of(sent, {n: t + 1 for n, t in net.state_dict().items()}, 7, 1)])
    assert arrays is not None


def test_only_the_rounds_asked_for(net: nn.Module, message: Make, tmp_path: Path) -> None:
    message()
    watched = strategy(tmp_path, rounds=[2])
    for round in (1, 2, 3):
        sent = send(watched, net.state_dict(), round)
        watched.aggregate_train(round, [reply_of(sent, {n: t + 1 for n, t in net.state_dict().items()}, 7, 1)])
    assert [p.name for p in tmp_path.iterdir()] == ["round-002"]


@pytest.mark.parametrize(("protected", "least", "most"), [(False, 40, 999), (True, -99, 20)])
def test_what_is_captured_can_be_attacked(
    message: Make, context: Any, shapes: DataSet, tmp_path: Path, protected: bool, least: float, most: float
) -> None:
    """One step of SGD on one image, captured; the mod is all that stands between the server and the image."""
    from gradveil.protection.flower import mod

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(144, 40), nn.Sigmoid(), nn.Linear(40, 3))
    message()
    watched = strategy(tmp_path, input_shape=[1, 12, 12], num_classes=3, mean=[0.5], std=[0.25], local_steps=1)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    sent = send(watched, before)
    sent.metadata.__dict__["_message_id"] = "one"
    x, y = shapes.private.x[:1], shapes.private.y[:1]

    def train(received: Any, context: Any) -> Any:
        loss = nn.functional.cross_entropy(net((x - 0.5) / 0.25), y)
        found = torch.autograd.grad(loss, list(net.parameters()))
        moved = {n: p.detach() - 0.1 * g for (n, p), g in zip(net.named_parameters(), found, strict=True)}
        return reply_of(received, moved, 7, 1)

    reply = mod("gaussian:std=0.1")(sent, context, train) if protected else train(sent, context)
    watched.aggregate_train(1, [reply])
    folder = tmp_path / "round-001"
    rebuilt = gv.attack_update(
        folder / f"client-{reply.metadata.src_node_id}.safetensors",
        nn.Sequential(nn.Flatten(), nn.Linear(144, 40), nn.Sigmoid(), nn.Linear(40, 3)),
        attacks=["linear"],
        before=folder / "before.safetensors",
    )
    quality = float(metrics.psnr(x, rebuilt.by_attack["linear"].images).mean())
    assert least < quality < most
