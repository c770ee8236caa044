"""A defense: settings, and the stages between an image and its update that the defense changes.

`prepare` runs once per client. `model` changes the network that both sides run, `data` acts once on the images of a
client, `batch` and `gradient` act at every local step, `update` acts once on the tensors that are sent. Each is the
identity unless a defense overrides it. A defense holds settings only: `prepare` returns everything that depends on
private data, and the client keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.randomness import Stream, TorchStream
from gradveil.core.settings import spec_of
from gradveil.core.task import Task
from gradveil.core.text import shorten
from gradveil.core.types import Batch, Noise, Tensors

STAGES = ("model", "data", "batch", "gradient", "update")


@dataclass
class Setup:
    """What `prepare` of a defense may use on a client."""

    task: Task
    state: Tensors
    private: Batch
    public: Batch | None = None
    seed: int = 0
    cache: Path | None = None  # a folder for trained networks that can be used again
    progress: Callable[[str, int, int], None] | None = None
    rng: Stream = field(default_factory=TorchStream)

    @property
    def model(self) -> ModelFunction:
        return self.task.model


@dataclass
class Step:
    """What a stage may use: the model at its current weights, the batch, the memory of the defense, a random stream."""

    task: Task
    state: Tensors
    batch: Batch  # pixels in [0, 1]
    rng: Stream
    memory: Any = None  # what `prepare` of this defense returned
    noise: Tensors = field(default_factory=dict)  # the draw of a random model for this batch
    secrets: Tensors = field(default_factory=dict)  # what a defense drew; realistic adversaries never see it
    before: Callable[[Batch], Batch] | None = None  # the data stages of earlier defenses of a combination
    expected: int | None = None  # images of a Poisson sample on average, by which its gradients are divided

    @property
    def model(self) -> ModelFunction:
        return self.task.model

    def protected(self, batch: Batch) -> Batch:
        """Other images of the client after the data stages of the earlier defenses."""
        return batch if self.before is None else self.before(batch)

    def remember(self, **rows: Tensor) -> None:
        """Append rows to secrets: a round of several local steps has the rows of all its steps, in their order."""
        for name, value in rows.items():
            self.secrets[name] = torch.cat([self.secrets[name], value]) if name in self.secrets else value

    def gradient(self, batch: Batch, noise: Tensors | None = None) -> Tensors:
        """The plain gradient of a batch at the current weights."""
        inputs = self.task.normalize(batch.x)
        noise = self.noise if noise is None else noise
        return self.model.gradient(self.state, inputs, batch.y, noise, keep_buffers=False)


class Defense:
    """Base class. Subclasses are `@settings` dataclasses registered with `@defense(name)`.

    `batch.x` is n × C × H × W in [0, 1]; `tensors` has the names and shapes of the trained parameters.
    """

    name: ClassVar[str] = ""
    version: ClassVar[int] = 1  # raised when the results change
    # What its author calls its counters: names of attacks, or `pkg.mod:Class`. They are run and shown, and do not suffice:
    # which attacks the project accepts as counters is declared by these attacks (`against`).
    counters: Sequence[str] = ()
    random: bool = False  # whether two updates of one batch differ
    takes_empty: ClassVar[bool] = False  # whether its batch and gradient stages act on a batch without images
    starts_over: bool = False  # whether its gradient stage computes from the images, whatever gradient comes in

    def prepare(self, setup: Setup) -> Any:
        return None

    def model(self, module: nn.Module, input_shape: tuple[int, int, int]) -> nn.Module:
        return module

    def data(self, batch: Batch, step: Step) -> Batch:
        return batch

    def batch(self, batch: Batch, step: Step) -> Batch:
        return batch

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        return tensors

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return tensors

    def added_noise(self, examples: int) -> Noise | None:
        """The noise on every entry of the update of `examples` images; None: no noise of a known size."""
        return None

    def clip_norm(self, examples: int) -> float | None:
        """The norm to which the whole update of `examples` images is scaled down; None: it is not scaled."""
        return None

    @property
    def parts(self) -> tuple[Defense, ...]:
        """The single defenses of a combination."""
        return (self,)

    @property
    def stages(self) -> list[str]:
        """The stages that this defense changes, in the order in which they run."""
        return [s for s in STAGES if any(p.changes(s) for p in self.parts)]

    def changes(self, stage: str) -> bool:
        """Whether this defense changes a stage; its settings may decide which."""
        return getattr(type(self), stage) is not getattr(Defense, stage)

    @property
    def spec(self) -> str:
        return "+".join(spec_of(p) for p in self.parts)


def claimed_counters(defense: Defense) -> tuple[str, ...]:
    """What its author calls its counters, as texts, whatever was written there."""
    claims = defense.counters
    listed = claims if isinstance(claims, Iterable) and not isinstance(claims, str) else (claims,)
    return tuple(c.strip() if isinstance(c, str) else f"object of class {type(c).__name__}" for c in listed)


def _data_stages(steps: Sequence[tuple[Defense, Step]], batch: Batch) -> Batch:
    for part, step in steps:
        # Draws for other images are not secrets of this batch.
        batch = part.data(batch, replace(step, batch=batch, secrets={}))
    return batch


class Chain(Defense):
    """Several defenses, each stage applied in the order in which they were written."""

    name = "chain"

    def __init__(self, parts: Sequence[Defense]):
        self._parts = tuple(p for part in parts for p in part.parts)
        self.counters = tuple(dict.fromkeys(c for p in self._parts for c in claimed_counters(p)))
        self.random = any(p.random for p in self._parts)
        self.starts_over = next((p.starts_over for p in self._parts if "gradient" in p.stages), False)

    def __repr__(self) -> str:
        return f"Chain({self.spec!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self.spec)

    @property
    def parts(self) -> tuple[Defense, ...]:
        return self._parts

    def added_noise(self, examples: int) -> Noise | None:
        declared = [noise for p in self._parts if (noise := p.added_noise(examples)) is not None]
        if len(declared) < 2:
            return declared[0] if declared else None
        if any(noise.relative for noise in declared):
            return None  # to an update that may hold the noise of another part
        return Noise(math.hypot(*(noise.std for noise in declared)))

    def clip_norm(self, examples: int) -> float | None:
        return min((norm for p in self._parts if (norm := p.clip_norm(examples)) is not None), default=None)

    def prepare(self, setup: Setup) -> Any:
        return [part.prepare(setup) for part in self._parts]

    def model(self, module: nn.Module, input_shape: tuple[int, int, int]) -> nn.Module:
        for part in self._parts:
            module = part.model(module, input_shape)
        return module

    def data(self, batch: Batch, step: Step) -> Batch:
        for part, part_step in self._steps(step):
            batch = part.data(batch, part_step)
        return batch

    def batch(self, batch: Batch, step: Step) -> Batch:
        steps = self._steps(step)
        for i, (part, part_step) in enumerate(steps):
            part_step.batch = batch  # after the earlier parts
            part_step.before = partial(_data_stages, steps[:i])
            batch = part.batch(batch, part_step)
        return batch

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        for part, part_step in self._steps(step):
            tensors = part.gradient(tensors, part_step)
        return tensors

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        for part, part_step in self._steps(step):
            tensors = part.update(tensors, part_step)
        return tensors

    def _steps(self, step: Step) -> list[tuple[Defense, Step]]:
        """Each part with the same step except its memory; the random stream and the secrets are shared."""
        memories = step.memory if step.memory is not None else [None] * len(self._parts)
        return [(part, replace(step, memory=m)) for part, m in zip(self._parts, memories, strict=True)]


class Refused(UserError):
    """A door lets nothing out, for a reason that quotes no private data."""


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor of torch itself: a class of somebody else may lie about its content."""
    return type(value) in (Tensor, nn.Parameter)


