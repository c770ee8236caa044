"""Defenses that misbehave at every door out of a client: what leaves is an answer of the defense, or nothing.

    python benchmarks/faults/doors.py

Each defense of misbehaving.py stands once at each door: a shield, a Flower mod, a guard, and a client of the inline and of the
Flower engine. What leaves is compared with the only answers that may: a constant that no training gives, or the weights
themselves where the defense returns those. Needs the extra `flower`. The outcome goes to docs/results/reliability.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from misbehaving import ANSWER, FAULTS, HANG, Misbehaving
from record import record
from torch import nn

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.federation import FederationPlan, History
from gradveil.federation.inline import inline
from gradveil.federation.rounds import Federation, Server, run

if TYPE_CHECKING:
    from flwr.app import Context, Message

DEADLINE = 1.0  # seconds per call of a defense
ENGINE_DEADLINE = 20.0  # seconds per client and round: an actor that died is started again meanwhile
CLASSES, SHAPE = 3, (1, 4, 4)
NOTHING, PROTECTED, LEAK = "nothing left", "the defense's answer left", "SOMETHING ELSE LEFT"
STOPPED = "nothing left, and the federation stopped"
ENDS = ("raises a BaseException",)  # ends the program in which the defense runs
T = TypeVar("T")


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def images(count: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(count, *SHAPE, generator=rng), torch.arange(count) % CLASSES)


def judged(fault: str, before: Tensors, left: Tensors | None, text: str = "") -> str:
    """What left of one cell. `left` are changes by name; `text` is what the server reads beside them."""
    if "first values" in text or "Traceback" in text:
        return LEAK
    if left is None or not any(bool(t.any()) for t in left.values()):
        return NOTHING
    if set(left) != set(before) or not fault.startswith("answers"):
        return LEAK
    weights = "weights" in fault
    right = [torch.allclose(t, before[n] if weights else torch.full_like(t, ANSWER), atol=1e-5) for n, t in left.items()]
    return PROTECTED if all(right) else LEAK


def differences(before: Tensors, after: Tensors) -> Tensors:
    return {name: after[name].float() - before[name].float() if name in before else after[name] for name in after}


# -- doors -------------------------------------------------------------------------------------------------------------


def at_shield(fault: str) -> str:
    model, batch = network(), images(8, 1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    shield = gv.protect(model, Misbehaving((fault,)), data=batch, deadline=DEADLINE)
    ended(lambda: shield.backward(batch.x, batch.y))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return judged(fault, before, gradients or None)


def message_of(state: Tensors) -> Message:
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    content = RecordDict({"arrays": ArrayRecord(dict(state)), "config": ConfigRecord({"lr": 0.1})})
    message = Message(content, dst_node_id=7, message_type="train")
    message.metadata.__dict__["_message_id"] = "one"
    return message


def context_of() -> Context:
    from flwr.app import Context, RecordDict

    return Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})


def reply_judged(fault: str, before: Tensors, reply: Message | None, text: str) -> str:
    if reply is None or reply.has_error():
        return judged(fault, before, None, text if reply is None else reply.error.reason or "")
    after = reply.content.array_records["arrays"].to_torch_state_dict()
    return judged(fault, before, differences(before, after))


def at_mod(fault: str) -> str:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    from gradveil.protection.flower import mod

    before = dict(network().state_dict())
    rng = torch.Generator().manual_seed(1)

    def train(message: Message, context: Context) -> Message:
        moved = {n: t + torch.rand(t.shape, generator=rng) for n, t in before.items()}
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 5})})
        return Message(content, reply_to=message)

    protected = mod(Misbehaving((fault,)), deadline=DEADLINE)
    reply, text = ended(lambda: protected(message_of(before), context_of(), train))
    return reply_judged(fault, before, reply, text)


def at_guard(fault: str) -> str:
    from gradveil.protection.flower import protect

    batch, model = images(8, 1), network()
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def train() -> Message:
        guard = protect(message_of(before), context_of(), model, Misbehaving((fault,)), batch, deadline=DEADLINE)
        optimizer = torch.optim.SGD(guard.model.parameters(), lr=0.1)
        guard.backward(batch.x, batch.y)
        optimizer.step()
        return guard.reply()

    reply, text = ended(train)
    return reply_judged(fault, before, reply, text)


def ended(call: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or None and the text that Flower would send to the server."""
    try:
        return call(), ""
    except Exception as error:
        return None, str(error) if isinstance(error, UserError) else f"Traceback of {type(error).__name__}"
    except BaseException as error:  # the program ends: nothing is sent
        return None, type(error).__name__


