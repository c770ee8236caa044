"""The honest client: task, defense and local training turn a private batch into an update, and a trace of how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gradveil.core.errors import UserError, shown
from gradveil.core.local_training import LocalTraining, MiniBatch, moved_statistics
from gradveil.core.observation import Trace
from gradveil.core.randomness import Stream, generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors, Update, widened
from gradveil.defenses.base import Defense, Setup, Step, is_plain

Draws = Callable[..., Stream]  # a random stream by its key


def prepare_client(defense: Defense, training: LocalTraining, setup: Setup, draws: Draws | None = None) -> Client:
    """A client whose defense has prepared itself on the client's data. The only way to build one.

    All draws come from `draws`; without them, from the setup's seed, which an audit repeats and an attacker could guess.
    """
    check_sampling(defense, training, setup.task)
    draws = draws or partial(generator, setup.seed)
    setup.rng = draws("prepare")
    return Client(setup.task, defense, training, defense.prepare(setup), draws)


def check_sampling(defense: Defense, training: LocalTraining, task: Task) -> None:
    """Under Poisson sampling, refuse what cannot act on a batch of any size, none included."""
    if training.sampling != "poisson":
        return
    if task.model.couples_images:
        raise UserError("BatchNorm in training mode couples the images of a batch; it cannot be trained on Poisson samples.")
    for part in defense.parts:
        if {"batch", "gradient"}.intersection(part.stages) and not part.takes_empty:
            raise UserError(f"'{part.name}' needs images in every batch; a Poisson sample may have none.")


def _detached(returned: object) -> Tensors:
    """The tensors that a defense sends, if they are such as can be stored and compared; otherwise one clear line."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"the defense sends {type(returned).__name__}, not tensors by name")
    for name, value in returned.items():
        if type(name) is not str:
            raise TypeError(f"the defense sends a tensor whose name is {shown(name)}, not text")
        if not is_plain(value) or value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise TypeError(f"the defense sends {shown(name)}, which is no dense tensor of torch")
    return {name: value.detach() for name, value in returned.items()}


class Client:
    """One participant. `task.model` is the network as both sides run it (after `Defense.model`)."""

    def __init__(self, task: Task, defense: Defense, training: LocalTraining, memory: Any, draws: Draws):
        self.task, self.defense, self.training, self.memory, self.draws = task, defense, training, memory, draws

    def protect(self, state: Tensors, batch: Batch, *key: int | str) -> tuple[Batch, Tensors]:
        """The data stage: what the client trains on in place of `batch`, and the secrets of it."""
        step = self._step(state, batch, self.draws("data", *key))
        return self.defense.data(batch, step), step.secrets

    def fed(self, state: Tensors, batch: Batch, *key: int | str) -> Batch:
        """What enters the network in place of `batch`: after the data stage and the batch stage."""
        protected, _ = self.protect(state, batch, *key)
        return self.defense.batch(protected, self._step(state, protected, self.draws("fed", *key)))

    def round(self, state: Tensors, batch: Batch, *key: int | str, protected: Batch | None = None) -> tuple[Update, Trace]:
        """One round on `batch`. `key` names the draw (victim, repetition); `protected` is the batch after the data stage."""
        secrets: Tensors = {}
        if protected is None:
            protected, secrets = self.protect(state, batch, *key)
        model, training, rng = self.task.model, self.training, self.draws("round", *key)
        start = model.parameters(state)
        buffers = {name: t.clone() for name, t in state.items() if name not in start}  # which training changes
        fed: list[Batch] = []

        def gradient(parameters: Tensors, part: MiniBatch) -> Tensors:
            drawn = protected[part]
            step = self._step({**buffers, **parameters}, drawn, rng, secrets)
            step.expected = training.expected_size(len(batch))
            if not len(drawn):
                fed.append(drawn)
                return self._without_gradient(parameters, step)
            step.batch = self.defense.batch(drawn, step)
            step.noise = model.draw_noise(len(step.batch), rng)
            secrets.update(step.noise)
            fed.append(step.batch)
            with torch.no_grad():
                if self.defense.starts_over and not model.couples_images:  # no statistics move either
                    return self._without_gradient(parameters, step)
                with model.batch_moments() as moments:
                    plain = step.gradient(step.batch)
                buffers.update(moved_statistics(buffers, moments))
                if step.expected:
                    plain = {name: g * (len(drawn) / step.expected) for name, g in plain.items()}
                return self.defense.gradient(plain, step)

        steps = training.steps(len(batch), self.draws("order", *key))
        tensors = gradient(start, slice(None)) if training.kind == "gradient" else training.difference(start, steps, gradient)
        epoch = fed[: len(fed) // training.epochs]
        seen = Batch(torch.cat([b.x for b in epoch]), torch.cat([b.y for b in epoch]))
        tensors = self.defense.update(tensors, self._step(state, seen, rng, secrets))
        changed = {n: t for n, t in buffers.items() if t.is_floating_point() and not torch.equal(t, state[n])}
        others = changed if training.sends_statistics else {}
        return Update(_detached(tensors), training.kind, len(batch), others), Trace(batch, seen, secrets)

    def _without_gradient(self, parameters: Tensors, step: Step) -> Tensors:
        return self.defense.gradient({name: torch.zeros_like(p) for name, p in parameters.items()}, step)

    def _step(self, state: Tensors, batch: Batch, rng: Stream, secrets: Tensors | None = None) -> Step:
        return Step(self.task, state, batch, rng, self.memory, secrets={} if secrets is None else secrets)


def summed_round(
    client: Client, state: Tensors, batch: Batch, protected: Batch, size: int, *key: int | str
) -> tuple[Update, Trace]:
    """One round of clients with `size` images each: the mean of their updates, which is all that secure aggregation shows.

    The secrets of several clients are kept by nobody.
    """
    parts = [slice(i, i + size) for i in range(0, len(batch), size)]
    if len(parts) == 1:
        return client.round(state, batch, *key, protected=protected)
    rounds = [client.round(state, batch[p], *key, "client", i, protected=protected[p]) for i, p in enumerate(parts)]
    updates, fed = [update for update, _ in rounds], [trace.fed for _, trace in rounds]
    tensors, others = (_mean([getattr(update, name) for update in updates]) for name in ("tensors", "others"))
    trace = Trace(batch, Batch(torch.cat([b.x for b in fed]), torch.cat([b.y for b in fed])))
    return Update(tensors, client.training.kind, len(batch), others), trace


def _mean(updates: Sequence[Tensors]) -> Tensors:
    """Over the tensors that all clients sent alike."""
    shapes = [{name: t.shape for name, t in update.items()} for update in updates]
    same = [name for name in updates[0] if all(shape.get(name) == shapes[0][name] for shape in shapes)]
    return {name: torch.stack([widened(update[name]).float() for update in updates]).mean(0) for name in same}
