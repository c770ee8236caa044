"""Flower messages that lie: what a server sends to mod and guard, and what clients send to a captured strategy."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from damage import CLASSES, HUGE, SHAPE, Job, Random, damaged, text, value
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fuzz_updates import DATA, victim

from gradveil.core.errors import UserError
from gradveil.protection import flower

logging.getLogger("flwr").setLevel(logging.CRITICAL)
TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
_numbers = itertools.count()
_DTYPES = ("float32", "float32", "float64", "float16", "int64", "complex64", "object", "U3", "V8", "no such type", "")
_COUNTS = (float("inf"), float("nan"), -1, 0, 1e308, 2**62, 12, 0.5)


def _array(rng: Random, values: np.ndarray[Any, Any]) -> Array:
    """An array whose header, type, shape or bytes may lie."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    content, dtype, shape = buffer.getvalue(), str(values.dtype), list(values.shape)
    if rng.random() < 0.4:
        content = rng.choice((b"", damaged(rng, content), damaged(rng, content), rng.randbytes(40), content[:-1]))
    if rng.random() < 0.2:
        lie = tuple(rng.choice((*HUGE, 1, 3)) % 2**62 for _ in range(rng.randrange(4)))
        content = content.replace(repr(values.shape).encode(), repr(lie).encode()[:40], 1)
    if rng.random() < 0.2:
        dtype = rng.choice(_DTYPES)
    if rng.random() < 0.2:
        shape = [rng.choice((*HUGE, -1, 1)) % 2**62 for _ in range(rng.randrange(4))]
    return Array(dtype=dtype, shape=tuple(shape), stype=rng.choice(("numpy.ndarray",) * 9 + ("", "pickle")), data=content)


def _record(rng: Random) -> ArrayRecord:
    arrays = {}
    for name, tensor in victim().state_dict().items():
        values = tensor.numpy().astype(rng.choice(("f4",) * 12 + ("f8", "f2", "i8", "c8")))
        if rng.random() < 0.1:
            values = values.copy()
            values.flat[0] = rng.choice((np.nan, np.inf, 0)) if values.dtype.kind in "fc" else 0
        if rng.random() < 0.1:
            name = rng.choice((name + "x", "", "../../x", text(rng, 6)))
        if rng.random() < 0.95:
            arrays[name] = _array(rng, values) if rng.random() < 0.3 else Array(values)
    return ArrayRecord(arrays)


def _content(rng: Random) -> RecordDict:
    content = RecordDict(
        {rng.choice(("arrays",) * 9 + ("", "other", text(rng, 5))): _record(rng) for _ in range(rng.choice((1, 1, 1, 0, 2)))}
    )
    if rng.random() < 0.9:
        count = rng.choice(_COUNTS) if rng.random() < 0.4 else 12
        content["metrics"] = MetricRecord({rng.choice(("num-examples",) * 9 + ("loss",)): count})
    settings: dict[str, Any] = {
        "lr": rng.choice((0.1, 0.1, 0.0, float("nan"), -1.0, 1e308)),
        "server-round": rng.choice((1, 1, 0, -1, 2**62)),
    }
    if rng.random() < 0.2:
        settings[text(rng, 6)] = rng.choice((text(rng, 20), 1, [1.0, 2.0], b"\0"))
    content["config"] = ConfigRecord(settings)
    return content


def _message(content: RecordDict) -> Message:
    message = Message(content, dst_node_id=7, message_type="train")
    message.metadata.__dict__["_message_id"] = f"message-{next(_numbers)}"
    return message


def _context() -> Context:
    return Context(run_id=1, node_id=7, node_config={"partition-id": 0}, state=RecordDict(), run_config={})


class _Strategy:
    """A strategy that takes any reply: only what the capture does is looked at."""

    weighted_by_key = "num-examples"

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: object) -> Iterable[Message]:
        return []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> list[Message]:
        return list(replies)


def capture(rng: Random, folder: Path) -> Job:
    """Replies of broken or hostile clients beside more intact ones: the round goes on with at least those."""
    facts: dict[str, Any] = {"input_shape": SHAPE, "num_classes": CLASSES}
    if rng.random() < 0.1:
        facts[rng.choice(("num_classes", "mean", "local_steps"))] = value(rng)
    strategy = flower.capture(_Strategy(), folder / "seen", **facts)  # type: ignore[type-var]
    state = ArrayRecord(victim().state_dict())
    asked = _message(RecordDict({"arrays": state}))
    intact = RecordDict({"arrays": state, "metrics": MetricRecord({"num-examples": 12})})
    good = [Message(intact, reply_to=asked) for _ in range(4)]  # the majority, which decides about names
    replies = [*good, *(Message(_content(rng), reply_to=asked) for _ in range(3))]
    settings = _content(rng).config_records["config"]

    def job() -> object:
        strategy.configure_train(1, state, settings, None)
        kept = strategy.aggregate_train(1, replies)
        if not all(reply in kept for reply in good) or not all(reply in replies for reply in kept):
            raise AssertionError("the strategy did not get the intact replies, or got one that nobody sent")
        return kept

    return job


def mod(rng: Random, folder: Path) -> Job:
    """A lying server in front of a mod: an answer, or an error message that carries nothing else."""
    protect = flower.mod(rng.choice(("prune:ratio=0.5", "gaussian:std=0.1", "quantize", "clip:norm=1")))
    message, broken = _message(_content(rng)), _content(rng) if rng.random() < 0.5 else None

    def trained(message: Message, _: Context) -> Message:
        return Message(broken or RecordDict({"arrays": ArrayRecord(victim().state_dict())}), reply_to=message)

    return lambda: _told(protect(message, _context(), trained))


def guard(rng: Random, folder: Path) -> Job:
    """A lying server in front of a guard."""
    message = _message(_content(rng))

    def job() -> object:
        shield = flower.protect(message, _context(), victim(), "prune:ratio=0.5", data=(DATA.private.x[:6], DATA.private.y[:6]))
        shield.backward(DATA.private.x[:2], DATA.private.y[:2])
        torch.optim.SGD(shield.model.parameters(), lr=0.1).step()
        return _told(shield.reply())

    return job


def _told(reply: Message) -> Message:
    if reply.has_error():
        raise UserError(reply.error.reason or "")
    return reply
