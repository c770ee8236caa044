"""What a federation does, in numbers. Command-line options of `gradveil train` are made from these fields."""

import dataclasses
from typing import Literal

import torch
from pydantic import Field

from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining, optimizer
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.core.types import BatchSampling, Mode
from gradveil.federation.schedules import schedule

EngineName = Literal["inline", "flower"]


@settings
class SGDPlan:
    """The SGD of a training."""

    batch_size: int | None = Field(default=64, ge=1, description="Images in a mini-batch.")
    lr: float = Field(default=0.05, gt=0, allow_inf_nan=False, description="Learning rate.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Of local SGD; with --fedsgd of the server's.")
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Of the same optimizer.")
    seed: int = Field(default=0, ge=0, description="Seed of all randomness.")


@settings
class FederationPlan(SGDPlan):
    """Rounds of FedAvg, or with `fedsgd` one gradient per client and round. Rounds and clients are counted from 0."""

    rounds: int = Field(default=20, ge=1, description="Rounds of training.")
    clients: int = Field(default=10, ge=1, description="Clients in the federation.")
    images_per_client: int | None = Field(default=None, ge=1, description="Images per client, on average. [all]")
    sampled: int | None = Field(default=None, ge=1, description="Clients that take part in a round. [all]")
    partition: str = Field(default="iid", description="iid, dirichlet:alpha=X, classes:per_client=N")
    local_epochs: int = Field(default=1, ge=1, description="Passes over a client's images per round.")
    optimizer: str = Field(
        default="sgd", description="Of local training; with --fedsgd of the server: adam, adamw, sgd:momentum=0.9,nesterov=true"
    )
    server_lr: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="Factor on the server's step.")
    accumulate: int = Field(default=1, ge=1, description="Mini-batches per step of the optimizer.")
    mode: Mode = Field(default="train", description="What dropout and BatchNorm do on clients: train or eval.")
    frozen: tuple[str, ...] = Field(default=(), description="Parameters that are not trained, such as 'features.*'; repeat.")
    sampling: BatchSampling = Field(default="shuffled", description="poisson: each mini-batch draws each image by itself.")
    schedule: str = Field(default="constant", description="exponential:gamma=X, step:every=N or milestones:at=N/M.")
    fedsgd: bool = Field(default=False, description="Clients send one gradient per round.")
    defended: str | int = Field(default="all", description="all, or how many: the first N clients.")
    engine: EngineName = Field(default="inline", description="inline (this process), flower (simulation).")
    deadline: float | None = Field(default=None, gt=0, description="Seconds per client and round. [no limit]")
    evaluate_every: int = Field(default=1, ge=1, description="Evaluate after so many rounds.")
    cosine_every: int = Field(default=0, ge=0, description="Compare with the undefended update. [never]")

    def __post_init__(self) -> None:
        text = str(self.defended)
        if text != "all" and not (text.isdecimal() and int(text) <= self.clients):
            raise UserError(f"defended={text}: write all, or how many of the {self.clients} clients.")
        if self.sampled is not None and self.sampled > self.clients:
            raise UserError(f"sampled={self.sampled} asks for more clients than there are ({self.clients}).")
        if self.fedsgd and (self.local_epochs, self.accumulate, self.sampling) != (1, 1, "shuffled"):
            raise UserError("FedSGD sends one gradient per round, so there is no local training to set.")
        schedule(self.schedule)  # refuses one that there is not
        optimizer(self.optimizer)
        self.local_training(0)

    @property
    def num_defended(self) -> int:
        return self.clients if self.defended == "all" else int(self.defended)

    def learning_rate(self, round: int) -> float:
        return self.lr * schedule(self.schedule).factor(round)

    @property
    def optimizer_text(self) -> str:
        """The optimizer with all its settings: of the clients, or with FedSGD of the server."""
        momentum = f"momentum={self.momentum}," if self.optimizer == "sgd" else ""
        return self.optimizer if ":" in self.optimizer else f"{self.optimizer}:{momentum}weight_decay={self.weight_decay}"

    def local_training(self, round: int) -> LocalTraining:
        """One gradient, or local SGD at the learning rate of this round."""
        common = LocalTraining(mode=self.mode, frozen=self.frozen, sends_statistics=True)
        if self.fedsgd:
            return common
        return dataclasses.replace(
            common,
            epochs=self.local_epochs,
            batch_size=self.batch_size,
            lr=self.learning_rate(round),
            optimizer=self.optimizer_text,
            accumulate=self.accumulate,
            sampling=self.sampling,
        )

    def chosen(self, round: int) -> list[int]:
        """The clients that take part in a round."""
        if self.sampled is None:
            return list(range(self.clients))
        drawn = torch.randperm(self.clients, generator=generator(self.seed, round, "sample"))
        return sorted(drawn[: self.sampled].tolist())

    def evaluated(self, round: int) -> bool:
        return (round + 1) % self.evaluate_every == 0 or round + 1 == self.rounds

    def to_json(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "defended": self.num_defended, "frozen": list(self.frozen)}
