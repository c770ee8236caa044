"""Models as people write them, good and bad: every trait alone or with others."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from damage import CLASSES, SHAPE, Job, Random
from fuzz_updates import DATA
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

import gradveil as gv


class OnceOnly(torch.autograd.Function):
    """An operation whose derivative has none of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


TRAITS = (
    *("raises", "raises-later", "raises-on-one", "exits", "interrupts", "recurses", "asserts", "wrong-classes", "tuple"),
    *("dict", "none", "three-axes", "scalar", "flat", "integer-output", "complex-output", "nan-output", "detached"),
    *("constant", "no-parameters", "all-frozen", "some-frozen", "shared", "half", "bfloat16", "double", "complex"),
    *("complex-part", "once-only", "in-place", "data-dependent", "batch-norm", "dropout", "random", "empty-parameter"),
    *("nan-weights", "huge-weights", "meta", "lazy", "scripted", "weight-norm", "no-copy", "unused", "kwargs", "numpy"),
    *("list-of-layers", "buffer-changes", "no-grad-inside", "embedding", "recurrent", "hook", "slow-repr"),
    *("slot-attribute", "fine", "fine", "fine"),
)


class Net(nn.Module):
    def __init__(self, traits: set[str], shape: tuple[int, int, int], classes: int):
        super().__init__()
        self.traits, self.calls = traits, 0
        self.body = nn.Linear(shape[0] * shape[1] * shape[2], 5)
        self.norm = nn.BatchNorm1d(5) if "batch-norm" in traits else nn.Identity()
        self.drop = nn.Dropout(0.5) if "dropout" in traits else nn.Identity()
        self.head: nn.Module = nn.Linear(5, classes + ("wrong-classes" in traits))
        if "shared" in traits:
            self.twin = self.body
        if "unused" in traits:
            self.spare = nn.Linear(3, 3)
        if "empty-parameter" in traits:
            self.empty = nn.Parameter(torch.zeros(0, 3))
        if "buffer-changes" in traits:
            self.register_buffer("seen", torch.zeros(()))
        if "lazy" in traits:
            self.head = nn.LazyLinear(classes)
        if "weight-norm" in traits:
            nn.utils.parametrizations.weight_norm(self.body)
        if "recurrent" in traits:
            self.gru = nn.GRU(5, 5, batch_first=True)
        if "embedding" in traits:
            self.table = nn.Embedding(8, 5, sparse=True)
        if "list-of-layers" in traits:
            self.layers = [nn.Linear(5, 5)]  # not registered: torch does not see it
        if "hook" in traits:
            self.register_forward_hook(lambda *_: None)
        if "complex-part" in traits:
            self.phase = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        if "slot-attribute" in traits:
            self.generator = (i for i in range(3))  # cannot be copied
        with torch.no_grad():
            if "nan-weights" in traits:
                self.body.bias.fill_(float("nan")) if "weight-norm" not in traits else None
            if "huge-weights" in traits:
                self.head.weight.fill_(1e38) if "lazy" not in traits else None

    def forward(self, x: Tensor, *extra: Any, **more: Any) -> Any:
        traits, self.calls = self.traits, self.calls + 1
        self._misbehave(x)
        x = x.flatten(1)
        if "numpy" in traits:
            x = torch.from_numpy(x.detach().numpy() * 1.0)
        if "in-place" in traits:
            x.mul_(0.5)
        with torch.set_grad_enabled(torch.is_grad_enabled() and "no-grad-inside" not in traits):
            z = self.norm(self.body(x))
        z = OnceOnly.apply(z) if "once-only" in traits else torch.sigmoid(z)
        if "random" in traits:
            z = z + torch.randn(z.shape).to(z)
        if "complex-part" in traits:
            z = (z * self.phase).real
        if "recurrent" in traits:
            z = self.gru(z[:, None])[0][:, 0]
        if "embedding" in traits:
            z = z + self.table(torch.arange(len(z)) % 8)
        if "list-of-layers" in traits:
            z = self.layers[0](z)
        if "data-dependent" in traits and z.sum() > 0:
            z = z * 2
        if "buffer-changes" in traits:
            self.seen += 1
        return self._shape(self.head(self.drop(z)))

    def _misbehave(self, x: Tensor) -> None:
        traits = self.traits
        if "raises" in traits or ("raises-later" in traits and self.calls > 2):
            raise ValueError("not today\nnor tomorrow \x1b[31m")
        if "raises-on-one" in traits and len(x) == 1:
            raise IndexError("one image is too few")
        if "asserts" in traits:
            assert x.shape[0] == 7
        if "exits" in traits:
            raise SystemExit(3)
        if "interrupts" in traits:
            raise StopIteration
        if "recurses" in traits:
            self._misbehave(x)

    def _shape(self, out: Tensor) -> Any:
        traits = self.traits
        changes: dict[str, Any] = {
            "tuple": lambda: (out, out),
            "dict": lambda: {"logits": out},
            "none": lambda: None,
            "three-axes": lambda: out[:, None],
            "scalar": out.sum,
            "flat": lambda: out.argmax(1),
            "integer-output": (out * 100).long,
            "complex-output": lambda: out + 0j,
            "nan-output": lambda: out * float("nan"),
            "detached": out.detach,
            "constant": lambda: torch.zeros_like(out),
        }
        chosen = sorted(traits & changes.keys())
        return changes[chosen[0]]() if chosen else out

    def __deepcopy__(self, memo: dict[int, Any]) -> Net:
        if "no-copy" in self.traits:
            raise TypeError("cannot be copied")
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()}
        return made

    def __repr__(self) -> str:
        if "slow-repr" in self.traits:
            raise RuntimeError("no repr")
        return super().__repr__()


