"""The ground an audit stands on: data, model, training state, victims and local training."""

import copy
from collections import Counter
from functools import cached_property
from typing import Any

import torch
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
from gradveil.core.losses import DEFAULT, check_loss, find_loss, loss_name
from gradveil.core.randomness import generator, seeded
from gradveil.core.task import Task
from gradveil.core.types import Batch, LocalTraining, Tensors
from gradveil.defenses.base import Defense

# To be raised when the results of every cell change: observation, client, labels, attack engine, training, scoring.
PROTOCOL = 1


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
        self.server = copied(module).cpu().float()
        self.training = LocalTraining(epochs=spec.local_steps, lr=spec.local_lr if spec.local_steps > 1 else None)
        self.defenses = {written(d): defense_methods.parse(d) for d in spec.defenses}
        self._try_loss()
        random = generator(spec.seed, "victims")
        self.victims = pick_victims(self.data.private.hard_labels, spec.victims, spec.batch_size, random)
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

    def batch(self, victim: int) -> Batch:
        return self.data.private[self.victims[victim]]

    @property
    def public(self) -> Batch | None:
        return self.data.public if len(self.data.public) else None

    @cached_property
    def _public_inputs(self) -> Tensor | None:
        """Public images as the network takes them, for a malicious server."""
        if self.public is None:
            return None
        return self.data.task(ModelFunction(self.server)).normalize(self.public.x)

    @cached_property
    def pool(self) -> Batch:
        """Distractors for identification. A public part borrowed from another set has other classes and is left out."""
        if self.data.public_from is None:
            return self.data.pool()
        parts = (self.data.private, self.data.test)
        return Batch(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))

    @cached_property
    def strangers(self) -> Batch:
        """The pool without the victims: against images that a defense changed, their originals are no distractors."""
        others = torch.ones(len(self.pool), dtype=torch.bool)
        others[self.victims.flatten()] = False  # the pool begins with the private part
        return self.pool[others]

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
                module = tampering.tamper(module, self.data.input_shape, self._public_inputs)
            for name in module.state_dict():
                tensors.pop(name, None)  # what the server sends is what it tampered with
        with seeded(self.spec.seed, "network"):
            module = defense.model(module, self.data.input_shape)
        _load(module, tensors)
        function = ModelFunction(module, self.loss)
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
        return self.spec.terms() | self.names

    @cached_property
    def id(self) -> str:
        """A short hash of all that the results of any cell depend on."""
        hashes = [self.data_hash, self.model_hash, source_hash(self.spec.loss, self.loss)]
        return short_hash([self.terms, hashes, __version__, PROTOCOL])


def pick_victims(labels: Tensor, victims: int, size: int, random: torch.Generator) -> Tensor:
    """Victims × batch places in the private part, none twice: every class once, in random order, then again."""
    wanted = victims * size
    if wanted > len(labels):
        raise UserError(f"{victims} victims with {size} images each need {wanted} private images; the data has {len(labels)}.")
    shuffled = torch.randperm(len(labels), generator=random)
    before: Counter[int] = Counter()
    turn = []
    for label in labels[shuffled].tolist():
        turn.append(before[label])
        before[label] += 1
    order = torch.argsort(torch.tensor(turn), stable=True)
    return shuffled[order[:wanted]].view(victims, size)


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
