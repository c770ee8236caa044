"""A Flower mod that protects the outgoing update: one changed line, `@app.train(mods=[gradveil.flower.mod("prune")])`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from gradveil.core.errors import UserError
from gradveil.core.randomness import Streams
from gradveil.defenses.base import Refused
from gradveil.protection.audited import DefenseSource
from gradveil.protection.door import DoorOptions, text_kept_here
from gradveil.protection.flower.arrays import STATISTICS, Arrays, Kinds, Sends, check_values, protected_arrays, update_door
from gradveil.protection.flower.messages import check_facts, numpy_arrays

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict

Handler = Callable[["Message", "Context"], "Message"]
Mod = Callable[["Message", "Context", Handler], "Message"]
Records = Mapping[str, Arrays]  # array records by name
_SECRET = "gradveil-secret"
_BETWEEN = "/"  # record and array as one name, for a defense that looks at the whole update


def mod(
    defense: DefenseSource,
    *,
    untouched: Iterable[str] = STATISTICS,
    passed: Iterable[str] = (),
    sends: Sends = "weights",
    **options: Unpack[DoorOptions],
) -> Mod:
    """A mod that applies an update-stage defense to what a training function returns.

    All array records of a reply are one update; each is compared with the record of its name in the message, or with the
    only one where there is one. A record that was not received is not let out, unless `passed` names it: it then leaves
    unprotected if it is finite, and the log says so. Metrics leave as they are, if they are few single numbers, unless
    `passed` names their record. The text of an exception in the training function stays in the log of the client. Arrays
    in replies to other messages than training are not let out either. `untouched`, `sends` and `options` are as for
    `protect_arrays`. Put it last in the list of mods if others change the arrays too.

    An exported protection acts on the units that were audited alone. Learning rate, epochs and batch size of the client are
    read from `lr`, `learning-rate`, `local-epochs` and `batch-size` of the message and the run config, or stated as
    `training`; the number of images is `num-examples` of the reply, or stated as `images`.
    """
    door, kinds, open_records = update_door("mod", defense, options), Kinds(tuple(untouched), sends), set(passed)
    audited = door.audited

    def protect_reply(message: Message, context: Context, call_next: Handler) -> Message:
        number = message.metadata.group_id
        trains = message.metadata.message_type.partition(".")[0] == "train"
        try:
            with door.round(number):
                received = received_arrays(message.content) if trains else {}
                streams = message_streams(context, message.metadata.message_id, received) if trains else None
                training = audited.client_training(configs_of(message, context)) if trains else None
                audited.check(training, audited.images)
        except UserError as error:
            return _refusal(message, str(error))
        try:
            with door.round(number), text_kept_here("the training function"):
                reply = call_next(message, context)
            if reply.has_error():
                return reply
            with door.round(number):
                check_facts(reply.content, open_records)
                content = received_arrays(reply.content)
                closed = {key: arrays for key, arrays in content.items() if key not in open_records}
                if streams is None and closed:
                    raise Refused(f"the array record '{min(closed)}' is no answer to training; nothing is sent.")
                if streams is None:
                    return reply
                audited.check_images(training, _examples(reply.content))
                before = _joined({key: _counterpart(key, closed, received, kinds.sends) for key in closed})
                outgoing = protected_arrays(door, before, _joined(closed), kinds, streams("update"))
                more = {key: _passed(key, content[key], received) for key in content if key in open_records}
                outgoing.let_out(door, number, _joined(more))
        except UserError as error:
            return _refusal(message, str(error))
        _replace(reply.content, closed, outgoing.arrays)
        return reply

    return protect_reply


def configs_of(message: Message, context: Context) -> dict[str, Mapping[str, object]]:
    """The settings that a client may have been given, by where they are from."""
    return {"message": {k: v for c in message.content.config_records.values() for k, v in c.items()}, "run": context.run_config}


def _examples(content: RecordDict) -> int | None:
    """The number of images that a reply says it was trained on; None where it does not say one."""
    counts = {record["num-examples"] for record in content.metric_records.values() if "num-examples" in record}
    count = counts.pop() if len(counts) == 1 else None
    return int(count) if isinstance(count, int | float) and 1 <= count < 1e12 and count == int(count) else None


def _replace(content: RecordDict, records: Records, arrays: Arrays) -> None:
    """Put these arrays in the place of what the training function returned."""
    from flwr.app import Array, ArrayRecord

    for key, names in records.items():
        content[key] = ArrayRecord({name: Array(arrays[key + _BETWEEN + name]) for name in names})


def _passed(key: str, arrays: Arrays, received: Records) -> Arrays:
    """A record that leaves as it is: real and finite numbers, and what was received with its names, shapes and kinds."""
    for name, array in arrays.items():
        check_values(f"{key}/{name}", array)
    if key in received:
        kinds = ({name: (a.shape, a.dtype) for name, a in record.items()} for record in (arrays, received[key]))
        if next(kinds) != next(kinds):
            raise Refused(f"the array record '{key}' has other names, shapes or kinds than it was received with.")
    return arrays


def message_streams(context: Context, message_id: str, received: Records) -> Streams:
    """Random streams for the answer to one message.

    They depend on the client's secret, the message, every array received (the same message with another model must not
    bring the same noise) and on new randomness of the operating system.
    """
    from flwr.app import ConfigRecord

    if _SECRET not in context.state.config_records:
        context.state[_SECRET] = ConfigRecord({"secret": secrets.token_bytes(32)})
    key = hashlib.sha256(repr((context.state.config_records[_SECRET]["secret"], message_id)).encode())
    for record, arrays in received.items():
        for name, array in arrays.items():
            key.update(repr((record, name, array.dtype.str, array.shape)).encode() + array.tobytes())
    return Streams(key.digest())


def _joined(records: Records) -> Arrays:
    joined = {key + _BETWEEN + name: array for key, arrays in records.items() for name, array in arrays.items()}
    if len(joined) != sum(map(len, records.values())):
        raise Refused("two arrays of the reply have one name; nothing is sent.")
    return joined


def _counterpart(key: str, sent: Records, received: Records, sends: Sends) -> Arrays:
    if sends == "update":
        return {}
    if key in received:
        return received[key]
    if len(received) == len(sent) == 1:
        return next(iter(received.values()))
    raise Refused(
        f"the array record '{key}' was not received, so there is no update to protect in it; nothing is sent. "
        "If it is meant to leave as it is, name it in passed."
    )


def received_arrays(content: RecordDict) -> Records:
    return {key: numpy_arrays(record) for key, record in content.array_records.items()}


def _refusal(message: Message, reason: str) -> Message:
    """An answer that carries nothing but the reason: what could not be protected does not leave."""
    from logging import ERROR

    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.common.logger import log

    log(ERROR, "gradveil: %s", reason)
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=f"gradveil: {reason}"), reply_to=message)
