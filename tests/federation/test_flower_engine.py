"""The Flower engine: the inline engine's curves to the last bit, and rounds that go on without broken clients."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_faults import Moody
from torch import nn

from gradveil.core.errors import UserError
from gradveil.data import DataSet
from gradveil.federation import FederationPlan, History, train
from gradveil.federation.faults import Failure, OutOfTime, Reply, at_most
from gradveil.federation.rounds import Federation

pytest.importorskip("flwr", reason="the flower engine needs flwr")
pytest.importorskip("ray", reason="the flower engine needs ray")

from gradveil.federation import flower_engine

SMALL = {"clients": 3, "images_per_client": 12, "batch_size": 4}
TIMES = ("seconds", "seconds_per_round", "cpu_seconds_per_round", "seconds_prepare")


@pytest.fixture(autouse=True)
def one_thread() -> Iterable[None]:
    """As in the actors: sums over several threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def a_run() -> None:
    """Flower lets nobody write a message outside of a run."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture
def bounded() -> Iterable[None]:
    """A simulation that hangs fails its test, and no more."""

    def ring(*_: Any) -> None:
        raise TimeoutError("the simulation took more than five minutes")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def same(one: History, other: History) -> None:
    assert all(torch.equal(one.state[n], other.state[n]) for n in one.state)
    a, b = one.to_json(), other.to_json()
    assert {k: v for k, v in a.items() if k not in TIMES} == {k: v for k, v in b.items() if k not in TIMES}


@pytest.mark.slow
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    ("network", "defense", "how"),
    [
        ("normed", "gaussian:std=0.01", {"sampled": 2, "partition": "dirichlet", "cosine_every": 1}),
        ("dropping", "precode:k=8+prune:ratio=0.7", {"fedsgd": True, "lr": 0.1}),
        ("plain", "mixup", {"defended": 1, "schedule": "exponential:gamma=0.9"}),
    ],
)
def test_the_engines_agree_to_the_last_bit(
    request: pytest.FixtureRequest, data: DataSet, network: str, defense: str, how: dict[str, Any]
) -> None:
    module = request.getfixturevalue(network)
    options = {"rounds": 3, "seed": 7, **SMALL, **how}
    same(
        train(module, data, defense, FederationPlan(**options)),
        train(module, data, defense, FederationPlan(engine="flower", **options)),
    )


def without_the_first(module: nn.Module, data: DataSet, rounds: int) -> dict[str, torch.Tensor]:
    """The state after rounds in which only clients 1 and 2 took part."""
    federation = Federation(module, data, "none", FederationPlan(rounds=rounds, **SMALL))
    server = federation.server()
    participants = [federation.participant(k) for k in (1, 2)]
    for round in range(rounds):
        server.aggregate(round, [p.reply(server.state, round) for p in participants])
    return server.state


WORDS = {
    "raise": "raised RuntimeError: out of memory",
    "nan": "not finite",
    "shape": "the model's is 8×36",
    "huge": "norm",
    "exit": "died",
    "slow": "took more than the 1 s it had",
}


@pytest.mark.slow
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    ("engine", "faults", "deadline"),
    [
        ("flower", ("raise", "nan", "shape", "huge", "exit", "raise"), None),
        ("flower", ("slow", "nan"), 1),
        ("inline", ("raise", "nan", "shape", "huge"), None),
        ("inline", ("slow", "nan"), 1),
    ],
)
def test_a_fault_costs_one_update_and_no_more(
    plain: nn.Module, data: DataSet, tmp_path: Path, engine: str, faults: tuple[str, ...], deadline: float | None
) -> None:
    defense = Moody(str(tmp_path), faults)
    many = len(faults)
    history = train(plain, data, defense, FederationPlan(rounds=many, defended=1, engine=engine, deadline=deadline, **SMALL))
    assert [(e.round, e.client) for e in history.events] == [(i + 1, 0) for i in range(many)]
    for how, event in zip(faults, history.events, strict=True):
        assert WORDS[how] in event.message, (how, event)
        assert "\n" not in event.message
    assert len(history.acc_test) == many
    expected = without_the_first(plain, data, many)
    assert all(torch.equal(history.state[n], t) for n, t in expected.items())


@pytest.mark.slow
@pytest.mark.usefixtures("bounded")
def test_it_goes_on_where_it_stood_and_tells_engines_apart(plain: nn.Module, data: DataSet, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(text: str, done: int, total: int) -> None:
        if text.startswith("training") and done == 1:
            raise Stopped

    how = {"rounds": 3, "engine": "flower", **SMALL}
    with pytest.raises(Stopped):  # what the server's side raises comes out, and nothing is left running
        train(plain, data, "none", FederationPlan(**how), folder=tmp_path, progress=stop)
    import ray

    assert not ray.is_initialized()
    resumed = train(plain, data, "none", FederationPlan(**how), folder=tmp_path)
    same(resumed, train(plain, data, "none", FederationPlan(rounds=3, **SMALL)))
    with pytest.raises(UserError, match="engine=flower, not inline"):
        train(plain, data, "none", FederationPlan(**{**how, "engine": "inline"}), folder=tmp_path)


# -- the transport alone, on a grid that plays the nodes -----------------------------------------------------------------


class FakeGrid:
    """Nodes 100, 101 …, whose replies `answer` makes at once, or never where it gives None."""

    def __init__(self, clients: int, answer: Callable[[int, Any], Any]):
        self.nodes, self._answer = {100 + k: k for k in reversed(range(clients))}, answer
        self.asked: list[int] = []
        self._ready: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: list[Any]) -> list[str]:
        from flwr.app import ConfigRecord, Message, RecordDict

        names = []
        for message in messages:
            name, client = str(len(self._ready)), self.nodes[message.metadata.dst_node_id]
            message.metadata.__dict__["_message_id"] = name
            if message.metadata.message_type == "query":
                content: Any = RecordDict({"facts": ConfigRecord({"client": client})})
            else:
                self.asked.append(client)
                content = self._answer(client, message)
            self._ready[name] = None if content is None else Message(content, reply_to=message)
            names.append(name)
        return names

    def pull_messages(self, names: list[str]) -> list[Any]:
        replies = [self._ready[n] for n in names if self._ready[n] is not None]
        for message in replies:
            self._ready[message.metadata.reply_to_message_id] = None
        return replies


def transport(grid: FakeGrid, started: Path, deadline: float | None = None) -> flower_engine._Transport:
    plan = FederationPlan(rounds=1, clients=len(grid.nodes), deadline=deadline)
    return flower_engine._Transport(grid, plan, started, threading.Event())  # type: ignore[arg-type]


def good(client: int, message: Any) -> Any:
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    tensors = {name: torch.full_like(t, client) for name, t in flower_engine._tensors(message, "state").items()}
    facts = ConfigRecord({"kind": "delta", "examples": 5})
    return RecordDict({"facts": facts, "update": ArrayRecord(tensors), "buffers": ArrayRecord()})


STATE = {"w": torch.zeros(2, 3), "b": torch.zeros(())}


def test_replies_find_their_clients(tmp_path: Path) -> None:
    grid = FakeGrid(4, good)
    replies = transport(grid, tmp_path)(STATE, 0, [1, 3])
    assert sorted(grid.asked) == [1, 3]
    for reply in replies:
        assert isinstance(reply, Reply)
        assert reply.update.examples == 5
        assert {n: t.shape for n, t in reply.update.tensors.items()} == {n: t.shape for n, t in STATE.items()}
        assert all(bool((t == reply.client).all()) for t in reply.update.tensors.values())


def test_a_client_that_hangs_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flower_engine, "_GRACE", 0)
    grid = FakeGrid(3, lambda k, message: None if k == 1 else good(k, message))
    ask = transport(grid, tmp_path, 0.2)
    first = {r.client: r for r in ask(STATE, 0, [0, 1, 2])}
    second = {r.client: r for r in ask(STATE, 1, [0, 1, 2])}
    assert first[1] == Failure(1, "did not answer, and nobody else for 0.2 s")
    assert second[1] == Failure(1, "was still at work on round 1")
    assert grid.asked == [0, 1, 2, 0, 2]
    assert all(isinstance(replies[k], Reply) for replies in (first, second) for k in (0, 2))


def test_a_message_that_met_no_actor_is_sent_again(tmp_path: Path) -> None:
    """Client 0 dies at its work; the first message to client 1 is lost with it, unread."""
    from flwr.app import Error

    def dying(client: int, message: Any) -> Any:
        if client == 0:
            (tmp_path / message.metadata.message_id).touch()
        return good(client, message) if client == 1 and grid.asked.count(1) > 1 else Error(0, "actor unavailable")

    grid = FakeGrid(2, dying)
    replies = {r.client: r for r in transport(grid, tmp_path)(STATE, 0, [0, 1])}
    assert replies[0] == Failure(0, "died: actor unavailable")
    assert isinstance(replies[1], Reply)
    assert grid.asked == [0, 1, 1]


def test_what_cannot_work_at_all_is_no_fault_of_a_client(tmp_path: Path) -> None:
    from flwr.app import ConfigRecord, RecordDict

    def refused(client: int, message: Any) -> Any:
        return RecordDict({"facts": ConfigRecord({"refused": "this defense does not fit."})})

    with pytest.raises(UserError, match="does not fit"):
        transport(FakeGrid(2, refused), tmp_path)(STATE, 0, [0])


def test_time_that_is_over_is_over_even_for_code_that_catches_everything() -> None:
    import time

    with pytest.raises(OutOfTime, match="more than the 0.1 s"), at_most(0.1):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue


def test_a_reply_that_cannot_be_read_is_a_failure_of_one_client(tmp_path: Path) -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    def broken(client: int, message: Any) -> Any:
        content = good(client, message)
        if client == 1:
            content["update"]["w"] = Array("float32", (2, 3), "numpy.ndarray", b"")
        elif client == 2:
            content["facts"] = ConfigRecord({"kind": "delta", "examples": 2**62})
        elif client == 3:
            del content["update"]
        elif client == 4:
            content["facts"] = ConfigRecord({"kind": "delta", "examples": 5, "cosine": math.inf})
        elif client == 5:
            content = RecordDict({"update": ArrayRecord()})
        return content

    replies = {r.client: r for r in transport(FakeGrid(6, broken), tmp_path)(STATE, 0, list(range(6)))}
    assert isinstance(replies.pop(0), Reply)
    for reply in replies.values():
        assert isinstance(reply, Failure)
        assert reply.reason.startswith("sent a reply that cannot be read (") and "\n" not in reply.reason


@pytest.mark.slow
def test_ray_asks_for_a_token_listens_on_loopback_and_asks_no_cloud(tmp_path: Path) -> None:
    """In a process of its own: Ray reads these settings when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, str(Path(__file__).with_name("ray_probe.py")), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert lines["listens"] in ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1
    assert lines["proxy"] == "True"  # clients' code has the network that it had
    assert lines["stranger"].startswith("refused")
    assert lines["requests"] == "[]"
