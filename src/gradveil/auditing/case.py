"""The ground an audit stands on: data, model, training state, victims and local training."""

import copy
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradveil import __version__, models
from gradveil import attacks as attack_methods
from gradveil import data as data_sets
from gradveil import defenses as defense_methods
from gradveil.attacks.base import Attack
from gradveil.auditing.spec import AuditSpec, written
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction, copied
from gradveil.core.hashing import digest, short_hash, source_hash
from gradveil.core.local_training import LocalTraining, freeze
from gradveil.core.losses import DEFAULT, check_loss, find_loss, loss_name
from gradveil.core.randomness import generator, seeded
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.defenses.base import Defense
from gradveil.metrics.leak_test import Slots, strangers_wanted
from gradveil.storage.weights import load_weights

# To be raised when the results of every cell change: observation, client, labels, attack engine, training, scoring.
PROTOCOL = 6


class Case:
    """Built alike in every process from one spec; bad input raises `UserError` here, before anything is written."""

    def __init__(self, spec: AuditSpec):
        self.spec = spec
        self.loss = find_loss(spec.loss)
        rows = spec.loss != DEFAULT
        self.data = data_sets.load(spec.data, seed=spec.seed, num_classes=spec.num_classes, rows=rows)
        if spec.utility and not self.data.has_classes:
            raise UserError("the utility is an accuracy, and the targets of this data are no classes; leave it out.")
        shape, classes = self.data.input_shape, self.data.num_classes
        module = models.build(spec.model, input_shape=shape, num_classes=classes, seed=spec.seed)
        self.server, self.training = copied(module).cpu().float(), spec.local_training
        if spec.weights is not None:
            load_weights(self.server, spec.weights)
        freeze(self.server, self.training.frozen)
        self.defenses = {written(d): defense_methods.parse(d) for d in spec.defenses}
        self._try_loss()
        random = generator(spec.seed, "victims")
        self.victims, self.strangers = draw_victims(self.private_labels, spec.victims, spec.images, random, spec.skip_victims)
        for defense in self.defenses.values():
            if "model" in defense.stages:  # a defense that does not fit the model is refused at once
                self._try(defense)

    def _try_loss(self) -> None:
        images = self.data.private[:2]
        with torch.no_grad():
            outputs = copied(self.server).eval()(images.x)
        check_loss(self.loss, outputs, images.y)

    def _try(self, defense: Defense) -> None:
        try:
            self.task(defense)
        except (Exception, SystemExit) as error:  # from the user's model, which the defense looks into
            if isinstance(error, UserError):
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"defense '{defense.spec}' cannot change this model ({type(error).__name__}: {reason}).") from None

    # -- what is attacked --------------------------------------------------------------------------------------------

    @property
    def seen_training(self) -> LocalTraining:
        """What the server takes to have been done: the mini-batches of clients that work side by side are one."""
        size = self.training.batch_size
        return replace(self.training, batch_size=None if size is None else size * self.spec.aggregate)

    def batch(self, victim: int) -> Batch:
        return self.data.private[self.victims[victim]]

    @property
    def training_data(self) -> DataSet:
        """What the attacked model is trained on."""
        if not self.spec.held_out:
            return self.data
        keep = torch.ones(len(self.data.private), dtype=torch.bool)
        keep[self.victims.flatten()] = False
        return replace(self.data, private=self.data.private[keep.nonzero().flatten()])

    @property
    def public(self) -> Batch | None:
        return self.data.public if len(self.data.public) else None

    @cached_property
    def _public_inputs(self) -> Batch | None:
        """Public images as the network takes them, for a malicious server, and their classes where they are of the task's."""
        if self.public is None:
            return None
        labels = self.public.hard_labels
        is_labelled = self.data.has_classes and self.data.public_from is None
        inputs = self.data.task(ModelFunction(self.server)).normalize(self.public.x)
        return Batch(inputs, labels if is_labelled else torch.full_like(labels, -1))

    def classes(self, images: Batch) -> Tensor:
        """The classes of images; one for all where the targets of this data are no classes."""
        labels = images.hard_labels
        return labels if self.data.has_classes else torch.zeros_like(labels)

    @property
    def private_labels(self) -> Tensor:
        return self.classes(self.data.private)

    @property
    def private_counts(self) -> NDArray[np.int64]:
        """The number of private images per class."""
        return np.bincount(self.private_labels.numpy(), minlength=self.data.num_classes)

    @cached_property
    def slots(self) -> Slots:
        """Which victims stand in which batch, and the strangers that they are tested against."""
        labels, victims = self.private_labels, self.victims.flatten()
        batch = torch.arange(len(victims)) // self.spec.images
        return Slots(batch.numpy(), labels[victims].numpy(), labels[self.strangers].numpy())

    @cached_property
    def tested(self) -> Batch:
        """The images of the test: all victims, then the strangers."""
        return self.data.private[torch.cat([self.victims.flatten(), self.strangers])]

    @cached_property
    def distractors(self) -> Batch:
        """Images for identification: those of all parts except the victims, the strangers, and copies of them.

        A public part borrowed from another set has other classes and is left out.
        """
        parts = [self.data.private, self.data.test]
        if self.data.public_from is None:
            parts.insert(1, self.data.public)
        pool = Batch(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))
        keep = torch.ones(len(pool), dtype=torch.bool)
        keep[torch.cat([self.victims.flatten(), self.strangers])] = False  # the pool begins with the private part
        sums, tested = pool.x.double().sum(dim=(1, 2, 3)), self.tested.x
        for i in torch.isin(sums, tested.double().sum(dim=(1, 2, 3))).logical_and(keep).nonzero().flatten():
            keep[i] = not bool((tested == pool.x[i]).flatten(1).all(dim=1).any())
        return Batch(pool.x[keep], self.classes(pool)[keep])

    def attack(self, text: str) -> Attack:
        method = next((a for a in self.spec.attacks if isinstance(a, Attack) and a.spec == text), None)
        return method or attack_methods.parse(text)

    def task(self, defense: Defense, tampering: Attack | None = None, trained: Tensors | None = None) -> tuple[Task, Tensors]:
        """The task with the model as both sides run it (the server's, tampered with, then changed by the defense), and
        the model's state."""
        module = copy.deepcopy(self.server)
        tensors = dict(trained or {})
        if trained:
            _load(module, tensors)
        if tampering is not None:
            with seeded(self.spec.seed, "tamper"):
                module = tampering.tamper(module, self.data.input_shape, self._public_inputs, self.spec.images)
            for name in module.state_dict():
                tensors.pop(name, None)  # what the server sends is what it tampered with
        with seeded(self.spec.seed, "network"):
            module = defense.model(module, self.data.input_shape)
        _load(module, tensors)
        function = ModelFunction(module, self.loss, self.training.mode)
        return self.data.task(function), function.state()

    # -- what it is called -------------------------------------------------------------------------------------------

    @cached_property
    def data_hash(self) -> str:
        parts = (self.data.private, self.data.public, self.data.test)
        tensors = {f"{i}{n}": t for i, p in enumerate(parts) for n, t in (("x", p.x), ("y", p.y))}
        return digest(str(self.data.num_classes), {**tensors, "mean": self.data.mean, "std": self.data.std})

    @cached_property
    def model_hash(self) -> str:
        source = source_hash(self.spec.model, *{type(m): None for m in self.server.modules()})
        return digest(f"{_layers(self.server)}\x1f{source}", self.server.state_dict())

    @property
    def names(self) -> dict[str, str]:
        """What stands for data and model in files: their text, or the kind of object and what is in it."""
        spec, kinds = self.spec, {"data": self.data.name, "model": type(self.server).__name__}
        hashes = {"data": self.data_hash, "model": self.model_hash}
        sources = {"data": spec.data, "model": spec.model}
        names = {n: v if isinstance(v, str) else f"{kinds[n]}@{hashes[n][:8]}" for n, v in sources.items()}
        return names | ({"loss": loss_name(spec.loss)} if spec.loss != DEFAULT else {})

    @cached_property
    def terms(self) -> dict[str, Any]:
        summed = {"aggregate": self.spec.aggregate} if self.spec.aggregate > 1 else {}
        fresh = {"skip_victims": self.spec.skip_victims} if self.spec.skip_victims else {}
        stated: dict[str, Any] = {"held_out": True} if self.spec.held_out else {}
        stated |= {"trained_by": self.spec.trained_by} if self.spec.trained_by != "sgd" else {}
        stated |= {"trained_under": "none"} if self.spec.trained_under == "none" else {}
        return self.spec.terms() | summed | fresh | stated | self.names

    @cached_property
    def id(self) -> str:
        """A short hash of all that the results of any cell depend on."""
        hashes = [self.data_hash, self.model_hash, source_hash(self.spec.loss, self.loss)]
        return short_hash([self.terms, hashes, __version__, PROTOCOL])


