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
from gradveil.core.settings import choose, settings
from gradveil.core.types import Tensors
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.federation.plan import FederationPlan, SGDPlan
from gradveil.federation.rounds import Federation


@settings
class CentralPlan(SGDPlan):
    """Passes of SGD over the private images in mini-batches, shuffled in every pass."""

    epochs: int = Field(default=1, ge=1)
    optimizer: str = "sgd"
    milestones: tuple[int, ...] = ()  # passes after which the learning rate is divided by 10

    def federation(self) -> FederationPlan:
        """The same as a federation of one client; how many rounds a pass takes depends on the data."""
        sgd = {field.name: getattr(self, field.name) for field in dataclasses.fields(SGDPlan)}
        return FederationPlan(clients=1, fedsgd=True, optimizer=self.optimizer, **sgd)

    def schedule(self, rounds_per_pass: int) -> str:
        at = "/".join(str(passes * rounds_per_pass) for passes in self.milestones)
        return f"milestones:at={at}" if at else "constant"


@settings
class CentralSGD:
    """Training of an attacked model by SGD."""

    lr: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    batch_size: int = Field(default=64, ge=1)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    milestones: tuple[int, ...] = ()

    def plan(self, epochs: int, seed: int) -> CentralPlan:
        of_sgd = {name: getattr(self, name) for name in ("momentum", "nesterov", "weight_decay")}
        text = f"sgd:{','.join(f'{key}={value}' for key, value in of_sgd.items())}" if self.nesterov else "sgd"
        shared = {name: getattr(self, name) for name in ("lr", "batch_size", "momentum", "weight_decay", "milestones")}
        return CentralPlan(epochs=epochs, seed=seed, optimizer=text, **shared)


@settings
class CentralAdam:
    """Training of an attacked model by Adam."""

    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    batch_size: int = Field(default=64, ge=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    milestones: tuple[int, ...] = ()

    def plan(self, epochs: int, seed: int) -> CentralPlan:
        shared = {name: getattr(self, name) for name in ("lr", "batch_size", "weight_decay", "milestones")}
        return CentralPlan(epochs=epochs, seed=seed, optimizer="adam", **shared)


METHODS: dict[str, type[CentralSGD | CentralAdam]] = {"sgd": CentralSGD, "adam": CentralAdam}


def central_plan(text: str, epochs: int, seed: int) -> CentralPlan:
    """The training that `text` writes, such as `adam:lr=0.001,batch_size=64`."""
    return choose("training", text, METHODS).plan(epochs, seed)


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
    server.plan = dataclasses.replace(server.plan, schedule=plan.schedule(client.rounds_per_pass))
    steps = plan.epochs * client.rounds_per_pass
    for step in Loop(steps, shared=True):
        events = server.aggregate(step, [client.reply(server.state, step)])
        if events:
            stopped = f"stopped at step {step + 1} of {steps}: {events[0].message}"
            raise UserError(f"training under '{federation.defense.spec}' {stopped}.")
        if progress:
            progress("training", step + 1, steps)
    return server.state