def federation_of(faults: Sequence[str], folder: str, engine: str) -> Federation:
    names = tuple(map(str, range(CLASSES)))
    half = torch.full((1,), 0.5)
    data = DataSet("made", images(24, 1), images(9, 2), images(9, 3), CLASSES, names, half, half)
    deadline = ENGINE_DEADLINE if engine == "flower" else DEADLINE
    plan = FederationPlan(rounds=len(faults), clients=1, batch_size=None, engine=engine, deadline=deadline)
    return Federation(network(), data, Misbehaving(tuple(faults), folder), plan)


def at_inline(fault: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        federation = federation_of([fault], folder, "inline")
        states = states_of(federation, lambda server, history, keep: run(federation, server, inline(federation), history, keep))
    if len(states) == 1:
        return NOTHING if fault in ENDS else STOPPED
    return judged(fault, states[0], differences(*states))


def at_flower_engine(faults: Sequence[str]) -> dict[str, str]:
    """All faults in one run, one per round: Ray takes long to start."""
    from gradveil.federation.flower_engine import simulate

    with tempfile.TemporaryDirectory() as folder:
        federation = federation_of(faults, folder, "flower")
        states = states_of(federation, lambda server, history, keep: simulate(federation, server, history, keep))
    steps = zip(faults, states, states[1:], strict=False)
    outcomes = {fault: judged(fault, before, differences(before, after)) for fault, before, after in steps}
    return {fault: outcomes.get(fault, STOPPED) for fault in faults}


def states_of(
    federation: Federation, train: Callable[[Server, History, Callable[[History, Server], None]], History]
) -> list[Tensors]:
    """The server's state before the first round and after each."""
    server = federation.server()
    states = [copy.deepcopy(server.state)]
    ended(lambda: train(server, History(), lambda history, server: states.append(copy.deepcopy(server.state))))
    return states


DOORS: dict[str, Callable[[str], str]] = {"shield": at_shield, "mod": at_mod, "guard": at_guard, "inline engine": at_inline}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-flower-engine", action="store_true", help="leave out the column that needs Ray")
    options = parser.parse_args()
    began = time.monotonic()
    table = {fault: {door: act(fault) for door, act in DOORS.items()} for fault in FAULTS}
    if not options.no_flower_engine:
        for fault, outcome in at_flower_engine(list(FAULTS)).items():
            table[fault]["Flower engine"] = outcome
    print(json.dumps(table, indent=1))
    doors = list(next(iter(table.values())))
    cells = [outcome for row in table.values() for outcome in row.values()]
    lines = [
        f"{len(cells)} cells in {time.monotonic() - began:.0f} s: in {cells.count(NOTHING)} nothing left, in "
        f"{cells.count(PROTECTED)} the answer of the defense, in {len(cells) - cells.count(NOTHING) - cells.count(PROTECTED)} "
        f"anything else. Hanging defenses sleep for {HANG} s; a call has {DEADLINE:g} s at the first four doors, a client of "
        f"the Flower engine {ENGINE_DEADLINE:g} s. In every cell of an engine the rounds went on, unless the defense asked the "
        "program to end.",
        "",
        "| defense | " + " | ".join(doors) + " |",
        "|---" * (len(doors) + 1) + "|",
        *(f"| {fault} | " + " | ".join(_cell(row[door]) for door in doors) + " |" for fault, row in table.items()),
    ]
    record("Defenses that misbehave", "doors.py", lines)


def _cell(outcome: str) -> str:
    return {NOTHING: "nothing", PROTECTED: "its answer"}.get(outcome, outcome)


if __name__ == "__main__":
    main()
