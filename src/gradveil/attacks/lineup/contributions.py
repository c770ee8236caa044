"""What each image adds to the update of a batch: gradients of single images, kept so that inner products are cheap.

The gradient of a fully connected layer is signal ⊗ input. Two such gradients have the inner product of their signals times
that of their inputs, so the gradient itself is never written out. Other parameters are kept as rows of numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from gradveil.attacks.layers import hooked
from gradveil.core.loops import Loop
from gradveil.core.randomness import TorchStream, generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors

ENTRIES = 2**15  # of the parameters that are kept as rows; of more, a random selection
GROUPS = 6  # of such parameters; each gets its own scale
CHUNK = 2**25  # numbers of single gradients in memory at a time


@dataclass(frozen=True)
class PlainBlock:
    """Gradients as rows of numbers."""

    rows: Tensor  # n × entries

    @property
    def entries(self) -> int:
        return self.rows.shape[1]

    def dot(self, other: Block) -> Tensor:
        assert isinstance(other, PlainBlock)
        return self.rows @ other.rows.T

    def squares(self) -> Tensor:
        return self.rows.square().sum(1)

    def along(self, sent: Tensor) -> Tensor:
        return self.rows @ sent.to(self.rows)

    def scaled(self, factors: Tensor) -> Block:
        return PlainBlock(self.rows * factors[:, None])

    def picked(self, index: Tensor) -> Block:
        return PlainBlock(self.rows[index])

    def restricted(self, kept: Tensor) -> Block:
        return PlainBlock(self.rows[:, kept])


@dataclass(frozen=True)
class LayerBlock:
    """Gradients of a fully connected layer. Where it has a bias, a 1 stands behind each input."""

    inputs: Tensor  # n × width
    signals: Tensor  # n × outputs

    @property
    def entries(self) -> int:
        return self.inputs.shape[1] * self.signals.shape[1]

    def dot(self, other: Block) -> Tensor:
        assert isinstance(other, LayerBlock)
        return (self.inputs @ other.inputs.T) * (self.signals @ other.signals.T)

    def squares(self) -> Tensor:
        return self.inputs.square().sum(1) * self.signals.square().sum(1)

    def along(self, sent: Tensor) -> Tensor:
        return ((self.signals @ sent.to(self.signals)) * self.inputs).sum(1)

    def scaled(self, factors: Tensor) -> Block:
        return replace(self, signals=self.signals * factors[:, None])

    def picked(self, index: Tensor) -> Block:
        return LayerBlock(self.inputs[index], self.signals[index])

    def restricted(self, kept: Tensor) -> Block:
        row, column = kept // self.inputs.shape[1], kept % self.inputs.shape[1]
        return PlainBlock(self.signals[:, row] * self.inputs[:, column])


Block = PlainBlock | LayerBlock


@dataclass(frozen=True)
class Contributions:
    """Gradients of n images, in blocks. Inner products are given per block, along a first axis, in double precision."""

    blocks: tuple[Block, ...]

    @property
    def entries(self) -> Tensor:
        return torch.tensor([block.entries for block in self.blocks], dtype=torch.double)

    def dot(self, other: Contributions) -> Tensor:
        return torch.stack([a.dot(b).double() for a, b in zip(self.blocks, other.blocks, strict=True)])

    def squares(self) -> Tensor:
        return torch.stack([block.squares().double() for block in self.blocks])

    def along(self, sent: Sequence[Tensor]) -> Tensor:
        return torch.stack([block.along(part).double() for block, part in zip(self.blocks, sent, strict=True)])

    def picked(self, index: Tensor) -> Contributions:
        return Contributions(tuple(block.picked(index) for block in self.blocks))

    def restricted(self, kept: Sequence[Tensor]) -> Contributions:
        """Only these entries of each block."""
        return Contributions(tuple(block.restricted(places) for block, places in zip(self.blocks, kept, strict=True)))


class SingleGradients:
    """Computes the gradients of single images at one state of a model."""

    def __init__(self, task: Task, state: Tensors, companions: Tensor, clip: float | None = None):
        """`companions` are images as the network takes them: where BatchNorm couples the images of a batch, each image is
        seen with the statistics of these. `clip` is the largest norm of a single gradient."""
        self.task, self.clip = task, clip
        self.model, self.state = task.model.uncoupled(state, companions)
        layers = {p: m for p, m in self.model.module.named_modules() if isinstance(m, nn.Linear)}
        self.dense = {p: m for p, m in layers.items() if f"{p}.weight" in self.model.trainable}
        self.dense = {p: m for p, m in self.dense.items() if self._is_plain(p, companions[:3])}
        named = {f"{p}.{part}" for p in self.dense for part in ("weight", "bias")}
        self.names = [name for name in self.model.trainable if name not in named]
        self.rest = self.model.restricted_to(self.names)
        sizes = [state[name].numel() for name in self.names]
        kept = torch.randperm(sum(sizes), generator=generator("entries"))[:ENTRIES].sort().values
        # Entries of one group of tensors each, numbered within the concatenation of all.
        bounds = torch.tensor([0, *sizes]).cumsum(0)[torch.linspace(0, len(sizes), min(GROUPS, len(sizes)) + 1).long()]
        self.kept = [kept[(kept >= low) & (kept < high)] for low, high in pairwise(bounds)]

    def of(self, images: Batch, rng: TorchStream, *, shared: bool = True) -> Contributions:
        """Those of images in [0, 1] with their labels. `shared`: whether they serve all victims."""
        x = self.task.normalize(images.x)
        width = sum(self.state[n].numel() for n in self.names) + 64 * x[0].numel()
        chunks = torch.arange(len(x)).split(max(1, CHUNK // width))
        parts = [self._chunk(x[chunks[i]], images.y[chunks[i]], rng) for i in Loop(len(chunks), shared=shared)]
        joined = Contributions(tuple(_joined([part[i] for part in parts]) for i in range(len(parts[0]))))
        done = sum(map(len, chunks[: len(parts)]))
        return joined if done == len(x) else joined.picked(torch.arange(len(x)) % done)

    def split(self, tensors: Tensors) -> list[Tensor]:
        """An update in the same blocks."""
        parts = []
        for path in self.dense:
            weight, bias = tensors[f"{path}.weight"], tensors.get(f"{path}.bias")
            parts.append(weight.double() if bias is None else torch.cat([weight, bias[:, None]], 1).double())
        flat = torch.cat([tensors[name].flatten() for name in self.names]).double() if self.names else torch.zeros(0)
        return parts + [flat[kept] for kept in self.kept]

    def _chunk(self, x: Tensor, y: Tensor, rng: TorchStream) -> list[Block]:
        noise = self.model.draw_noise(len(x), rng)
        blocks: list[Block] = list(self._dense(x, y, noise).values())
        squares = sum((block.squares() for block in blocks), torch.zeros(len(x)))
        if self.names:
            with torch.no_grad():
                draws = {name: draw[:, None] for name, draw in noise.items()}
                gradients = self.rest.gradients(self.state, x[:, None], y[:, None], draws)
            flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
            squares = squares + flat.square().sum(1)
            blocks += [PlainBlock(flat[:, kept]) for kept in self.kept]
        if self.clip is None:
            return blocks
        factors = (self.clip / squares.sqrt().clamp_min(1e-12)).clamp_max(1.0)
        return [block.scaled(factors) for block in blocks]

    def _dense(self, x: Tensor, y: Tensor, noise: Tensors) -> dict[str, LayerBlock]:
        """One forward and one backward pass: inputs of the layers, and the gradients of each image's loss at their outputs."""
        inputs: dict[str, list[Tensor]] = {path: [] for path in self.dense}
        outputs: dict[str, list[Tensor]] = {path: [] for path in self.dense}

        def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
                inputs[path].append(arguments[0].detach())
                outputs[path].append(output)

            return hook

        weights = {name: t.detach().requires_grad_() for name, t in self.model.parameters(self.state).items()}
        with torch.enable_grad(), hooked(m.register_forward_hook(note(p)) for p, m in self.dense.items()):
            total = self.model.summed_loss({**self.state, **weights}, x, y, noise)
            if any(len(seen) != 1 or seen[0].ndim != 2 for seen in outputs.values()):
                raise ValueError("a layer is called several times, or not once per image")
            signals = torch.autograd.grad(total, [seen[0] for seen in outputs.values()]) if self.dense else ()
        blocks = {}
        for path, signal in zip(self.dense, signals, strict=True):
            (entered,) = inputs[path]
            if f"{path}.bias" in self.model.trainable:
                entered = torch.cat([entered, torch.ones_like(entered[:, :1])], 1)
            blocks[path] = LayerBlock(entered, signal)
        return blocks

    def _is_plain(self, path: str, x: Tensor) -> bool:
        """Whether signal ⊗ input, summed over images, is the gradient of the layer's weight."""
        probe = copy.copy(self)
        probe.dense, probe.names, probe.kept = {path: self.dense[path]}, [], []
        y = torch.zeros(len(x), dtype=torch.long) if self.task.has_classes else torch.zeros(len(x), self.task.num_outputs)
        noise = self.model.draw_noise(len(x), generator("probe"))
        try:
            block = probe._dense(x, y, noise)[path]
        except (ValueError, RuntimeError):
            return False
        weight = self.model.gradient(self.state, x, y, noise)[f"{path}.weight"]
        summed = (block.signals.T @ block.inputs)[:, : weight.shape[1]] / len(x)
        return bool((summed - weight).norm() <= 1e-3 * weight.norm())


def _joined(parts: Sequence[Block]) -> Block:
    if isinstance(parts[0], PlainBlock):
        return PlainBlock(torch.cat([part.rows for part in parts if isinstance(part, PlainBlock)]))
    dense = [part for part in parts if isinstance(part, LayerBlock)]
    return LayerBlock(torch.cat([part.inputs for part in dense]), torch.cat([part.signals for part in dense]))
