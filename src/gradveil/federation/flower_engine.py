"""Federated training on Flower: the same rounds, carried as messages by its simulation runtime (Ray, on this machine).

Clients are prepared here, once, as in the inline engine, and lie in Ray's object store: a Flower node runs in whichever
actor is free, so any actor may play any client. Everything random in a round hangs on (seed, client, round), so where a
client runs changes nothing. A client whose process dies, or that does not answer in time, misses the round.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradveil.core.errors import UserError
from gradveil.core.types import Tensors, Update
from gradveil.federation.faults import Failure, Reply, too_late
from gradveil.federation.history import History
from gradveil.federation.plan import FederationPlan
from gradveil.federation.rounds import Federation, Participant, Server, run

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

# Read when Flower and Ray are imported: nothing is reported to anyone, and Ray listens on this machine alone (it would
# otherwise take its network address on Linux).
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_MOST_ACTORS = 8
_PAUSE = 0.05  # seconds between two looks for replies
_GRACE = 10  # seconds beyond the deadline, which clients keep by themselves unless they hang altogether
_RESTART = 120  # seconds that a dead actor may take to come back


def simulate(
    federation: Federation,
    server: Server,
    history: History,
    after_round: Callable[[History, Server], None] | None = None,
) -> History:
    """The rounds that `history` does not hold yet, with every client a node of a Flower simulation."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation
    except ImportError:
        raise UserError(
            "the flower engine needs Flower: pip install 'gradveil[flower]', or use engine inline."
        ) from None
    if ray.is_initialized():
        raise UserError("Ray already runs in this process and Flower's simulation would end it: ray.shutdown() first.")
    began = time.perf_counter()
    small = _slim(federation)
    participants = [small.participant(k) for k in range(federation.plan.clients)]
    small.progress = None  # it belongs to this process's terminal
    actors = _actors(federation.plan.sampled or federation.plan.clients)
    stopped, app = threading.Event(), ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        carrier = _Carrier(grid, federation.plan, Path(begun), stopped)
        history.seconds_prepare = time.perf_counter() - began
        run(federation, server, carrier, history, after_round)

    with _quiet(), tempfile.TemporaryDirectory() as begun:
        # Started here and not by Flower, so that the clients can be put into the store before the first message.
        _start(ray, actors)
        try:
            clients = _client_app(ray.put(participants), federation.plan.deadline, Path(begun))
            # Flower gives these on as the actors' options: an actor that died is started again.
            resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": -1, "max_task_retries": 0}
            run_simulation(app, clients, federation.plan.clients, backend_config={"client_resources": resources})
        finally:
            stopped.set()  # the server's thread outlives an interrupted simulation otherwise
            ray.shutdown()
    return history


