"""What a Flower server sees of each client, kept round by round in the form that `gradveil attack` reads."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.core.text import shorten
from gradveil.protection.audited import CONFIG_KEYS
from gradveil.protection.flower.arrays import STATISTICS, Arrays, check_values, save_arrays
from gradveil.protection.flower.messages import numpy_arrays
from gradveil.storage.files import write_tensors
from gradveil.storage.updates import MAX_EXAMPLES, MAX_FACT

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, Message
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy

S = TypeVar("S", bound="Strategy")


def capture(
    strategy: S,
    folder: str | Path,
    *,
    rounds: Collection[int] | None = None,
    untouched: Iterable[str] = STATISTICS,
    run_config: Mapping[str, object] | None = None,
    **facts: Any,
) -> S:
    """The same strategy, which from now on also writes down what goes out and what comes back in training.

    `FOLDER/round-001/before.safetensors` is the model that was sent out, `client-NODE.safetensors` the update of a node,
    and `buffers-NODE.safetensors` what else it sent (BatchNorm's statistics, counters). `facts` go into the updates
    beside the metrics that the client reported: `input_shape`, `num_classes`, `mean`, `std`, and the local training (`lr`,
    `local_epochs`, `local_batch_size`, `local_optimizer`, `mode`). Rate, epochs and batch size are taken from the training
    config, or from `run_config` (the app's: `context.run_config`), where these have them. With them, `gradveil attack
    client-NODE.safetensors --model … --before before.safetensors` and `gradveil audit --replay FOLDER` need nothing else.

    A broken reply never stops a round: where its arrays cannot be read, do not fit the model or are not finite, or its weight
    is no positive number, or its records have other names than those of most clients, it is logged, and the strategy does not
    get it.
    """
    from flwr.serverapp.exception import InconsistentMessageReplies

    facts = training_facts(run_config or {}) | facts
    writer = _Writer(Path(folder), rounds, tuple(untouched), facts, getattr(strategy, "weighted_by_key", None))
    configure, aggregate = strategy.configure_train, strategy.aggregate_train

    def configure_train(server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        writer.sent(server_round, arrays, config)
        messages: Iterable[Message] = configure(server_round, arrays, config, grid)
        return messages

    def aggregate_train(server_round: int, replies: Iterable[Message]) -> Any:
        usable = _of_one_form([reply for reply in list(replies) if writer.received(server_round, reply)])
        try:
            return aggregate(server_round, usable)
        except InconsistentMessageReplies as error:  # no form has most of the replies
            _warn("round %s: the model stays as it is: %s", server_round, one_line(error))
            return None, None

    # On the object itself, so that a strategy with a `start` of its own, or wrapped by another, is captured too.
    vars(strategy).update(configure_train=configure_train, aggregate_train=aggregate_train)
    return strategy


def training_facts(config: Mapping[str, object]) -> dict[str, object]:
    """What a Flower config says of local training, as facts of an update."""
    facts = {"lr": "lr", "epochs": "local_epochs", "batch_size": "local_batch_size"}
    return {facts[name]: config[key] for name, keys in CONFIG_KEYS.items() for key in keys if key in config}


def _of_one_form(replies: list[Message]) -> list[Message]:
    """The replies without those that differ in their names from most: a strategy refuses a round where names differ."""
    forms = [None if reply.has_error() else _form(reply) for reply in replies]
    (common, most), *others = Counter(form for form in forms if form is not None).most_common(2) or [("", 0)]
    if not others or others[0][1] == most:
        return replies
    for reply, form in zip(replies, forms, strict=True):
        if form not in (None, common):
            _warn("the reply of node %s is left out: its records differ from the others'", reply.metadata.src_node_id)
    return [reply for reply, form in zip(replies, forms, strict=True) if form in (None, common)]


def _form(reply: Message) -> str:
    """The names of all arrays and metrics, and the lengths of lists."""
    arrays = {(key, name) for key, record in reply.content.array_records.items() for name in record}
    metrics = {
        (key, name, len(value) if isinstance(value, list) else 0)
        for key, record in reply.content.metric_records.items()
        for name, value in record.items()
    }
    return repr((sorted(arrays), sorted(metrics)))


@dataclass
class _Writer:
    folder: Path
    rounds: Collection[int] | None
    untouched: tuple[str, ...]
    facts: dict[str, Any]
    weight: str | None  # the metric by which the strategy weights a reply, if it does
    before: Arrays = field(default_factory=dict)
    training: dict[str, object] = field(default_factory=dict)  # as the config of the round says

    def sent(self, round: int, arrays: ArrayRecord, config: ConfigRecord) -> None:
        self.before = numpy_arrays(arrays)
        if self._wanted(round):
            self.training = training_facts(config)
            write_tensors(self._place(round) / "before.safetensors", _tensors(self.before))

    def received(self, round: int, reply: Message) -> bool:
        """Write one reply down, and say whether a strategy can use it."""
        if reply.has_error():
            return True
        node = reply.metadata.src_node_id
        try:
            after, examples = self._arrays(reply), self._examples(reply)
        except Exception as error:  # input from a stranger, whatever is wrong with it
            _warn("the reply of node %s is left out: %s", node, shorten(one_line(error), 200))
            return False
        try:
            if self._wanted(round):
                self._write(round, node, after, examples, reply)
        except Exception as error:
            _warn("the update of node %s is not captured: %s", node, shorten(one_line(error), 200))
        return True

    def _arrays(self, reply: Message) -> dict[str, NDArray[Any]]:
        records = reply.content.array_records.values()
        if not records:
            raise UserError("it holds no arrays.")
        after = {name: array for record in records for name, array in numpy_arrays(record).items()}
        for name, array in after.items():
            check_values(name, array)
            if name in self.before and self.before[name].shape != array.shape:
                shapes = f"{shape_text(array.shape)}, not {shape_text(self.before[name].shape)}"
                raise UserError(f"'{name}' is {shapes}.")
        return after

    def _write(self, round: int, node: int, after: Arrays, examples: int, reply: Message) -> None:
        reported = {key: dict(record) for key, record in reply.content.metric_records.items()}
        size = len(json.dumps(reported))  # a client must not make the record of its update unreadable
        told = reported if size <= MAX_FACT else f"metrics of {size:,} bytes, left out"
        facts = {**self.facts, **self.training, "round": round, "reported": told}
        path = self._place(round) / f"client-{node}.safetensors"
        received = {name: a for name, a in after.items() if name in self.before}
        written = save_arrays(path, self.before, received, examples=examples, untouched=self.untouched, **facts)
        if rest := {name: a for name, a in after.items() if name not in written}:
            write_tensors(self._place(round) / f"buffers-{node}.safetensors", _tensors(rest))

    def _wanted(self, round: int) -> bool:
        return self.rounds is None or round in self.rounds

    def _place(self, round: int) -> Path:
        return self.folder / f"round-{round:03d}"

    def _examples(self, reply: Message) -> int:
        name = self.weight or "num-examples"
        values = [record[name] for record in reply.content.metric_records.values() if name in record]
        if not values and self.weight:
            raise UserError(f"it has no metric '{name}'.")
        for value in values:
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"its metric '{name}' is no positive number.")
        return max(1, int(min(float(str(values[0])), MAX_EXAMPLES))) if values else 1


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}


def _warn(text: str, *values: object) -> None:
    from flwr.common.logger import log

    log(logging.WARNING, f"gradveil: {text}", *values)
