"""A Flower mod that protects the outgoing update: one changed line, `@app.train(mods=[gradveil.flower.mod("prune")])`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from gradveil.core.errors import UserError
from gradveil.core.randomness import Streams
from gradveil.defenses import Defense
from gradveil.protection.flower.arrays import STATISTICS, Arrays, Sends, protect_arrays, update_defense

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict

Handler = Callable[["Message", "Context"], "Message"]
Mod = Callable[["Message", "Context", Handler], "Message"]
Records = Mapping[str, Arrays]  # array records by name
_SECRET = "gradveil-secret"
_BETWEEN = "\x1f"  # record and array as one name, for a defense that looks at the whole update


def mod(
    defense: str | Defense, *, untouched: Iterable[str] = STATISTICS, passed: Iterable[str] = (), sends: Sends = "weights"
) -> Mod:
    """A mod that applies an update-stage defense to what a training function returns.

    All array records of a reply are one update; each is compared with the record of its name in the message, or with the
    only one where there is one. A record that was not received is not let out, unless `passed` names it. `untouched` and
    `sends` are as for `protect_arrays`. Put it last in the list of mods if others change the arrays too.
    """
    method, patterns, open_records = update_defense(defense), tuple(untouched), set(passed)

    def protect_reply(message: Message, context: Context, call_next: Handler) -> Message:
        from flwr.app import Array, ArrayRecord

        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        received, rng = _arrays(message.content), message_streams(message, context)("update")
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        sent = {key: arrays for key, arrays in _arrays(reply.content).items() if key not in open_records}
        try:
            before = _joined({key: _counterpart(key, sent, received, sends) for key in sent})
            done = protect_arrays(before, _joined(sent), method, untouched=patterns, sends=sends, rng=rng)
        except UserError as error:
            return _refusal(message, str(error).replace(_BETWEEN, "/"))
        for key, arrays in sent.items():
            reply.content[key] = ArrayRecord({name: Array(done[key + _BETWEEN + name]) for name in arrays})
        return reply

    return protect_reply


def message_streams(message: Message, context: Context) -> Streams:
    """Random streams for the answer to one message.

    They depend on the client's secret, the message, every array received (the same message with another model must not
    bring the same noise) and on new randomness of the operating system.
    """
    from flwr.app import ConfigRecord

    if _SECRET not in context.state.config_records:
        context.state[_SECRET] = ConfigRecord({"secret": secrets.token_bytes(32)})
    key = hashlib.sha256(repr((context.state.config_records[_SECRET]["secret"], message.metadata.message_id)).encode())
    for record, arrays in _arrays(message.content).items():
        for name, array in arrays.items():
            key.update(repr((record, name, array.dtype.str, array.shape)).encode() + array.tobytes())
    return Streams(key.digest())


def _joined(records: Records) -> Arrays:
    return {key + _BETWEEN + name: array for key, arrays in records.items() for name, array in arrays.items()}


def _counterpart(key: str, sent: Records, received: Records, sends: Sends) -> Arrays:
    if sends == "update":
        return {}
    if key in received:
        return received[key]
    if len(received) == len(sent) == 1:
        return next(iter(received.values()))
    raise UserError(
        f"the array record '{key}' was not received, so there is no update to protect in it; nothing is sent. "
        "If it is meant to leave as it is, name it in passed."
    )


def _arrays(content: RecordDict) -> Records:
    return {key: {name: a.numpy() for name, a in record.items()} for key, record in content.array_records.items()}


def _refusal(message: Message, reason: str) -> Message:
    """An answer that carries nothing but the reason: what could not be protected does not leave."""
    from logging import ERROR

    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.common.logger import log

    log(ERROR, "gradveil: %s", reason)
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=f"gradveil: {reason}"), reply_to=message)
