"""The honest client: model, loss, defense and local training turn a private batch into an update, and a trace of how."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gradveil.core.gradients import ModelFunction, local_delta
from gradveil.core.types import Batch, LocalTraining, Streams, Tensors, Trace, Update, generator
from gradveil.defenses.base import Defense, Setup, Step


class Client:
    """One participant with its local data. `model` is the network as both sides run it (after `Defense.model`).

    All draws come from `streams`; without them, from `seed`, which an audit repeats and an attacker could guess.
    """

    def __init__(
        self,
        model: ModelFunction,
        defense: Defense,
        training: LocalTraining,
        *,
        state: Tensors,
        private: Batch,
        public: Batch | None,
        num_classes: int,
        mean: Tensor,
        std: Tensor,
        seed: int = 0,
        streams: Streams | None = None,
        cache: Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ):
        self.model, self.defense, self.training = model, defense, training
        self.num_classes, self.mean, self.std, self.seed = num_classes, mean, std, seed
        self.streams = streams or partial(generator, seed)
        rng = self.streams("prepare")
        self.memory = defense.prepare(
            Setup(model, state, private, public, num_classes, mean, std, seed, rng, cache, progress)
        )

    def protect(self, state: Tensors, batch: Batch, *key: int | str) -> tuple[Batch, Tensors]:
        """The data stage: what the client trains on in place of `batch`, and the secrets of it."""
        step = self._step(state, batch, self.streams("data", *key))
        return self.defense.data(batch, step), step.secrets

    def round(
        self, state: Tensors, batch: Batch, *key: int | str, protected: Batch | None = None
    ) -> tuple[Update, Trace]:
        """One round on `batch`. `key` names the draw (victim, repetition); `protected` is the batch after the data stage."""
        secrets: Tensors = {}
        if protected is None:
            protected, secrets = self.protect(state, batch, *key)
        rng = self.streams("round", *key)
        fed: list[Batch] = []

        def gradient(parameters: Tensors, part: slice) -> Tensors:
            step = self._step({**state, **parameters}, protected[part], rng, secrets)
            step.batch = self.defense.batch(protected[part], step)
            step.noise = self.model.draw_noise(len(step.batch), rng)
            secrets.update(step.noise)
            fed.append(step.batch)
            with torch.no_grad():
                return self.defense.gradient(step.gradient(step.batch), step)

        start = self.model.parameters(state)
        if self.training.kind == "gradient":
            tensors = gradient(start, slice(0, len(batch)))
        else:
            tensors = local_delta(start, len(batch), self.training, gradient)
        epoch = len(fed) // self.training.epochs if self.training.kind == "delta" else 1
        seen = Batch(torch.cat([b.x for b in fed[:epoch]]), torch.cat([b.y for b in fed[:epoch]]))
        step = self._step(state, seen, rng, secrets)
        tensors = self.defense.update(tensors, step)
        tensors = {name: t.detach() for name, t in tensors.items()}
        return Update(tensors, self.training.kind, len(batch)), Trace(batch, seen, secrets)

    def _step(self, state: Tensors, batch: Batch, rng: torch.Generator, secrets: Tensors | None = None) -> Step:
        found = secrets if secrets is not None else {}
        return Step(self.model, state, batch, self.mean, self.std, self.num_classes, rng, self.memory, secrets=found)
