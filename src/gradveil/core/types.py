"""The vocabulary: what a client holds, what leaves it, what an adversary sees, what a judge may know.

An `Observation` is built only from what the server really receives, copied; nothing private can be reached from it.
What an adversary is granted beyond that stands in its `Knowledge`, and only there.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.settings import settings

if TYPE_CHECKING:
    from gradveil.core.gradients import ModelFunction

Tensors = dict[str, Tensor]
Level = Literal["realistic", "paper", "upper-bound"]
Kind = Literal["gradient", "delta"]

REPRODUCIBLE = "the protection is reproducible: everyone who knows the seed can undo it."
_BEGIN, _WORDS = 24, 624  # where the Mersenne Twister's words lie in the state of a torch.Generator, and how many


@dataclass(frozen=True)
class Batch:
    """Private images (n × C × H × W, in [0, 1]) and labels (n class numbers, or n × classes when soft).

    Where the loss takes no classes, a label is the row of numbers that is the image's target.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 4 or len(self.x) != len(self.y):
            raise ValueError(f"images are {tuple(self.x.shape)}, labels {tuple(self.y.shape)}")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Batch:
        return Batch(self.x[index], self.y[index])

    @property
    def hard_labels(self) -> Tensor:
        """Class numbers; of soft labels the largest."""
        return self.y if self.y.ndim == 1 else self.y.argmax(dim=1)


@settings
class LocalTraining:
    """What a client does in a round: one gradient (no `lr`), or steps of SGD whose weight delta it sends."""

    epochs: int = Field(default=1, ge=1)
    batch_size: int | None = Field(default=None, ge=1)  # None: the whole batch at once
    lr: float | None = Field(default=None, gt=0)  # None: send the gradient itself
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)

    @property
    def kind(self) -> Kind:
        return "gradient" if self.lr is None else "delta"

    def slices(self, examples: int) -> list[slice]:
        """The mini-batches of a round, in the order in which they are taken."""
        if self.lr is None:
            return [slice(0, examples)]
        size = self.batch_size or examples
        return [slice(i, min(i + size, examples)) for _ in range(self.epochs) for i in range(0, examples, size)]


@dataclass(frozen=True)
class Update:
    """What leaves the client: named tensors (a gradient, or weights after minus before), and how many examples."""

    tensors: Tensors
    kind: Kind = "gradient"
    examples: int = 1

    def __len__(self) -> int:
        return len(self.tensors)

    def copy(self) -> Update:
        return Update({k: v.detach().clone() for k, v in self.tensors.items()}, self.kind, self.examples)


@dataclass
class Trace:
    """What the judge may know and the adversary may not."""

    original: Batch
    fed: Batch  # what entered the network, with its effective (perhaps soft) labels
    secrets: Tensors = field(default_factory=dict)  # masks, mixing coefficients, sampled noise, concealed samples …


@dataclass(frozen=True)
class Knowledge:
    """What the adversary may know: `realistic` infers labels, `paper` grants them, `upper-bound` every secret."""

    level: Level = "realistic"
    batch_size: int = 1
    training: LocalTraining = field(default_factory=LocalTraining)
    defense: Any = None  # the defense's settings: how it works is no secret, what it drew is
    labels: Tensor | None = None  # of the images fed, when granted
    public: Batch | None = None  # data of the same kind that anyone may have
    secrets: Mapping[str, Tensor] = field(default_factory=dict)

    def granted(self) -> list[str]:
        """In words, for the report."""
        items = [f"batch size {self.batch_size}", f"local training ({self.training.kind})"]
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

    model: ModelFunction
    seen: tuple[Sighting, ...]
    input_shape: tuple[int, int, int]
    num_classes: int  # outputs of the model
    mean: Tensor
    std: Tensor
    knowledge: Knowledge = field(default_factory=Knowledge)
    has_classes: bool = True  # False: targets are a row of numbers an image (multi-label, regression)

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
    model: ModelFunction,
    seen: list[Sighting],
    *,
    input_shape: tuple[int, int, int],
    num_classes: int,
    mean: Tensor,
    std: Tensor,
    level: Level = "realistic",
    training: LocalTraining | None = None,
    defense: Any = None,
    public: Batch | None = None,
    trace: Trace | None = None,
    has_classes: bool = True,
) -> Observation:
    """The one door between client and adversary: copies what was sent, and of the trace only what `level` grants."""
    training = training or LocalTraining()
    labels, secrets = None, {}
    if trace is not None and level != "realistic":
        labels = trace.fed.y.detach().clone()
    if trace is not None and level == "upper-bound":
        secrets = {k: v.detach().clone() for k, v in trace.secrets.items()}
    knowledge = Knowledge(
        level=level,
        batch_size=seen[0].update.examples,
        training=training,
        defense=defense,
        labels=labels,
        public=public,
        secrets=secrets,
    )
    # The state is the server's own and may be large, so victims of one round share it; what was sent is copied.
    sightings = tuple(Sighting(s.state, s.update.copy(), s.group) for s in seen)
    return Observation(model, sightings, input_shape, num_classes, mean.clone(), std.clone(), knowledge, has_classes)


def generator(*key: int | str) -> torch.Generator:
    """A random stream of its own for (seed, victim, draw, purpose …): no draw depends on the order of work.

    For audits only: torch uses 32 bits of a seed, so that a stream can be found by trying. `Streams` cannot.
    """
    digest = hashlib.sha256("\x1f".join(str(k) for k in key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Streams:
    """Random streams for protection. All 19,968 bits of a stream's state are hashed from a secret and the stream's key.

    `fresh` adds new randomness of the operating system to every stream: no two streams are alike, whatever their keys.
    """

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    fresh: bool = True

    @classmethod
    def of_seed(cls, seed: int) -> Streams:
        """Streams that everyone who knows the seed can repeat."""
        return cls(f"reproducible {seed}".encode(), fresh=False)

    def __call__(self, *key: int | str) -> torch.Generator:
        parts = [self.secret, *(str(k).encode() for k in key), secrets.token_bytes(32) if self.fresh else b""]
        hashed = hashlib.shake_256(b"".join(hashlib.sha256(part).digest() for part in parts))
        words = np.frombuffer(hashed.digest(4 * _WORDS), dtype=np.uint32).astype(np.int64)
        rng = torch.Generator().manual_seed(0)
        state = rng.get_state()
        state[_BEGIN : _BEGIN + 8 * _WORDS].view(torch.int64).copy_(torch.from_numpy(words))
        return rng.set_state(state)