def make(rng: random.Random, shape: tuple[int, int, int], classes: int) -> tuple[str, nn.Module]:
    traits = {rng.choice(TRAITS) for _ in range(rng.randrange(1, 4))}
    model: nn.Module = Net(traits, shape, classes)
    if "no-parameters" in traits:
        model = nn.Flatten()
    if "meta" in traits:
        model = model.to("meta")
    for name, kind in (("half", torch.half), ("bfloat16", torch.bfloat16), ("double", torch.double)):
        if name in traits:
            model = model.to(kind)
    if "complex" in traits:
        model = model.to(torch.complex64)
    parameters = [p for p in model.parameters() if not isinstance(p, UninitializedParameter)]
    frozen = parameters if "all-frozen" in traits else parameters[:2] if "some-frozen" in traits else []
    for parameter in frozen:
        parameter.requires_grad_(False)
    if "scripted" in traits:
        plain = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
        model = torch.jit.trace(plain, torch.zeros(2, *shape))
    return "+".join(sorted(traits)), model


def audited(rng: Random, folder: Path) -> Job:
    name, module = make(rng, SHAPE, CLASSES)
    chosen = rng.choice(["ig:steps=2", "linear", "dlg:steps=2", "rgap"])
    defense = rng.choice(["none", "prune:ratio=0.5", "soteria", "precode", "dpsgd"])

    def job() -> object:
        report = gv.audit(
            DATA, module, [defense], [chosen], victims=1, quiet=True, out=folder / "out", batch_size=rng.choice([1, 1, 2])
        )
        problems = [a.error for d in report.summary.defenses for a in d.attacks if a.error]
        assert all(len(p.splitlines()) == 1 for p in problems), f"{name}: {problems}"
        return report

    return job


def attacked(rng: Random, folder: Path) -> Job:
    """As `gradveil attack` does it by default: a captured update in a file, and the model it was computed on."""
    name, module = make(rng, SHAPE, CLASSES)
    size = rng.choice([1, 1, 1, 2])
    x, y = torch.rand(size, *SHAPE, generator=torch.Generator().manual_seed(rng.randrange(2**32))), torch.arange(size)
    file = folder / "update.safetensors"
    save_file(_update(module, x, y), file)
    swift = rng.choice(["swift:restarts=1,cycles=1,adam_steps=20"] * 7 + ["swift"])
    chosen = rng.choice([[swift], [swift], ["linear", "rgap", swift]])
    options: dict[str, Any] = {"labels": y.tolist()} if rng.random() < 0.3 else {}

    def job() -> object:
        rebuilt = gv.attack_update(file, module, SHAPE, chosen, batch_size=size, budget="quick", **options)
        problems = list(rebuilt.not_applicable.values())
        assert all(len(p.splitlines()) == 1 for p in problems), f"{name}: {problems}"
        return rebuilt.save(folder / "out")

    return job


def _update(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of the cross-entropy, or noise where there is none to be had."""
    named = {n: p for n, p in module.named_parameters() if not isinstance(p, UninitializedParameter)}
    try:
        grown = copy.deepcopy(module).train(False)
        F.cross_entropy(grown(x), y).backward()
        gradients = {n: p.grad.to_dense() for n, p in grown.named_parameters() if p.grad is not None}
    except (Exception, SystemExit):  # whatever such a model does
        gradients = {}
    noise = torch.Generator().manual_seed(0)
    for n, p in named.items():
        if p.requires_grad and n not in gradients:
            gradients[n] = torch.randn(p.shape, generator=noise) * 0.01
    return {n: t.contiguous() for n, t in gradients.items()}