def _start(ray: Any, actors: int) -> None:
    """Ray on this machine. It gives its own parts half a minute, which a machine at full load may exceed."""
    imports = os.pathsep.join(p for p in sys.path if p)
    try:
        ray.init(
            address="local",
            num_cpus=actors,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            runtime_env={"env_vars": {"PYTHONPATH": imports, "OMP_NUM_THREADS": "1"}},
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # Ray has no kind of its own for it
        text = " ".join(str(error).split())
        raise UserError(f"Ray did not start on this machine ({text}) Try again, or use engine inline.") from None


def _actors(clients: int) -> int:
    """One for each processor, but two at least: a slow client must not hold up all the others."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(free, clients, _MOST_ACTORS))


def _slim(federation: Federation) -> Federation:
    """The same federation with no more than its clients use: they need no test images."""
    small = copy.copy(federation)
    small.data = dataclasses.replace(federation.data, private=federation.images, test=federation.images[:0])
    return small


# -- the clients' side ---------------------------------------------------------------------------------------------------

_held: dict[str, list[Participant]] = {}  # in an actor's process: the clients, unpacked once


def _participant(reference: Any, number: int) -> Participant:
    import ray

    if reference.hex() not in _held:
        torch.set_num_threads(1)  # the actors share the processors among them
        _held.clear()
        _held[reference.hex()] = ray.get(reference)
    return _held[reference.hex()][number]


def _client_app(reference: Any, deadline: float | None, begun: Path) -> ClientApp:
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answer(message: Message, facts: dict[str, Any], **arrays: Tensors) -> Message:
        records = {name: ArrayRecord(tensors) for name, tensors in arrays.items()}
        return Message(RecordDict({"facts": ConfigRecord(facts), **records}), reply_to=message)

    @app.query()
    def who(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        _participant(reference, number)
        return answer(message, {"client": number})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number, round = int(context.node_config["partition-id"]), int(_facts(message)["round"])
        participant = _participant(reference, number)
        (begun / message.metadata.message_id).touch()
        try:
            with _at_most(deadline):
                reply = participant.reply(_tensors(message, "state"), round)
            sent = reply.update
            cosine = {} if reply.cosine is None else {"cosine": reply.cosine}
            facts = {"kind": sent.kind, "examples": sent.examples, **cosine}
            return answer(message, facts, update=sent.tensors, buffers=reply.buffers)
        except _OutOfTime as error:
            return answer(message, {"failed": str(error)})
        except UserError as error:
            return answer(message, {"refused": str(error)})
        except Exception as error:  # a fault of this client in this round, in the words of the inline engine
            return answer(message, {"failed": f"raised {type(error).__name__}: {' '.join(str(error).split())}"})

    return app


class _OutOfTime(BaseException):
    """Not an Exception: a client's own code may catch those."""


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Break off what takes longer. Only Unix has the alarm, and it rings between two steps of Python."""
    if seconds is None or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise _OutOfTime(too_late(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- the server's side ---------------------------------------------------------------------------------------------------


class _Carrier:
    """Brings a state to nodes and their replies back. A client that still works on an earlier round is not asked again.

    `begun` is a folder in which every message that a client took up has a file: Flower says the same of a client that
    died and of one whose message met an actor that was just coming back from another's death.
    """

    def __init__(self, grid: Grid, plan: FederationPlan, begun: Path, stopped: threading.Event):
        self._grid, self._begun, self._stopped = grid, begun, stopped
        self._patience = None if plan.deadline is None else plan.deadline + _GRACE
        self._open: dict[str, tuple[int, int]] = {}  # messages without a reply: client, and round from 1
        self._nodes = self._meet(plan.clients)

    def __call__(self, state: Tensors, round: int, chosen: Sequence[int]) -> list[Reply | Failure]:
        from flwr.app import ArrayRecord, ConfigRecord, RecordDict

        self._pull()  # late replies of earlier rounds: of no use, but their clients are free again
        busy = dict(self._open.values())
        content = RecordDict({"state": ArrayRecord(state), "facts": ConfigRecord({"round": round})})
        asked: dict[str, int] = {}

        def ask(client: int) -> None:
            name = self._send(content, "train", self._nodes[client])
            asked[name], self._open[name] = client, (client, round + 1)

        found: list[Reply | Failure] = []
        for k in chosen:
            if k in busy:
                found.append(Failure(k, f"was still at work on round {busy[k]}"))
            else:
                ask(k)
        began = time.monotonic()
        for name, message in self._collect(asked, self._patience):
            client = asked.pop(name)
            lost = message.has_error() and not (self._begun / name).exists()
            if lost and time.monotonic() - began < _RESTART:
                self._wait(10 * _PAUSE)
                ask(client)
            else:
                found.append(_read(message, client))
        return found + [Failure(k, f"did not answer, and nobody else for {self._patience:g} s") for k in asked.values()]

    def _meet(self, clients: int) -> dict[int, int]:
        """The node of every client: Flower numbers them at random, and only they know which part of the data is theirs."""
        from flwr.app import RecordDict

        while len(nodes := list(self._grid.get_node_ids())) < clients:
            self._wait(_PAUSE)
        asked = {self._send(RecordDict(), "query", node): node for node in nodes}
        self._open.update((name, (-1, 0)) for name in asked)
        found = {}
        for name, message in self._collect(asked, None):
            if message.has_error():
                raise RuntimeError(f"a Flower node did not start: {_reason(message)}")
            found[int(_facts(message)["client"])] = asked.pop(name)
        return found

    def _send(self, content: Any, kind: str, node: int) -> str:
        from flwr.app import Message

        (name,) = self._grid.push_messages([Message(content, node, kind)])
        return name

    def _collect(self, asked: Mapping[str, int], patience: float | None) -> Iterator[tuple[str, Message]]:
        """Replies as they come, until nothing is left in `asked`, from which the caller takes them, or until nobody has
        answered for `patience` seconds: a client that only queues for an actor is not given up."""
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


def _read(message: Message, client: int) -> Reply | Failure:
    if message.has_error():
        return Failure(client, f"died: {_reason(message)}")
    facts = _facts(message)
    if "refused" in facts:
        raise UserError(facts["refused"])  # no fault of this client: what was asked for cannot work
    if "failed" in facts:
        return Failure(client, facts["failed"])
    update = Update(_tensors(message, "update"), facts["kind"], facts["examples"])
    return Reply(client, update, _tensors(message, "buffers"), facts.get("cosine"))


def _reason(message: Message) -> str:
    """What Flower says of a failure, which may be a page, as a line."""
    text = " ".join((message.error.reason or "no reason given").split())
    return text if len(text) <= 160 else f"{text[:160]}…"


def _facts(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records["facts"])


def _tensors(message: Message, key: str) -> Tensors:
    record = message.content.array_records[key]
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower tells of every message, and of every fault with its traceback; here faults stand in the history."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
