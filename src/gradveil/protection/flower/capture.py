"""What a Flower server sees of each client, kept round by round in the form that `gradveil attack` reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from gradveil.core.errors import UserError
from gradveil.protection.flower.arrays import STATISTICS, Arrays, save_arrays
from gradveil.storage.files import write_tensors

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
    **facts: Any,
) -> S:
    """The same strategy, which from now on also writes down what goes out and what comes back in training.

    `FOLDER/round-001/before.safetensors` is the model that was sent out, `client-NODE.safetensors` the update of a node,
    and `buffers-NODE.safetensors` what else it sent (BatchNorm's statistics, counters). `facts` go into the updates
    beside the metrics that the client reported: `input_shape`, `num_classes`, `mean`, `std`, `local_steps`, `lr` (taken
    from the training config where it has one). With them, `gradveil attack client-NODE.safetensors --model …
    --before before.safetensors` needs nothing else.
    """
    weight = getattr(strategy, "weighted_by_key", "num-examples")
    writer = _Writer(Path(folder), rounds, tuple(untouched), facts, weight)
    configure, aggregate = strategy.configure_train, strategy.aggregate_train

    def configure_train(server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        writer.sent(server_round, arrays, config)
        messages: Iterable[Message] = configure(server_round, arrays, config, grid)
        return messages

    def aggregate_train(server_round: int, replies: Iterable[Message]) -> Any:
        arrived = list(replies)
        for reply in arrived:
            writer.received(server_round, reply)
        return aggregate(server_round, arrived)

    # On the object itself, so that a strategy with a `start` of its own, or wrapped by another, is captured too.
    vars(strategy).update(configure_train=configure_train, aggregate_train=aggregate_train)
    return strategy


@dataclass
class _Writer:
    folder: Path
    rounds: Collection[int] | None
    untouched: tuple[str, ...]
    facts: dict[str, Any]
    weight: str  # the metric that holds the number of examples
    before: Arrays = field(default_factory=dict)
    lr: dict[str, Any] = field(default_factory=dict)

    def sent(self, round: int, arrays: ArrayRecord, config: ConfigRecord) -> None:
        if self._wanted(round):
            self.before = _numpy(arrays)
            self.lr = {"lr": config["lr"]} if "lr" in config else {}
            write_tensors(self._place(round) / "before.safetensors", _tensors(self.before))

    def received(self, round: int, reply: Message) -> None:
        """Write one reply down. A broken one is the strategy's to judge: it is told of and never stops the round."""
        if not self._wanted(round) or reply.has_error():
            return
        node = reply.metadata.src_node_id
        try:
            after = {name: a for record in reply.content.array_records.values() for name, a in _numpy(record).items()}
            reported = {key: dict(record) for key, record in reply.content.metric_records.items()}
            facts = {**self.lr, **self.facts, "round": round, "reported": reported}
            path = self._place(round) / f"client-{node}.safetensors"
            received = {name: a for name, a in after.items() if name in self.before}
            examples = self._examples(reply)
            written = save_arrays(path, self.before, received, examples=examples, untouched=self.untouched, **facts)
            if rest := {name: a for name, a in after.items() if name not in written}:
                write_tensors(self._place(round) / f"buffers-{node}.safetensors", _tensors(rest))
        except (UserError, ValueError, TypeError) as error:
            from logging import WARNING

            from flwr.common.logger import log

            log(WARNING, "gradveil: the update of node %s is not captured: %s", node, error)

    def _wanted(self, round: int) -> bool:
        return self.rounds is None or round in self.rounds

    def _place(self, round: int) -> Path:
        return self.folder / f"round-{round:03d}"

    def _examples(self, reply: Message) -> int:
        records = reply.content.metric_records.values()
        return next((max(1, int(r[self.weight])) for r in records if self.weight in r), 1)


def _numpy(record: ArrayRecord) -> dict[str, np.ndarray[Any, Any]]:
    return {name: array.numpy() for name, array in record.items()}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}
