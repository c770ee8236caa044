"""Every defense in the training function of a Flower `ClientApp`, data and batch stages included.

guard = gradveil.flower.protect(message, context, Net(), "dcs2+prune:ratio=0.7", data=(x, y))
optimizer = torch.optim.SGD(guard.model.parameters(), lr=0.05)
for x, y in loader:                      # pixels in [0, 1]
    optimizer.zero_grad(); guard.backward(x, y); optimizer.step()
return guard.reply(loss=…)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import seeded
from gradveil.core.results import GradientChange
from gradveil.core.types import Batch, Tensors
from gradveil.core.update_change import update_change
from gradveil.defenses.base import Refused, Step, checked_update, is_plain
from gradveil.protection.audited import Audited, DefenseSource, options_of
from gradveil.protection.door import Checked, Door, DoorOptions, text_kept_here
from gradveil.protection.flower.arrays import check_arrays, matrices_of_one_row
from gradveil.protection.flower.messages import check_facts, numpy_arrays
from gradveil.protection.flower.mod import configs_of, message_streams, received_arrays
from gradveil.protection.loop import Shield, TaskOptions, as_batch, audited_task, check_names, setup_for

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message

_PROTECTED = "gradveil-protected"


def network(model: nn.Module, defense: DefenseSource, input_shape: tuple[int, int, int], seed: int = 0) -> nn.Module:
    """The network that both sides run under a defense; the server makes its first weights from it."""
    with seeded(seed, "network"):
        return Audited.of(defense).defense.model(model, input_shape)


def receive(model: nn.Module, arrays: ArrayRecord) -> None:
    """Load the weights a server sent into `model`, if they are its own: same names and shapes, and finite.

    The log warns of matrices that look made to single out images.
    """
    received = numpy_arrays(arrays)
    check_arrays(received, {name: t.detach().cpu().numpy() for name, t in model.state_dict().items()})
    if odd := matrices_of_one_row(received):
        logging.getLogger("gradveil").warning(
            "the rows of '%s' from the server are one row; is it to single out images?", odd[0]
        )
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in received.items()})


class GuardOptions(TaskOptions, DoorOptions, total=False):
    """What the model and the data do not say of the task, and how the guard lets the reply out."""


class Guard(Shield):
    """A shield for one round: `model` holds the weights received, `reply` is what may leave after training it."""

    def __init__(self, module: nn.Module, client: Client, door: Door, message: Message, record: str, private: Batch):
        super().__init__(module, client, door)
        self._message, self._record, self._private = message, record, private
        self._start = {name: t.detach().clone() for name, t in module.state_dict().items()}

    def _gradients_leave(self, gradients: Tensors) -> None:
        """A gradient of one step stays on the client; the round is recorded when its reply leaves."""

    def backward(self, x: Tensor, y: Tensor) -> None:
        with text_kept_here("guard.backward"):
            super().backward(x, y)

    def encode(self, context: Context) -> None:
        """The data stage on the client's images: as in an earlier round, or for the first time."""
        from flwr.app import ArrayRecord

        if _PROTECTED in context.state.array_records:
            stored = context.state.array_records[_PROTECTED].items()
            self.load_state_dict({name: torch.from_numpy(array.numpy().copy()) for name, array in stored})
        self._protected(self._client.task.model.state(), self._private)
        context.state[_PROTECTED] = ArrayRecord(self.state_dict())

    def reply(self, **metrics: float) -> Message:
        """The answer to the message: trained weights after the update stage, and how many examples they come from."""
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        number = self._message.metadata.group_id
        facts = MetricRecord({"num-examples": len(self._private), **metrics})
        with self._door.round(number):
            check_facts(RecordDict({"metrics": facts}))
            state, protected, buffers, change = self._outgoing()
            withheld = buffers if self._door.buffers == "withhold" else []
            state |= {name: self._start[name].clone() for name in withheld}
            self._door.let_out(number, state, protected, withheld, [] if withheld else buffers, change)
        content = RecordDict({self._record: ArrayRecord(state), "metrics": facts})
        return Message(content, reply_to=self._message)

    def _outgoing(self) -> tuple[Tensors, list[str], list[str], GradientChange | None]:
        """The state with its update protected, what the defense acted on, the buffers, and how much was changed."""
        state = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        for name, value in state.items():
            if not is_plain(value) or value.is_complex() or not bool(torch.isfinite(value).all()):
                raise Refused(f"training left values that are not finite in '{name}'; nothing is sent.")
            if (value.shape, value.dtype) != (self._start[name].shape, self._start[name].dtype):
                raise Refused(f"training left '{name}' with another shape or kind; nothing is sent.")
        parameters, first = dict(self.model.named_parameters(remove_duplicate=False)), dict[nn.Parameter, str]()
        for name, parameter in parameters.items():
            first.setdefault(parameter, name)  # of a tensor with several names, so that its noise is drawn once
        buffers = [name for name in state if name not in parameters]
        if strange := set(buffers) - set(dict(self.model.named_buffers(remove_duplicate=False))):
            raise Refused(f"'{min(strange)}' is neither a parameter nor a buffer of the model; nothing is sent.")
        trained = [n for p, n in first.items() if p.requires_grad or not torch.equal(state[n], self._start[n])]
        update = {name: state[name].double() - self._start[name].double() for name in trained}
        if not self._round and set(self.defense.stages) - {"model", "update"} and any(u.any() for u in update.values()):
            raise Refused("the model was trained without guard.backward, so its update is not protected; nothing is sent.")
        audited = self._door.audited
        audited.check_tensors(u.shape for u in update.values())
        if self._round and (protection := audited.protection):
            wanted = protection.training.number_of_mini_batches(protection.images)
            audited.refuse([f"{self._round} calls of backward, not {wanted}"] if self._round != wanted else [])
        client, start = self._client, {name: t.clone() for name, t in self._start.items()}
        step = Step(client.task, start, self._private, client.draws("update"), client.memory)
        with torch.no_grad():
            change = self._door.checked.update(update, step)
        moved = {name: self._start[name].double() + c for name, c in change.items()}
        sent = checked_update({name: state[name] for name in trained}, moved)
        state.update((name, sent[first[p]]) for name, p in parameters.items() if name in state and first[p] in sent)
        return state, list(sent), buffers, update_change(change, update)


