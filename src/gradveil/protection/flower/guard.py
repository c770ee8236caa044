"""Every defense in the training function of a Flower `ClientApp`, data and batch stages included.

guard = gradveil.flower.protect(message, context, Net(), "dcs2+prune:ratio=0.7", data=(x, y))
optimizer = torch.optim.SGD(guard.model.parameters(), lr=0.05)
for x, y in loader:                      # pixels in [0, 1]
    optimizer.zero_grad(); guard.backward(x, y); optimizer.step()
return guard.reply(loss=…)
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.errors import UserError
from gradveil.core.gradients import Loss, ModelFunction, cross_entropy
from gradveil.core.types import Batch, LocalTraining, Tensors, generator
from gradveil.defenses import Defense, parse
from gradveil.defenses.base import Setup, Step
from gradveil.federation.rounds import seeded
from gradveil.protection.flower.arrays import check_arrays
from gradveil.protection.loop import Shield, as_batch

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message

_SECRET, _PROTECTED = "gradveil-secret", "gradveil-protected"


def network(model: nn.Module, defense: str | Defense, input_shape: tuple[int, int, int], seed: int = 0) -> nn.Module:
    """The network that both sides run under a defense; the server makes its first weights from it."""
    with seeded(seed, "network"):
        return parse(defense).model(model, input_shape)


def receive(model: nn.Module, arrays: ArrayRecord) -> None:
    """Load the weights a server sent into `model`, if they are its own: same names and shapes, and finite."""
    found = {name: array.numpy() for name, array in arrays.items()}
    check_arrays(found, {name: t.detach().cpu().numpy() for name, t in model.state_dict().items()})
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in found.items()})


class Guard(Shield):
    """A shield for one round: `model` holds the weights received, `reply` is what may leave after training it."""

    def __init__(
        self, module: nn.Module, client: Client, defense: Defense, message: Message, record: str, private: Batch
    ):
        super().__init__(module, client, defense)
        self._message, self._record, self._private = message, record, private
        self._start = {name: t.detach().clone() for name, t in module.state_dict().items()}
        # A guard lives for one round; draws must not begin anew in each.
        self._round = int.from_bytes(hashlib.sha256(message.metadata.message_id.encode()).digest()[:6], "little")

    def remember(self, protected: Batch) -> None:
        """What each image of the client became in the data stage, so that it is the same in every round."""
        self._known.update(
            (hashlib.sha256(image.numpy().tobytes()).hexdigest(), protected[i : i + 1])
            for i, image in enumerate(self._private.x.cpu())
        )

    def reply(self, **metrics: float) -> Message:
        """The answer to the message: trained weights after the update stage, and how many examples they come from."""
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        state = {name: t.detach() for name, t in self.model.state_dict().items()}
        for name, value in state.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise UserError(f"training left values that are not finite in '{name}'; nothing is sent.")
        trained = [n for n, p in self.model.named_parameters() if p.requires_grad and n in state]
        update = {name: state[name].double() - self._start[name].double() for name in trained}
        with torch.no_grad():
            update = self.defense.update(update, self._leaving())
        sent = {name: (self._start[name].double() + change).to(state[name]) for name, change in update.items()}
        facts = MetricRecord({"num-examples": len(self._private), **metrics})
        content = RecordDict({self._record: ArrayRecord({**state, **sent}), "metrics": facts})  # type: ignore[dict-item]
        return Message(content, reply_to=self._message)

    def _leaving(self) -> Step:
        client = self._client
        rng = generator(client.seed, "update", self._message.metadata.message_id)
        constants = (client.mean, client.std, client.num_classes)
        return Step(client.model, self._start, self._private, *constants, rng, client.memory)


def protect(
    message: Message,
    context: Context,
    model: nn.Module,
    defense: str | Defense,
    data: Any,
    *,
    public: Any = None,
    num_classes: int | None = None,
    loss: Loss = cross_entropy,
    mean: Iterable[float] | None = None,
    std: Iterable[float] | None = None,
    record: str = "arrays",
    cache: Path | None = None,
) -> Guard:
    """A guard for this round's training on `data` ((x, y) tensors or a torch Dataset, pixels in [0, 1]).

    The model in the message's array record `record` is checked before it is used. The client's secret seed and, with a
    data-stage defense, its protected images are kept in `context.state`: a round must not show a second encoding of them.
    """
    found, private = parse(defense), as_batch(data)
    if record not in message.content.array_records:
        raise UserError(f"the message has no array record '{record}'; name the model's with record=.")
    shape = tuple(private.x.shape[1:])
    module = network(model, found, shape)  # type: ignore[arg-type]
    receive(module, message.content.array_records[record])
    channels = shape[0]
    client = Client(
        ModelFunction(module, loss, "train" if module.training else "eval"),
        _UntilUpdate(found),
        LocalTraining(),
        state={name: t.detach().clone() for name, t in module.state_dict().items()},
        private=private,
        public=None if public is None else as_batch(public),
        num_classes=num_classes or int(private.hard_labels.max()) + 1,
        mean=torch.tensor(list(mean)) if mean is not None else torch.zeros(channels),
        std=torch.tensor(list(std)) if std is not None else torch.ones(channels),
        seed=_seed(context),
        cache=cache,
    )
    guard = Guard(module, client, found, message, record, private)
    if "data" in found.stages:
        guard.remember(_protected(context, client, client.model.state(), private))
    return guard


class _UntilUpdate(Defense):
    """A defense without its update stage, which acts once, on all the local steps together."""

    def __init__(self, inner: Defense):
        self._inner = inner

    @property
    def parts(self) -> tuple[Defense, ...]:
        return self._inner.parts

    def prepare(self, setup: Setup) -> Any:
        return self._inner.prepare(setup)

    def data(self, batch: Batch, step: Step) -> Batch:
        return self._inner.data(batch, step)

    def batch(self, batch: Batch, step: Step) -> Batch:
        return self._inner.batch(batch, step)

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        return self._inner.gradient(tensors, step)


def _seed(context: Context) -> int:
    """The client's own for the whole run, which no server can guess."""
    from flwr.app import ConfigRecord

    if _SECRET not in context.state.config_records:
        context.state[_SECRET] = ConfigRecord({"seed": secrets.randbits(62)})
    return int(context.state.config_records[_SECRET]["seed"])  # type: ignore[arg-type]


def _protected(context: Context, client: Client, state: Tensors, private: Batch) -> Batch:
    """The images after the data stage: as they were in an earlier round, or for the first time."""
    from flwr.app import ArrayRecord

    digest = np.frombuffer(hashlib.sha256(private.x.numpy().tobytes()).digest(), dtype=np.uint8)
    if _PROTECTED in context.state.array_records:
        kept = {name: array.numpy() for name, array in context.state.array_records[_PROTECTED].items()}
        if np.array_equal(kept["of"], digest):
            return Batch(torch.from_numpy(kept["x"].copy()), torch.from_numpy(kept["y"].copy()))
    done, _ = client.protect(state, private, "flower")
    kept_now: dict[str, Tensor] = {"x": done.x, "y": done.y, "of": torch.from_numpy(digest.copy())}
    context.state[_PROTECTED] = ArrayRecord(kept_now)
    return done
