"""One round, the same for every engine: the server's state goes out, clients reply, the server adds up.

An engine only carries: it brings a state to `Participant.reply` and the replies back to `Server.aggregate`. To `run` it
is a function of (state, round, clients) that returns their replies.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import Loss, ModelFunction, cross_entropy
from gradveil.core.progress import Progress
from gradveil.core.randomness import generator, seeded
from gradveil.core.types import Batch, Tensors, Update
from gradveil.data import DataSet
from gradveil.defenses import Defense, Setup, parse
from gradveil.federation.evaluate import evaluate
from gradveil.federation.faults import Failure, Reply, screen
from gradveil.federation.history import History
from gradveil.federation.partition import share
from gradveil.federation.plan import FederationPlan
from gradveil.federation.statistics import MOMENTUM, RunningStatistics, has_batch_norm

Engine = Callable[[Tensors, int, Sequence[int]], Sequence[Reply | Failure]]
Event = dict[str, Any]


class Federation:
    """What all sides agree on before the first round: the network, the first state, and who holds which images."""

    def __init__(
        self,
        module: nn.Module,
        data: DataSet,
        defense: str | Defense,
        plan: FederationPlan,
        *,
        loss: Loss = cross_entropy,
        cache: Path | None = None,
        progress: Progress | None = None,
    ):
        self.plan, self.data, self.defense = plan, data, parse(defense)
        self.cache, self.progress = cache, progress
        with seeded(plan.seed, "network"):  # a defense may add layers; torch draws their weights from its global stream
            self.module = self.defense.model(copy.deepcopy(module), data.input_shape)
        self.batch_norm = has_batch_norm(self.module)
        self.task = data.task(ModelFunction(self.module, loss))  # as the server judges it
        self.training_task = data.task(ModelFunction(self.module, loss, "train"))  # as clients train it
        self.statistics = RunningStatistics(self.module)
        self.state = self.task.model.state()
        total = plan.clients * plan.images_per_client if plan.images_per_client else len(data.private)
        if total > len(data.private):
            raise UserError(
                f"{plan.clients} clients with {plan.images_per_client} images each need {total} private images; "
                f"{data.name} has {len(data.private)}."
            )
        self.images = data.private[:total]
        self.shares = share(self.images.hard_labels, plan.clients, plan.partition, plan.seed)

    def participant(self, number: int) -> Participant:
        return Participant(self, number)

    def server(self, state: Tensors | None = None, velocity: Tensors | None = None) -> Server:
        return Server(self.plan, self.task.model.trainable, state or self.state, velocity)

    def measure(self, state: Tensors, round: int) -> dict[str, float | None]:
        """Accuracy on the test part, on all clients' own images and on those of defended clients (none where targets
        are no classes); the loss."""
        rng = generator(self.plan.seed, round, "evaluate")
        test, _ = evaluate(self.task, state, self.data.test, rng)
        train, loss = evaluate(self.task, state, self.images, rng)
        defended = self.shares[: self.plan.num_defended]
        return {
            "acc_test": _mean(test),
            "acc_train": _mean(train),
            "acc_sensitive": _mean(train[torch.cat(defended)]) if defended else None,
            "loss": _mean(loss),
        }


class Participant:
    """One client with its images. Building it prepares its defense and protects its data, once."""

    def __init__(self, federation: Federation, number: int):
        plan = federation.plan
        self.number, self.plan, self._federation = number, plan, federation
        self.images = federation.images[federation.shares[number]]
        self.defended = number < plan.num_defended
        many = len(self.images)
        self._mini = min(plan.batch_size or many, many)
        # BatchNorm has no statistics of a single image: a client with no more uses the server's running ones, and
        # one whose last mini-batch would be a single image leaves a different one out each time.
        self._task = federation.task if federation.batch_norm and self._mini == 1 else federation.training_task
        self._used = many - 1 if federation.batch_norm and self._mini > 1 and many % self._mini == 1 else many
        self._taken = self._mini if plan.fedsgd else self._used  # images a round
        self.rounds_per_pass = math.ceil(self._used / self._taken)
        self.client = self._client(federation.defense if self.defended else parse("none"))
        self.protected, _ = self.client.protect(federation.state, self.images, number)

    def _client(self, defense: Defense) -> Client:
        federation, data = self._federation, self._federation.data
        public = data.public if len(data.public) else None
        where = (federation.cache, federation.progress)
        setup = Setup(self._task, federation.state, self.images, public, self.plan.seed, *where)
        return prepare_client(defense, self.plan.local_training(0), setup)

    def reply(self, state: Tensors, round: int) -> Reply:
        """The client's part of a round."""
        order = self._order(round)
        images = self.images[order]
        update, fed, buffers = self._round(self.client, state, images, self.protected[order], round)
        buffers |= self._statistics(state, update, fed, round)
        return Reply(self.number, update, buffers, self._cosine(state, update, images, round))

    def _order(self, round: int) -> Tensor:
        """Which images this round takes: all in a new order, or for FedSGD the next mini-batch of a pass over them."""
        turn, place = divmod(round, self.rounds_per_pass)
        order = torch.randperm(len(self.images), generator=generator(self.plan.seed, self.number, turn, "order"))
        return order[: self._used][place * self._taken : (place + 1) * self._taken]

    def _round(
        self, client: Client, state: Tensors, images: Batch, protected: Batch, round: int
    ) -> tuple[Update, Tensor, Tensors]:
        """The update, the images that were fed to the network, and the buffers that it wrote into on the way."""
        # The server's own buffers must stay as they are.
        buffers = {name: t.clone() for name, t in state.items() if name not in self._task.model.trainable}
        client.training = self.plan.local_training(round)
        with seeded(self.plan.seed, self.number, round, "dropout"):
            update, trace = client.round({**state, **buffers}, images, self.number, round, protected=protected)
        changed = {n: t for n, t in buffers.items() if t.is_floating_point() and not torch.equal(t, state[n])}
        return update, trace.fed.x, changed

    def _statistics(self, state: Tensors, update: Update, fed: Tensor, round: int) -> Tensors:
        """BatchNorm's statistics after this round; one gradient moves them by one step of torch's moving average."""
        if self._task is not self._federation.training_task or set(update.tensors) - set(state):
            return {}
        if update.kind == "delta":
            state = {**state, **{name: state[name] + delta for name, delta in update.tensors.items()}}
        rng = generator(self.plan.seed, self.number, round, "statistics")
        found = self._federation.statistics.measure(state, self._task.normalize(fed), self._mini, rng)
        if update.kind == "gradient":
            return {name: torch.lerp(state[name], value, MOMENTUM) for name, value in found.items()}
        return found

    def _cosine(self, state: Tensors, update: Update, images: Batch, round: int) -> float | None:
        """How near the first defended client's update is to the one it would have sent without a defense."""
        if not (self.plan.cosine_every and self.defended and self.number == 0 and round % self.plan.cosine_every == 0):
            return None
        plain, _, _ = self._round(self._client(parse("none")), state, images, images, round)
        a, b = (
            torch.cat([u.tensors[n].flatten() for n in self._task.model.trainable]).double() for u in (update, plain)
        )
        return float((a @ b / (a.norm() * b.norm()).clamp_min(1e-30)).clamp(-1, 1))


