"""Federated training in this process: the clients of a round one after another."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

from torch import nn

from gradveil.core.errors import UserError
from gradveil.core.gradients import Loss
from gradveil.core.loops import Loop
from gradveil.core.losses import DEFAULT, find_loss, loss_name
from gradveil.core.progress import Progress
from gradveil.core.types import Tensors
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.federation.checkpoint import Checkpoint
from gradveil.federation.faults import Failure, OutOfTime, Reply, at_most, raised, too_late
from gradveil.federation.history import History
from gradveil.federation.plan import FederationPlan
from gradveil.federation.rounds import Engine, Federation, run
from gradveil.storage.files import alone_in


def train(
    module: nn.Module,
    data: DataSet,
    defense: str | Defense,
    plan: FederationPlan,
    *,
    loss: str | Loss = DEFAULT,
    cache: Path | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> History:
    """Train a copy of `module` in a federation under a defense.

    With a defense that changes the model, all clients run the changed one. `loss` is a name, `pkg.mod:factory`, or a
    function of (outputs, targets). With `folder`, every finished round is stored there, and the same call resumes.
    `plan.deadline` limits the seconds of a client per round: its work is stopped, and a later reply is left
    out. `cache` is a folder for what defenses train once.
    """
    federation = Federation(module, data, defense, plan, loss=find_loss(loss), cache=cache, progress=progress)
    checkpoint = Checkpoint(folder, federation, loss_name(loss)) if folder else None
    with alone_in(folder, "training") if folder else nullcontext():
        history, memory = checkpoint.load() if checkpoint else (History(), {})
        server = federation.server(history.state, memory)
        if history.rounds >= plan.rounds:
            return history
        save = checkpoint.save if checkpoint else None
        if plan.engine == "flower":
            from gradveil.federation.flower_engine import simulate

            return simulate(federation, server, history, save)
        began = time.perf_counter()
        clients = inline(federation)
        history.seconds_prepare = time.perf_counter() - began
        return run(federation, server, clients, history, save)


def inline(federation: Federation) -> Engine:
    """Build all clients; a client that raises an error in a round misses only that round."""
    participant = cache(federation.participant)
    for k in Loop(federation.plan.clients, shared=True):
        participant(k)

    def collect(state: Tensors, round: int, chosen: Sequence[int]) -> list[Reply | Failure]:
        replies: list[Reply | Failure] = []
        for place in Loop(len(chosen), shared=True):
            k, began = chosen[place], time.perf_counter()
            try:
                with at_most(federation.plan.deadline):
                    reply = participant(k).reply(state, round)
            except OutOfTime as error:
                replies.append(Failure(k, str(error)))
                continue
            except UserError:
                raise  # not a fault of this client: the settings cannot work
            except (Exception, SystemExit) as error:  # code of the user may call sys.exit
                replies.append(Failure(k, raised(error)))
                continue
            limit = federation.plan.deadline
            if limit is not None and time.perf_counter() - began > limit:
                replies.append(Failure(k, too_late(limit)))
            else:
                replies.append(reply)
        return replies

    return collect
