"""Federated training on Flower: the same rounds, transported as messages by its simulation runtime (Ray, on this machine).

Clients are prepared here, once, as in the inline engine, and lie in Ray's object store: any actor may play any client.
Everything random in a round is drawn from (seed, client, round), so that the place of work changes nothing. A client
whose process dies, or that does not answer in time, misses the round.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from pydantic import BaseModel, Field

from gradveil.core.errors import UserError, one_line
from gradveil.core.text import shorten
from gradveil.core.types import Kind, Tensors, Update
from gradveil.federation.faults import Failure, OutOfTime, Reply, at_most, raised
from gradveil.federation.history import History
from gradveil.federation.plan import FederationPlan
from gradveil.federation.rounds import Federation, Participant, Server, run
from gradveil.processes.worker import cores
from gradveil.protection.flower.messages import numpy_arrays

if TYPE_CHECKING:
    from flwr.app import ConfigRecordValues, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from ray import ObjectRef

    Clients: TypeAlias = ObjectRef[list[Participant]]

# Read when Flower and Ray are imported: no telemetry, and Ray listens on this machine alone (on Linux it would otherwise
# take the machine's network address).
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_PROXIES = [case(f"{kind}_proxy") for kind in ("http", "https", "all", "no") for case in (str.lower, str.upper)]
_CLOSED_PORT, _LOOPBACK = "http://127.0.0.1:1", "127.0.0.1,localhost"
_MAX_ACTORS = 8
_PAUSE = 0.05  # seconds between two requests for replies
_GRACE = 10  # seconds beyond the deadline, which clients keep by themselves unless they hang
_RESTART = 120  # seconds that a dead actor may take to start again


def simulate(
    federation: Federation, server: Server, history: History, after_round: Callable[[History, Server], None] | None = None
) -> History:
    """Do the rounds that `history` does not hold yet, with every client as a node of a Flower simulation."""
    configure()
    try:
        import ray
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation
    except ImportError:
        remedy = "pip install 'gradveil[flower]', or use engine inline"
        raise UserError(f"the flower engine needs Flower: {remedy}.") from None
    if ray.is_initialized():
        raise UserError("Ray already runs in this process and Flower's simulation would end it: ray.shutdown() first.")
    began, plan = time.perf_counter(), federation.plan
    small = copy.copy(federation)  # clients need no test images
    small.data = dataclasses.replace(federation.data, private=federation.images, test=federation.images[:0])
    participants = [small.participant(k) for k in range(plan.clients)]
    small.progress = None  # it belongs to the terminal of this process
    stopped, app = threading.Event(), ServerApp()

    def main(grid: Grid, context: Context) -> None:
        transport = _Transport(grid, plan, Path(started), stopped)
        history.seconds_prepare = time.perf_counter() - began
        run(federation, server, transport, history, after_round)

    app.main()(main)
    with _quiet(), tempfile.TemporaryDirectory() as started:
        # Started here and not by Flower, so that the clients are in the object store before the first message.
        # One actor per core, but at least two: a slow client must not block all others.
        _start_ray(max(2, min(cores(), plan.sampled or plan.clients, _MAX_ACTORS)))
        try:
            clients = _client_app(ray.put(participants), plan.deadline, Path(started))
            # Flower passes these on as the options of its actors: an actor that died is started again.
            resources: dict[str, ConfigRecordValues] = {"num_cpus": 1, "num_gpus": 0.0}
            resources |= {"max_restarts": -1, "max_task_retries": 0}
            run_simulation(app, clients, plan.clients, backend_config={"client_resources": resources})
        finally:
            stopped.set()  # otherwise the server's thread outlives an interrupted simulation
            ray.shutdown()
    return history


def configure() -> None:
    """Set what Flower and Ray read from the environment when they are imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # who connects must know the token of this process
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _start_ray(actors: int) -> None:
    """Start Ray on this machine. Ray gives its parts half a minute, which a machine at full load may exceed."""
    import ray

    variables = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    if not _authenticated():
        logging.getLogger("gradveil").warning("Ray was imported before, so it runs on this machine without authentication.")
    try:
        with _no_requests() as before:
            ray.init(
                address="local",
                num_cpus=actors,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                runtime_env={"env_vars": {**variables, **before}},
                _node_ip_address="127.0.0.1",
            )
    except Exception as error:  # Ray has no exception class for it
        reason = one_line(error)
        raise UserError(f"Ray did not start on this machine ({reason}). Try again, or use engine inline.") from None


