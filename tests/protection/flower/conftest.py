"""Messages between a server and a client, without a run around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def net() -> nn.Module:
    """With BatchNorm: float statistics, and a whole-number counter."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(300, 3))


@pytest.fixture
def context() -> Any:
    from flwr.app import Context, RecordDict

    return Context(run_id=1, node_id=7, node_config={"partition-id": 0}, state=RecordDict(), run_config={})


@pytest.fixture
def message() -> Callable[..., Any]:
    """`message(arrays=state, more=…)`: array records by name, as a server sends them for training."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    number = iter(range(100))

    def make(kind: str = "train", **records: Any) -> Any:
        content = RecordDict({name: ArrayRecord(dict(state)) for name, state in records.items()})
        content["config"] = ConfigRecord({"lr": 0.1, "server-round": 1})
        found = Message(content, dst_node_id=7, message_type=kind)
        found.metadata.__dict__["_message_id"] = f"message-{next(number)}"
        return found

    return make