def draw_victims(labels: Tensor, victims: int, size: int, random: torch.Generator, skipped: int = 0) -> tuple[Tensor, Tensor]:
    """Victims × batch places in the private part, none twice, and the places of the strangers.

    One random order serves both. Victims: every class once, then again. Strangers: of each class that has victims, the
    images that come next in its order. So within a class it is chance alone who is a victim and who a stranger. The
    images of victims that are `skipped` are neither.
    """
    wanted, passed_over = victims * size, skipped * size
    if wanted + passed_over > len(labels):
        fresh = f", and as many of the {skipped} before them," if skipped else ""
        needed = f"{victims} victims with {size} images each{fresh} need {wanted + passed_over} private images"
        raise UserError(f"{needed}; the data has {len(labels)}.")
    shuffled = torch.randperm(len(labels), generator=random)
    before: Counter[int] = Counter()
    turn = []
    for label in labels[shuffled].tolist():
        turn.append(before[label])
        before[label] += 1
    order = shuffled[torch.argsort(torch.tensor(turn), stable=True)][passed_over:]
    drawn, rest = order[:wanted], order[wanted:]
    count = Counter(labels[drawn].tolist())
    strangers = [rest[labels[rest] == label][: strangers_wanted(number)] for label, number in sorted(count.items())]
    return drawn.view(victims, size), torch.cat(strangers)


def _layers(module: nn.Module) -> str:
    """Its repr; where a class of the user's has none, the kinds of its parts."""
    try:
        return repr(module)
    except Exception:
        return " ".join(f"{path}:{type(part).__qualname__}" for path, part in module.named_modules())


def _load(module: nn.Module, tensors: Tensors) -> None:
    """Put in those tensors that are there by name and shape."""
    state = module.state_dict()
    module.load_state_dict({n: t for n, t in tensors.items() if n in state and state[n].shape == t.shape}, strict=False)