def protect(
    message: Message,
    context: Context,
    model: nn.Module,
    defense: DefenseSource,
    data: Any,
    *,
    public: Any = None,
    record: str = "arrays",
    cache: Path | None = None,
    **options: Unpack[GuardOptions],
) -> Guard:
    """A guard for this round's training on `data` ((x, y) tensors or a torch Dataset, pixels in [0, 1]).

    The model in the message's array record `record` is checked before it is used. The client's secret and, with a
    data-stage defense, its protected images are kept in `context.state`: a round must not show a second encoding of them.
    `options` may give num_classes, loss, mean and std of the task, `buffers`, a `deadline` and a file for `evidence`.
    Buffers, such as BatchNorm's statistics, are withheld (the received ones go back) unless `buffers="send"`. An exported
    protection acts on the units that were audited alone; it gives the task, and finds them as a mod does.
    """
    check_names(options, GuardOptions.__annotations__)
    door = Door.of("guard", defense, options)
    method, audited = door.defense, door.audited
    with text_kept_here("reading the data"):
        private = as_batch(data)
    training = audited.client_training(configs_of(message, context))
    audited.check_images(training, len(private))
    if record not in message.content.array_records:
        raise UserError(f"the message has no array record '{record}'; name the model's with record=.")
    module = network(model, method, private.image_shape)
    receive(module, message.content.array_records[record])
    task = audited_task(audited, options_of(TaskOptions, options), private.image_shape)
    with text_kept_here("preparing the guard"):
        setup = setup_for(module, private, public, cache, task)
    audited.check_model(setup.model.mode, [t.shape for t in setup.model.parameters(setup.state).values()])
    streams = message_streams(context, message.metadata.message_id, received_arrays(message.content))
    client = prepare_client(_UntilUpdate(method, options.get("deadline"), remote=True), LocalTraining(), setup, streams)
    guard = Guard(module, client, door, message, record, private)
    if "data" in method.stages:
        guard.encode(context)
    return guard


class _UntilUpdate(Checked):
    """A defense without its update stage, which acts once, on all the local steps together."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return tensors