def checked_update(expected: Mapping[str, Tensor], returned: object) -> Tensors:
    """Copies of the tensors that a defense returned, in the expected kinds, if they may leave: all, and nothing else.

    Names and shapes must be those of `expected`, values real floating point numbers, finite in the kind that leaves.
    What is checked is the copy that leaves: the defense can no longer change it.
    """
    if not isinstance(returned, Mapping):
        raise Refused(f"the defense returned {type(returned).__name__}, not tensors by name; nothing is sent.")
    answer = dict(returned)
    if wrong := [name for name in (*expected, *answer) if (name in expected) != (name in answer)]:
        problem = "returned nothing for" if wrong[0] in expected else "added"
        raise Refused(f"the defense {problem} '{shorten(str(wrong[0]), 80)}'; nothing is sent.")
    checked = {}
    for name, like in expected.items():
        value = answer[name]
        for one in (value, like):
            if not is_plain(one) or not one.is_floating_point() or one.layout != torch.strided or one.is_meta:
                kind = one.dtype if is_plain(one) else type(one).__name__
                raise Refused(f"'{name}' holds {kind}, not real floating point numbers; nothing is sent.")
        if value.shape != like.shape:
            raise Refused(f"'{name}' is {tuple(value.shape)} after the defense, not {tuple(like.shape)}; nothing is sent.")
        checked[name] = value.detach().to(like, copy=True, memory_format=torch.contiguous_format)
        if not bool(torch.isfinite(checked[name]).all()):
            raise Refused(f"values would leave that are not finite in '{name}'; nothing is sent.")
    return checked
