"""Methods of a user's own, named in tests as `audit_methods:Name`."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.core.observation import Observation
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.update.clip import Clip


class Broken(Defense):
    """A defense with a fault in it."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        raise RuntimeError("this defense\nis broken")


class Deadly(Defense):
    """A defense that takes its process with it, as an exhausted memory does."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        os.kill(os.getpid(), signal.SIGKILL)
        return tensors


class Silent(Defense):
    """A defense that sends nothing but zeros."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {name: torch.zeros_like(t) for name, t in tensors.items()}


class Darkened(Defense):
    """A defense that trains on darker images."""

    def data(self, batch, step):  # type: ignore[no-untyped-def]
        return type(batch)(batch.x * 0.5, batch.y)


class Picky(Attack):
    """An attack that applies nowhere."""

    def applies(self, observation: Observation) -> str | None:
        return "it never does"


class Lost(Attack):
    """An attack whose answer for the first victim is not finite."""

    def run(self, target: Target) -> Answer:
        x = torch.zeros(target.shape)
        x[0] = float("nan")
        return Answer(x, torch.zeros(len(x)))


class Careless(Attack):
    """An attack that draws from torch's global stream."""

    def run(self, target: Target) -> Answer:
        return Answer(torch.randn(target.shape), torch.zeros(target.shape[0]))


class Crooked(Attack):
    """A malicious server that scales the classifier before it sends the model, and then guesses grey."""

    def tamper(
        self, module: nn.Module, input_shape: tuple[int, int, int], public: Batch | None = None, batch_size: int = 1
    ) -> nn.Module:
        assert public is not None and public.image_shape == input_shape and abs(float(public.x.mean())) < 0.1
        with torch.no_grad():
            list(module.parameters())[-1].mul_(2.0)
        return module

    def run(self, target: Target) -> Answer:
        seen = list(target.state.values())[-1]
        return Answer(torch.zeros(target.shape), torch.full((target.shape[0],), float(seen.sum())))


class Hungry(Attack):
    """Takes 200 MB a row of what its process may still have, which is 300 MB: by a limit of the system's, not a fake."""

    def run(self, target: Target) -> Answer:
        import resource
        from pathlib import Path

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 300 * 2**20
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        try:
            rows = min(target.rows_at_once, target.shape[0])
            torch.ones(self.least(rows) * 200 * 2**20 // 4)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        return Answer(torch.zeros(target.shape), torch.zeros(target.shape[0]))

    def least(self, rows: int) -> int:
        return rows


class Insatiable(Hungry):
    """However little it is given to do at once, it wants more than there is."""

    def least(self, rows: int) -> int:
        return 2


class OtherTensors(Defense):
    """A defense that sends the image, and tensors of many kinds, beside the parameters."""

    counters = ("linear", "audit_methods:ReadsOthers", "audit_methods:Nothing")

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        hidden = torch.complex(step.batch.x, step.batch.x)
        odd = {"image": step.batch.x, "a/b": hidden, "": torch.tensor(3), "none": torch.zeros(0), "half": hidden.real.half()}
        return odd | {name: t + step.rng.normal(t.shape) for name, t in tensors.items()}


class DoubleComplex(Defense):
    """A defense whose update cannot be stored."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {**tensors, "more": torch.zeros(2, dtype=torch.complex128)}


class OddTensor(Defense):
    """A defense that sends one more tensor, of a kind that its class says."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {**tensors, **self.more(step.batch.x)}

    def more(self, x: torch.Tensor) -> Tensors:
        return {"more": x.to(torch.float8_e8m0fnu)}


class LongName(OddTensor):
    """A name that no file of tensors may have."""

    def more(self, x: torch.Tensor) -> Tensors:
        return {"a" * 2000: x}


class ManyAxes(OddTensor):
    """More axes than are read."""

    def more(self, x: torch.Tensor) -> Tensors:
        return {"more": x.reshape([1] * 20 + [-1])}


class Sparse(OddTensor):
    """Not dense."""

    def more(self, x: torch.Tensor) -> Tensors:
        return {"more": x.to_sparse()}


class Numbered(OddTensor):
    """Two names that would be one as text."""

    def more(self, x: torch.Tensor) -> Tensors:
        return {"1": torch.zeros(3), 1: x}  # type: ignore[dict-item]


class Incomplete(Defense):
    """A defense that leaves a parameter out."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return dict(list(tensors.items())[1:])


class OtherClip(Clip):
    """A subclass of a defense of the project that does something else."""

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return tensors


class OtherParts(Defense):
    """A defense that says that it is clipping."""

    counters = ("swift",)

    @property
    def parts(self) -> tuple[Defense, ...]:
        return (Clip(),)

    @property
    def stages(self) -> list[str]:
        return []

    @property
    def spec(self) -> str:
        return "audit_methods:OtherParts"

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return tensors


class ReadsOthers(Attack):
    """An attack that takes the image out of a tensor that is no parameter."""

    def run(self, target: Target) -> Answer:
        images = [target.normalize(o.update.others["image"]) for o in target.observations]
        assert all(o.update.others["a/b"].is_complex() and "image" not in o.update.tensors for o in target.observations)
        return Answer(torch.stack(images), torch.zeros(target.shape[0]))