def _authenticated() -> bool:
    """Whether Ray asks everyone who connects for the token of this process; old versions cannot."""
    raylet = importlib.import_module("ray._raylet")
    mode = getattr(raylet, "get_authentication_mode", None)
    return mode is not None and bool(mode() == raylet.AuthenticationMode.TOKEN)


@contextmanager
def _no_requests() -> Iterator[dict[str, str]]:
    """Processes that are started meanwhile reach no other machine by HTTP. The variables that give it back to actors.

    With its dashboard and its usage statistics switched off, Ray still asks the metadata services of three clouds for a name.
    """
    before = {name: os.environ.get(name) for name in _PROXIES}
    os.environ.update(dict.fromkeys(_PROXIES, _CLOSED_PORT) | {"no_proxy": _LOOPBACK, "NO_PROXY": _LOOPBACK})
    try:
        yield {name: value or "" for name, value in before.items()}
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower logs every message, and every fault with its traceback; here faults are in the history."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


# -- messages ----------------------------------------------------------------------------------------------------------


class _Facts(BaseModel):
    """What a message says beside its tensors: the server the round, a client who it is, what it sends or why not."""

    round: int = 0
    client: int = -1
    kind: Kind = "gradient"
    examples: int = Field(default=0, ge=0, le=2**40)
    cosine: float | None = Field(default=None, ge=-1, le=1)
    failed: str = ""  # the fault of this client in this round
    refused: str = ""  # no client can do what was asked for


def _content(facts: _Facts, **tensors: Tensors) -> RecordDict:
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    written = ConfigRecord(facts.model_dump(exclude_unset=True, exclude_none=True))
    return RecordDict({"facts": written, **{name: ArrayRecord(group) for name, group in tensors.items()}})


def _facts(message: Message) -> _Facts:
    return _Facts.model_validate(dict(message.content.config_records["facts"]))


def _tensors(message: Message, name: str) -> Tensors:
    arrays = numpy_arrays(message.content.array_records[name])
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


# -- the side of the clients -------------------------------------------------------------------------------------------

_unpacked: dict[str, list[Participant]] = {}  # in the process of an actor: the clients


def _participant(reference: Clients, context: Context) -> Participant:
    import ray

    if reference.hex() not in _unpacked:
        torch.set_num_threads(1)  # the actors share the processors
        _unpacked.clear()
        _unpacked[reference.hex()] = ray.get(reference)
    return _unpacked[reference.hex()][int(context.node_config["partition-id"])]


