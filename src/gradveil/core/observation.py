"""What an adversary sees and what only a judge may know.

An `Observation` is built only from what the server really receives, copied; nothing private can be reached from it.
What an adversary is granted beyond that is in its `Knowledge`, and only there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from torch import Tensor

from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.task import Task
from gradveil.core.types import Batch, Level, Noise, Tensors, Update

_Part = TypeVar("_Part")


@dataclass
class Trace:
    """What the judge may know and the adversary may not."""

    original: Batch
    fed: Batch  # what entered the network, with its effective (perhaps soft) labels
    secrets: Tensors = field(default_factory=dict)  # masks, mixing coefficients, sampled noise, concealed samples …


class DefenseSettings(Protocol):
    """What an adversary may ask of a defense: the parts of a combination, and what it declares about itself."""

    @property
    def parts(self) -> Sequence[object]: ...

    def added_noise(self, examples: int) -> Noise | None: ...

    def clip_norm(self, examples: int) -> float | None: ...


@dataclass(frozen=True)
class Knowledge:
    """What the adversary may know: `realistic` infers labels, `paper` grants them, `upper-bound` every secret."""

    level: Level = "realistic"
    batch_size: int = 1
    training: LocalTraining = field(default_factory=LocalTraining)
    defense: DefenseSettings | None = None  # its settings: how it works is no secret, what it drew is
    labels: Tensor | None = None  # of the images fed, when granted
    public: Batch | None = None  # data of the same kind that anyone may have
    secrets: Mapping[str, Tensor] = field(default_factory=dict)
    aggregate: int = 1  # clients, with equal numbers of these images, of whose updates only the mean is seen
    norm: float = 1.0  # length of the updates as they were sent; updates, `noise` and `clip_norm` are in units of it
    entries: int = 1  # of an update

    def part(self, kind: type[_Part]) -> _Part | None:
        """The part of the defense that is of this class, or None."""
        return next((p for p in (self.defense.parts if self.defense else ()) if isinstance(p, kind)), None)

    def needed_part(self, kind: type[_Part]) -> _Part:
        """The same for a caller that cannot do without."""
        part = self.part(kind)
        if part is None:
            raise LookupError(f"the defense has no part of class {kind.__name__}")
        return part

    @property
    def noise(self) -> Noise | None:
        """The noise that the defense declares for this batch size, or None.

        Relative noise has a size at unit length alone: the length sent is that of update and noise together. In a mean of
        several clients it has none.
        """
        noise = self.defense.added_noise(self.batch_size // self.aggregate) if self.defense else None
        if noise is None or not noise.relative:
            return noise and noise._replace(std=noise.std / self.norm / math.sqrt(self.aggregate))
        if self.aggregate > 1:
            return None
        return Noise(noise.std / math.sqrt(self.entries * (1 + noise.std**2)), noise.law)

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of an update that the defense declares for this batch size, or None."""
        bound = self.defense.clip_norm(self.batch_size) if self.defense and self.aggregate == 1 else None
        return bound and bound / self.norm

    def granted(self) -> list[str]:
        """In words, for the report."""
        clients = f" over {self.aggregate} clients" if self.aggregate > 1 else ""
        items = [f"batch size {self.batch_size}{clients}", f"local training ({self.training.kind})"]
        if self.defense is not None:
            items.append("the defense and its settings")
        if self.labels is not None:
            items.append("labels")
        if self.public is not None:
            items.append(f"{len(self.public)} public images")
        return items + [f"secret: {name}" for name in self.secrets]


@dataclass(frozen=True)
class Sighting:
    """One update as the server saw it: the model state it was computed on, the update, and whose private set."""

    state: Tensors
    update: Update
    group: int = 0


@dataclass(frozen=True)
class Observation:
    """All that an attack receives about one victim. One gradient is a list of one sighting."""

    task: Task
    seen: tuple[Sighting, ...]
    knowledge: Knowledge = field(default_factory=Knowledge)

    @property
    def model(self) -> ModelFunction:
        return self.task.model

    @property
    def state(self) -> Tensors:
        return self.seen[0].state

    @property
    def update(self) -> Update:
        return self.seen[0].update


@dataclass
class Reconstruction:
    """What an attack believes the private images are, in [0, 1], and its own score of them (lower is better)."""

    images: Tensor
    labels: Tensor | None
    score: float
    iterations: int = 0
    seconds: float = 0.0
    failed: str | None = None  # why the attack has no finite answer; never left out of an average silently
    history: dict[str, list[float]] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from gradveil.core.notebook import figure

        parts = [f"score {self.score:.3g}", f"{self.iterations} iterations", f"{self.seconds:.1f} s"]
        if self.labels is not None:
            parts.insert(0, "labels " + labels_text(self.labels))
        return figure(self.images, " · ".join(parts + ([f"failed: {self.failed}"] if self.failed else [])))


def labels_text(labels: Tensor) -> str:
    """Labels or rows of targets, for people."""
    if labels.ndim == 1:
        return ", ".join(str(v) for v in labels.tolist())
    return "; ".join(" ".join(f"{v:.3g}" for v in row) for row in labels.tolist())


def observe(
    task: Task,
    seen: list[Sighting],
    *,
    level: Level = "realistic",
    training: LocalTraining | None = None,
    defense: DefenseSettings | None = None,
    public: Batch | None = None,
    trace: Trace | None = None,
    aggregate: int = 1,
) -> Observation:
    """The one door between client and adversary: copies what was sent, and of the trace only what `level` grants."""
    labels, secrets = None, {}
    if trace is not None and level != "realistic":
        labels = trace.fed.y.detach().clone()
    if trace is not None and level == "upper-bound":
        secrets = {k: v.detach().clone() for k, v in trace.secrets.items()}
    training, task = training or LocalTraining(), task.with_model(task.model.without_dropout)
    # The state is the server's own and may be large, so victims of one round share it; what was sent is copied.
    sightings = tuple(Sighting(s.state, s.update.received(task.model.parameters(s.state)), s.group) for s in seen)
    if training.kind == "delta" and training.is_single_step(seen[0].update.examples):
        sightings, training = tuple(_gradient_of(s, training) for s in sightings), training.single_gradient()
    knowledge = Knowledge(
        level=level,
        batch_size=seen[0].update.examples,
        training=training,
        defense=defense,
        labels=labels,
        public=public,
        secrets=secrets,
        aggregate=aggregate,
        entries=sum(t.numel() for t in sightings[0].update.tensors.values()),
    )
    return Observation(task, sightings, knowledge)


def _gradient_of(sighting: Sighting, training: LocalTraining) -> Sighting:
    """The weight difference of a single step as the gradient that it is; its size does not matter to attacks."""
    start = {name: sighting.state[name] for name in sighting.update.tensors}
    tensors = training.as_gradient(sighting.update.tensors, start, sighting.update.examples)
    return replace(sighting, update=replace(sighting.update, tensors=tensors, kind="gradient"))
