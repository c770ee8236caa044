"""One round, the same for every engine: the server's state goes out, clients reply, the server averages the replies.

An engine only transports: it brings a state to `Participant.reply`, and the replies to `Server.aggregate`. For `run` it
is a function of (state, round, clients) that returns their replies.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.client import Client, check_sampling, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import Loss, ModelFunction, cross_entropy
from gradveil.core.local_training import freeze, optimizer
from gradveil.core.loops import Loop
from gradveil.core.progress import Progress
from gradveil.core.randomness import generator, seeded
from gradveil.core.types import Batch, Tensors, Update
from gradveil.data import DataSet
from gradveil.defenses import Defense, Setup, parse
from gradveil.federation.evaluate import evaluate
from gradveil.federation.faults import Failure, Reply, screen
from gradveil.federation.history import Event, History
from gradveil.federation.partition import share
from gradveil.federation.plan import FederationPlan

OptimizerMemory = dict[str, Tensors]  # what the server's optimizer keeps from round to round
Engine = Callable[[Tensors, int, Sequence[int]], Sequence[Reply | Failure]]


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
        freeze(self.module, plan.frozen)
        self.batch_norm = any(isinstance(part, _BatchNorm) for part in self.module.modules())
        if self.batch_norm and plan.num_defended:
            logging.getLogger("gradveil").info("BatchNorm's statistics leave each client beside its update, unprotected")
        self.task = data.task(ModelFunction(self.module, loss))  # as the server evaluates it
        self.training_task = data.task(ModelFunction(self.module, loss, plan.mode))  # as clients train it
        check_sampling(self.defense, plan.local_training(0), self.training_task)
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

    def server(self, state: Tensors | None = None, memory: OptimizerMemory | None = None) -> Server:
        return Server(self.plan, self.task.model.trainable, state or self.state, memory)

    def measure(self, state: Tensors, round: int) -> dict[str, float | None]:
        """Accuracy on the test part, on the images of all clients and on those of defended clients (NaN where targets
        are no classes), and the loss."""
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
        count = len(self.images)
        self._batch_size = min(plan.batch_size or count, count)
        # BatchNorm has no statistics of a single image: with batches of one image a client uses the server's running
        # ones, and a client whose last mini-batch would be a single image leaves out a different image in each round.
        self._task = federation.task if federation.batch_norm and self._batch_size == 1 else federation.training_task
        odd = federation.batch_norm and self._batch_size > 1 and count % self._batch_size == 1
        self._images_per_pass = count - odd
        self._images_per_round = self._batch_size if plan.fedsgd else self._images_per_pass
        self.rounds_per_pass = math.ceil(self._images_per_pass / self._images_per_round)
        self.client = self._prepare(federation.defense if self.defended else parse("none"))
        self.protected, _ = self.client.protect(federation.state, self.images, number)

    def _prepare(self, defense: Defense) -> Client:
        federation, public = self._federation, self._federation.data.public or None
        shared = (federation.cache, federation.progress)
        setup = Setup(self._task, federation.state, self.images, public, self.plan.seed, *shared)
        return prepare_client(defense, self.plan.local_training(0), setup)

    def reply(self, state: Tensors, round: int) -> Reply:
        """What the client sends in one round."""
        order = self._order(round)
        images = self.images[order]
        update = self._train(self.client, state, images, self.protected[order], round)
        return Reply(self.number, replace(update, others={}), update.others, self._cosine(state, update, images, round))

    def _order(self, round: int) -> Tensor:
        """The images of this round: all in a new order, or for FedSGD the next mini-batch of a pass over them."""
        turn, place = divmod(round, self.rounds_per_pass)
        order = torch.randperm(len(self.images), generator=generator(self.plan.seed, self.number, turn, "order"))
        first = place * self._images_per_round
        return order[: self._images_per_pass][first : first + self._images_per_round]

    def _train(self, client: Client, state: Tensors, images: Batch, protected: Batch, round: int) -> Update:
        client.training = self.plan.local_training(round)
        with seeded(self.plan.seed, self.number, round, "dropout"):
            update, _ = client.round(state, images, self.number, round, protected=protected)
        return update

    def _cosine(self, state: Tensors, update: Update, images: Batch, round: int) -> float | None:
        """The cosine between the update of the first defended client and the one without a defense."""
        if not (self.plan.cosine_every and self.defended and self.number == 0 and round % self.plan.cosine_every == 0):
            return None
        plain = self._train(self._prepare(parse("none")), state, images, images, round)
        names = self._task.model.trainable
        a, b = (torch.cat([u.tensors[n].flatten() for n in names]).double() for u in (update, plain))
        return float((a @ b / (a.norm() * b.norm()).clamp_min(1e-30)).clamp(-1, 1))


class Server:
    """Holds the state and moves it by the mean of the replies, weighted by examples."""

    def __init__(self, plan: FederationPlan, trainable: Sequence[str], state: Tensors, memory: OptimizerMemory | None = None):
        self.plan, self.trainable = plan, list(trainable)
        self.state, self.memory = dict(state), memory or {}

    def aggregate(self, round: int, replies: Sequence[Reply | Failure]) -> list[Event]:
        """Move the state by the usable replies; the events name the others."""
        parameters = {name: self.state[name] for name in self.trainable}
        buffers = {k: v for k, v in self.state.items() if k not in parameters and v.is_floating_point()}
        usable, failures = screen(replies, parameters, buffers)
        events = [Event(round + 1, f.client, f"left out: {f.reason}") for f in failures]
        if not usable:
            return [*events, Event(round + 1, None, "no update was left; the state stays")]
        mean = {n: _average([(r.update.tensors[n], r.update.examples) for r in usable]) for n in parameters}
        step = self._sgd_step(parameters, mean, round) if self.plan.fedsgd else mean
        moved = {name: (p.double() + self.plan.server_lr * step[name]).to(p.dtype) for name, p in parameters.items()}
        sent = {n: [(r.buffers[n], r.update.examples) for r in usable if n in r.buffers] for n in buffers}
        averaged = {n: _average(values).to(buffers[n]) for n, values in sent.items() if values}
        self.state = {**self.state, **moved, **averaged}  # a new dictionary: clients may still hold the last one
        return events

    def _sgd_step(self, parameters: Tensors, gradients: Tensors, round: int) -> Tensors:
        """FedSGD: the step of the server, with its optimizer."""
        exact = {name: value.double() for name, value in parameters.items()}
        moved = optimizer(self.plan.optimizer_text).step(exact, gradients, self.plan.learning_rate(round), self.memory)
        return {name: moved[name] - exact[name] for name in exact}


def run(
    federation: Federation,
    server: Server,
    engine: Engine,
    history: History,
    after_round: Callable[[History, Server], None] | None = None,
) -> History:
    """Do the rounds that `history` does not hold yet."""
    plan, begin = federation.plan, history.rounds
    for done in Loop(plan.rounds - begin, shared=True):
        round = begin + done
        began, cpu_began = time.perf_counter(), time.process_time()
        replies = engine(server.state, round, plan.chosen(round))
        history.events += server.aggregate(round, replies)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        arrived = [r for r in replies if isinstance(r, Reply)]
        sent = [t for reply in arrived for t in reply.sent().values()]
        unmeasured = dict.fromkeys(("acc_test", "acc_train", "acc_sensitive", "loss"))
        history.add(
            **(federation.measure(server.state, round) if plan.evaluated(round) else unmeasured),
            seconds_per_round=seconds,
            cpu_seconds_per_round=cpu_seconds,
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
    return sum((value.double() * (examples / total) for value, examples in values), start=torch.zeros(()))


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
