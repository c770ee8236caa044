"""Federated training in this process: the clients of a round one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.core.errors import UserError, unknown
from gradveil.core.losses import DEFAULT, find_loss, loss_name
from gradveil.core.settings import build
from gradveil.core.types import Tensors
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.federation.checkpoint import Checkpoint
from gradveil.federation.faults import Failure, Reply, too_late
from gradveil.federation.history import History
from gradveil.federation.plan import Plan
from gradveil.federation.rounds import Engine, Federation, Progress, run
from gradveil.storage.files import alone_in

ENGINES = ("inline", "flower")


def train(
    module: nn.Module,
    data: DataSet,
    defense: str | Defense,
    *,
    rounds: int,
    clients: int = 10,
    images_per_client: int | None = 200,
    sampled: int | None = None,
    local_epochs: int = 1,
    batch_size: int | None = 64,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: str = "constant",
    partition: str = "iid",
    fedsgd: bool = False,
    defended: str | int = "all",
    seed: int = 0,
    loss: str | Callable[..., Any] = DEFAULT,
    engine: str = "inline",
    progress: Progress | None = None,
    evaluate_every: int = 1,
    cosine_every: int = 0,
    deadline: float | None = None,
    cache: Path | None = None,
    folder: Path | None = None,
) -> History:
    """Train `module` (which stays as it is) in a federation under a defense.

    `loss` is a name, `pkg.mod:factory`, or a function of (outputs, targets). `defended` is "all" or how many clients;
    with a defense that changes the model, all run the changed one.
    With `folder`, every finished round is stored there and the same call goes on where it stopped. `engine` is inline,
    or flower: the same rounds through Flower's simulation. `deadline` is how many seconds a client has in a
    round: inline, a later reply is left out; on Flower, its work is broken off.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES, hint=f"There are: {', '.join(ENGINES)}.")
    values: dict[str, Any] = {
        "rounds": rounds,
        "clients": clients,
        "images_per_client": images_per_client,
        "sampled": sampled,
        "local_epochs": local_epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "partition": partition,
        "fedsgd": fedsgd,
        "defended": defended,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "cosine_every": cosine_every,
        "deadline": deadline,
    }
    plan, found = build(Plan, values, of="train"), find_loss(loss)
    federation = Federation(module, data, defense, plan, loss=found, cache=cache, progress=progress)
    checkpoint = Checkpoint(folder, federation, engine, loss_name(loss)) if folder else None
    with alone_in(folder, "training") if folder else nullcontext():
        history, velocity = checkpoint.load() if checkpoint else (History(), {})
        server = federation.server(history.state, velocity)
        if history.rounds >= rounds:
            return history
        save = checkpoint.save if checkpoint else None
        if engine == "flower":
            from gradveil.federation.flower_engine import simulate

            return simulate(federation, server, history, save)
        began = time.perf_counter()
        clients_here = inline(federation)
        history.seconds_prepare = time.perf_counter() - began
        return run(federation, server, clients_here, history, save)


def inline(federation: Federation) -> Engine:
    """All clients built here and now; a client that raises in a round only misses that round."""
    participants = [federation.participant(k) for k in range(federation.plan.clients)]

    def collect(state: Tensors, round: int, chosen: Sequence[int]) -> list[Reply | Failure]:
        replies: list[Reply | Failure] = []
        for k in chosen:
            began = time.perf_counter()
            try:
                reply = participants[k].reply(state, round)
            except UserError:
                raise  # no fault of this client: what was asked for cannot work
            except Exception as error:
                text = " ".join(str(error).split())
                replies.append(Failure(k, f"raised {type(error).__name__}: {text}"))
                continue
            limit = federation.plan.deadline
            if limit is not None and time.perf_counter() - began > limit:
                replies.append(Failure(k, too_late(limit)))
            else:
                replies.append(reply)
        return replies

    return collect