def _client_app(reference: Clients, deadline: float | None, started: Path) -> ClientApp:
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def identify(message: Message, context: Context) -> Message:
        return Message(_content(_Facts(client=_participant(reference, context).number)), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        participant = _participant(reference, context)
        (started / message.metadata.message_id).touch()
        tensors: dict[str, Tensors] = {}
        try:
            with at_most(deadline):
                reply = participant.reply(_tensors(message, "state"), _facts(message).round)
            facts = _Facts(kind=reply.update.kind, examples=reply.update.examples, cosine=reply.cosine)
            tensors = {"update": reply.update.tensors, "buffers": reply.buffers}
        except OutOfTime as error:
            facts = _Facts(failed=str(error))
        except UserError as error:
            facts = _Facts(refused=str(error))
        except (Exception, SystemExit) as error:
            facts = _Facts(failed=raised(error))
        return Message(_content(facts, **tensors), reply_to=message)

    app.query()(identify)
    app.train()(train)
    return app


# -- the side of the server --------------------------------------------------------------------------------------------


class _Transport:
    """Brings a state to nodes and their replies back. A client that still works on an earlier round is not asked again.

    `started` is a folder with one file per message that a client began to work on: Flower reports the same error for a
    client that died and for a message that reached an actor which was just being restarted.
    """

    def __init__(self, grid: Grid, plan: FederationPlan, started: Path, stopped: threading.Event):
        self._grid, self._started, self._stopped = grid, started, stopped
        self._patience = None if plan.deadline is None else plan.deadline + _GRACE
        self._open: dict[str, tuple[int, int]] = {}  # messages without a reply: client, and round from 1
        self._nodes = self._identify(plan.clients)

    def __call__(self, state: Tensors, round: int, chosen: Sequence[int]) -> list[Reply | Failure]:
        self._pull()  # late replies of earlier rounds are of no use, but their clients are free again
        busy = dict(self._open.values())
        content = _content(_Facts(round=round), state=state)
        asked: dict[str, int] = {}

        def ask(client: int) -> None:
            name = self._send(content, "train", self._nodes[client])
            asked[name], self._open[name] = client, (client, round + 1)

        replies: list[Reply | Failure] = []
        for k in chosen:
            if k in busy:
                replies.append(Failure(k, f"was still at work on round {busy[k]}"))
            else:
                ask(k)
        began = time.monotonic()
        for name, message in self._collect(asked, self._patience):
            client = asked.pop(name)
            lost = message.has_error() and not (self._started / name).exists()
            if lost and time.monotonic() - began < _RESTART:
                self._wait(10 * _PAUSE)
                ask(client)
            else:
                replies.append(_reply(message, client))
        silent = f"did not answer, and nobody else for {self._patience or 0:g} s"
        return replies + [Failure(k, silent) for k in asked.values()]

    def _identify(self, clients: int) -> dict[int, int]:
        """The node of every client: Flower numbers nodes at random, and only they know their part of the data."""
        from flwr.app import RecordDict

        while len(nodes := list(self._grid.get_node_ids())) < clients:
            self._wait(_PAUSE)
        asked = {self._send(RecordDict(), "query", node): node for node in nodes}
        self._open.update((name, (-1, 0)) for name in asked)
        node_of = {}
        for name, message in self._collect(asked, None):
            if message.has_error():
                raise RuntimeError(f"a Flower node did not start: {_reason(message)}")
            node_of[_facts(message).client] = asked.pop(name)
        return node_of

    def _send(self, content: RecordDict, kind: str, node: int) -> str:
        from flwr.app import Message

        (name,) = self._grid.push_messages([Message(content, node, kind)])
        return str(name)

    def _collect(self, asked: Mapping[str, int], patience: float | None) -> Iterator[tuple[str, Message]]:
        """Replies as they arrive, until `asked` is empty (the caller removes what it received), or until nobody has
        answered for `patience` seconds: a client that waits for a free actor is not given up."""
        last = time.monotonic()
        while asked and (patience is None or time.monotonic() - last < patience):
            for name, message in self._pull():
                if name in asked:
                    last = time.monotonic()
                    yield name, message
            if asked:
                self._wait(_PAUSE)

    def _pull(self) -> list[tuple[str, Message]]:
        if not self._open:
            return []
        replies = [(m.metadata.reply_to_message_id, m) for m in self._grid.pull_messages(list(self._open))]
        for name, _ in replies:
            self._open.pop(name, None)
        return replies

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise RuntimeError("the simulation has ended")


def _reply(message: Message, client: int) -> Reply | Failure:
    if message.has_error():
        return Failure(client, f"died: {_reason(message)}")
    try:
        facts = _facts(message)
        if not (facts.refused or facts.failed):
            update = Update(_tensors(message, "update"), facts.kind, facts.examples)
            return Reply(client, update, _tensors(message, "buffers"), facts.cosine)
    except Exception as error:  # whatever is wrong with a reply, it must not stop the round
        return Failure(client, f"sent a reply that cannot be read ({type(error).__name__}: {shorten(one_line(error), 120)})")
    if facts.refused:
        raise UserError(facts.refused)  # no fault of this client: the settings cannot work
    return Failure(client, facts.failed)


def _reason(message: Message) -> str:
    """What Flower says of a failure, which may be a page, as one line."""
    return shorten(" ".join((message.error.reason or "no reason given").split()), 160)