class Server:
    """Holds the state; adds up what comes back, weighted by examples."""

    def __init__(self, plan: FederationPlan, trainable: Sequence[str], state: Tensors, velocity: Tensors | None = None):
        self.plan, self.trainable = plan, list(trainable)
        self.state, self.velocity = dict(state), dict(velocity or {})

    def aggregate(self, round: int, replies: Sequence[Reply | Failure]) -> list[Event]:
        """Move the state by the replies that are sound; the events say which were not."""
        parameters = {name: self.state[name] for name in self.trainable}
        buffers = {k: v for k, v in self.state.items() if k not in parameters and v.is_floating_point()}
        sound, failures = screen(replies, parameters, buffers)
        events: list[Event] = [
            {"round": round + 1, "client": f.client, "what": f"left out: {f.what}"} for f in failures
        ]
        if not sound:
            return [*events, {"round": round + 1, "client": None, "what": "no update was left; the state stays"}]
        mean = {n: _average([(r.update.tensors[n], r.update.examples) for r in sound]) for n in parameters}
        moved = self._sgd(parameters, mean, round) if self.plan.fedsgd else _add(parameters, mean)
        heard = {n: [(r.buffers[n], r.update.examples) for r in sound if n in r.buffers] for n in buffers}
        kept = {n: _average(values).to(buffers[n]) for n, values in heard.items() if values}
        self.state = {**self.state, **moved, **kept}  # a new dictionary: the last one may still be with clients
        return events

    def _sgd(self, parameters: Tensors, gradient: Tensors, round: int) -> Tensors:
        """FedSGD: the server's own step, with momentum and weight decay as in torch.optim.SGD."""
        step = {}
        for name, found in gradient.items():
            g = found + self.plan.weight_decay * parameters[name]
            if self.plan.momentum:
                g = self.plan.momentum * self.velocity[name] + g if name in self.velocity else g
                self.velocity[name] = g
            step[name] = -self.plan.learning_rate(round) * g
        return _add(parameters, step)


def run(
    federation: Federation,
    server: Server,
    engine: Engine,
    history: History,
    after_round: Callable[[History, Server], None] | None = None,
) -> History:
    """The rounds that `history` does not hold yet."""
    plan = federation.plan
    for round in range(history.rounds, plan.rounds):
        began = time.perf_counter()
        replies = engine(server.state, round, plan.chosen(round))
        history.events += server.aggregate(round, replies)
        seconds = time.perf_counter() - began
        arrived = [r for r in replies if isinstance(r, Reply)]
        sent = [t for reply in arrived for t in reply.sent().values()]
        unmeasured = dict.fromkeys(("acc_test", "acc_train", "acc_sensitive", "loss"))
        history.add(
            **(federation.measure(server.state, round) if plan.evaluated(round) else unmeasured),
            seconds_per_round=seconds,
            bytes_sent=sum(4 * t.numel() for t in sent),
            nonzero_sent=sum(int(t.count_nonzero()) for t in sent),
            gradient_cosine=next((r.cosine for r in arrived if r.cosine is not None), None),
        )
        history.state = server.state
        if after_round:
            after_round(history, server)
        if federation.progress:
            accuracy = history.acc_test[-1]
            text = "training" if accuracy is None else f"training, test accuracy {accuracy:.1%}"
            federation.progress(text, round + 1, plan.rounds)
    return history


def _average(values: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The mean weighted by examples, in double precision."""
    total = sum(examples for _, examples in values)
    first, weight = values[0]
    mean = first.double() * (weight / total)
    for value, examples in values[1:]:
        mean += value.double() * (examples / total)
    return mean


def _add(parameters: Tensors, step: Tensors) -> Tensors:
    return {name: (p.double() + step[name]).to(p.dtype) for name, p in parameters.items()}


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
