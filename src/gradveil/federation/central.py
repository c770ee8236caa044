"""Training in one place under a defense: one client holds all private images and sends the gradient of every step.

It is FedSGD with one client, so the defense acts on every step as it does in an audit of single gradients.
"""

import dataclasses
from pathlib import Path

from pydantic import Field
from torch import nn

from gradveil.core.errors import UserError
from gradveil.core.gradients import Loss, cross_entropy
from gradveil.core.loops import Loop
from gradveil.core.progress import Progress
from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.federation.plan import FederationPlan, SGDPlan
from gradveil.federation.rounds import Federation


@settings
class CentralPlan(SGDPlan):
    """Passes of SGD over the private images in mini-batches, shuffled in every pass."""

    epochs: int = Field(default=1, ge=1)

    def federation(self) -> FederationPlan:
        """The same as a federation of one client; how many rounds a pass takes depends on the data."""
        sgd = {field.name: getattr(self, field.name) for field in dataclasses.fields(SGDPlan)}
        return FederationPlan(clients=1, fedsgd=True, **sgd)


def train_central(
    module: nn.Module,
    data: DataSet,
    defense: str | Defense,
    plan: CentralPlan,
    *,
    loss: Loss = cross_entropy,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Tensors:
    """The state of a copy of `module` after the training."""
    federation = Federation(module, data, defense, plan.federation(), loss=loss, cache=cache, progress=progress)
    server, client = federation.server(), federation.participant(0)
    steps = plan.epochs * client.rounds_per_pass
    for step in Loop(steps, shared=True):
        events = server.aggregate(step, [client.reply(server.state, step)])
        if events:
            stopped = f"stopped at step {step + 1} of {steps}: {events[0].message}"
            raise UserError(f"training under '{federation.defense.spec}' {stopped}.")
        if progress:
            progress("training", step + 1, steps)
    return server.state
