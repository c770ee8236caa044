"""Training in one place, under a defense: one client that holds the whole private part and sends every gradient.

It is FedSGD with a single client, so the defense acts on every step as it would in an audit of single gradients.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from gradveil.core.errors import UserError
from gradveil.core.gradients import Loss, cross_entropy
from gradveil.core.settings import build
from gradveil.core.types import Tensors
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.federation.plan import Plan
from gradveil.federation.rounds import Federation, Progress


def train_central(
    module: nn.Module,
    data: DataSet,
    defense: str | Defense,
    *,
    epochs: int,
    batch_size: int = 64,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    seed: int = 0,
    loss: Loss = cross_entropy,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Tensors:
    """The state after `epochs` passes of SGD over the private part in mini-batches, shuffled in every pass."""
    values = {"batch_size": batch_size, "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "seed": seed}
    fixed = {"rounds": epochs, "clients": 1, "images_per_client": None, "fedsgd": True}
    plan = build(Plan, {**values, **fixed}, of="central training")
    federation = Federation(module, data, defense, plan, loss=loss, cache=cache, progress=progress)
    server, client = federation.server(), federation.participant(0)
    steps = epochs * client.rounds_per_pass
    for step in range(steps):
        events = server.aggregate(step, [client.reply(server.state, step)])
        if events:
            what = f"broke off at step {step + 1} of {steps}: {events[0]['what']}"
            raise UserError(f"training under '{federation.defense.spec}' {what}.")
        if progress:
            progress("training", step + 1, steps)
    return server.state
