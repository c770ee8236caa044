"""Feature extractors for LODA: frozen networks that anyone may have, as functions to the outputs of their layers.

`trained` is a small convolutional network trained on public images. It is stored under a key of those images, so that
clients and adversaries with the same images have the same extractor. `resnet18` is the paper's network, trained on
public images as its code does, in `resnet.py`. `alexnet` and `vgg16` are the ImageNet networks of
LPIPS, read from `$GRADVEIL_DATA/lpips`.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.hashing import digest
from gradveil.core.loops import is_sampled
from gradveil.core.progress import Progress
from gradveil.core.randomness import generator, seeded
from gradveil.core.types import Batch, Tensors
from gradveil.metrics.perceptual import NETWORKS, imagenet_input, trunk_outputs
from gradveil.storage.resumable import Shuffled, resumable, trained_once
from gradveil.storage.tensor_file import read_tensors

ExtractorKind = Literal["trained", "alexnet", "vgg16"]

# (width, kernel, stride) of each convolution. The first stride keeps obscuring a whole data set affordable.
CONVOLUTIONS = ((16, 5, 2), (16, 3, 1), (32, 3, 2), (32, 3, 1), (64, 3, 2), (64, 3, 1))
STEPS, BATCH, RATE, SHIFTED = 400, 64, 0.1, 2  # of its training
MAX_IMAGES = 5_000  # public images that it is trained on
_KEPT: dict[str, Tensors] = {}  # weights trained or read in this process


class Extractor:
    """A network as named outputs: `conv1` … `convN` before their activation, `pooled`, and `logits` if it has any."""

    layers: tuple[str, ...]

    def walk(self, x: Tensor) -> Iterator[Tensor]:
        """The outputs of all layers for pixels in [0, 1], in order."""
        raise NotImplementedError

    def __call__(self, x: Tensor, layers: Sequence[str]) -> list[Tensor]:
        """The outputs of these layers; later layers are not computed."""
        last = max(self.layers.index(name) for name in layers)
        outputs = dict(zip(self.layers[: last + 1], islice(self.walk(x), last + 1), strict=True))
        return [outputs[name] for name in layers]

    @property
    def convolutions(self) -> tuple[str, ...]:
        return tuple(name for name in self.layers if name.startswith("conv"))


class Trained(Extractor):
    """The small network, with its batch norms folded into its convolutions."""

    layers = (*(f"conv{i + 1}" for i in range(len(CONVOLUTIONS))), "pooled", "logits")

    def __init__(self, weights: Tensors):
        self.weights = weights

    def walk(self, x: Tensor) -> Iterator[Tensor]:
        w = self.weights
        for i, (_, kernel, stride) in enumerate(CONVOLUTIONS, start=1):
            x = F.conv2d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], stride=stride, padding=kernel // 2)
            yield x
            x = x.relu()
        x = x.mean(dim=(2, 3))
        yield x
        yield F.linear(x, w["logits.weight"], w["logits.bias"])


class Trunk(Extractor):
    """The convolutions of an ImageNet network, on images enlarged to at least 64 pixels."""

    def __init__(self, kind: Literal["alexnet", "vgg16"]):
        self.network = NETWORKS["alex" if kind == "alexnet" else "vgg"]
        self.weights = _trunk(_trunk_file(kind))
        count = sum(len(stage.convolutions) for stage in self.network.stages)
        self.layers = (*(f"conv{i + 1}" for i in range(count)), "pooled")

    def walk(self, x: Tensor) -> Iterator[Tensor]:
        for output in trunk_outputs(imagenet_input(x), self.network, self.weights):
            yield output
        yield output.relu().mean(dim=(2, 3))


def extractor(
    kind: ExtractorKind | Literal["auto"], public: Batch | None, cache: Path | None = None, progress: Progress | None = None
) -> Extractor:
    """The extractor of a kind. `auto` trains one if the public images have two classes or more, else takes AlexNet."""
    trainable = public is not None and len(public.hard_labels.unique()) > 1
    if kind == "auto":
        kind = "trained" if trainable else "alexnet"
        if not trainable and not _trunk_file("alexnet").is_file():
            raise UserError(
                "loda needs an extractor: give public images of two classes or more, or put the ImageNet weights of "
                "LPIPS into the folder that GRADVEIL_DATA names."
            )
    if kind != "trained":
        return Trunk(kind)
    if public is None or not trainable:
        raise UserError("loda:extractor=trained needs public images of two classes or more to train it on.")
    return Trained(_trained(public, cache, progress))


def _trunk_file(kind: Literal["alexnet", "vgg16"]) -> Path:
    name = NETWORKS["alex" if kind == "alexnet" else "vgg"].trunk
    return Path(os.environ.get("GRADVEIL_DATA") or ".") / "lpips" / name


@lru_cache(maxsize=2)
def _trunk(path: Path) -> Tensors:
    if not path.is_file():
        raise UserError(f"loda: no ImageNet weights {path}; set GRADVEIL_DATA to the folder that holds lpips/.")
    return {name: tensor.float() for name, tensor in read_tensors(path).items()}


def _trained(public: Batch, cache: Path | None, progress: Progress | None) -> Tensors:
    """Weights for these public images: from this process, from the cache, or trained now."""
    public = public[:MAX_IMAGES]
    name = digest(repr((CONVOLUTIONS, STEPS, BATCH, RATE, SHIFTED)), {"x": public.x, "y": public.hard_labels})[:24]
    file = cache / f"extractor-{name}.safetensors" if cache else None
    if is_sampled():
        return train(public)
    if name not in _KEPT or (file and not file.exists()):
        _KEPT[name] = trained_once(file, lambda partial: _KEPT.get(name) or train(public, progress, partial))
    return _KEPT[name]


def train(public: Batch, progress: Progress | None = None, checkpoint: Path | None = None) -> Tensors:
    """Weights of the small network, batch norms folded in, after SGD (one-cycle rate, random shifts) on pixels."""
    labels, rng = public.hard_labels, generator(0, "extractor")
    with seeded(0, "extractor"), torch.enable_grad():
        convolutions, norms, logits = _network(public.x.shape[1], int(labels.max()) + 1)
    modules = nn.ModuleList([*convolutions, *norms, logits])
    optimizer = torch.optim.SGD(modules.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.2)
    batches = -(-len(public) // BATCH)  # per pass, all of nearly the same size
    shuffled = Shuffled(len(public), -(-len(public) // batches), rng)
    for step in resumable(STEPS, checkpoint, (modules, optimizer, schedule, shuffled, rng)):
        rows = shuffled.draw()
        x = _shifted(public.x[rows], rng)
        with torch.enable_grad():
            for convolution, norm in zip(convolutions, norms, strict=True):
                x = norm(convolution(x)).relu()
            loss = F.cross_entropy(logits(x.mean(dim=(2, 3))), labels[rows])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        if progress:
            progress("training the extractor of LODA", step + 1, STEPS)
    weights: Tensors = {"logits.weight": logits.weight.detach(), "logits.bias": logits.bias.detach()}
    for i, (convolution, norm) in enumerate(zip(convolutions, norms, strict=True), start=1):
        weights |= {f"conv{i}.{part}": w for part, w in _folded(convolution, norm).items()}
    return weights


def _network(channels: int, classes: int) -> tuple[list[nn.Conv2d], list[nn.BatchNorm2d], nn.Linear]:
    widths = [channels, *(width for width, _, _ in CONVOLUTIONS)]
    convolutions = [
        nn.Conv2d(before, width, kernel, stride, kernel // 2, bias=False)
        for before, (width, kernel, stride) in zip(widths, CONVOLUTIONS, strict=False)
    ]
    return convolutions, [nn.BatchNorm2d(width) for width in widths[1:]], nn.Linear(widths[-1], classes)


def _shifted(x: Tensor, rng: torch.Generator) -> Tensor:
    """The batch moved by up to `SHIFTED` pixels, the border filled with zeros."""
    top, left = torch.randint(2 * SHIFTED + 1, (2,), generator=rng).tolist()
    height, width = x.shape[-2:]
    return F.pad(x, [SHIFTED] * 4)[..., top : top + height, left : left + width]


def _folded(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensors:
    """A convolution that includes its batch norm in evaluation mode."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
    return {
        "weight": convolution.weight.detach() * scale.view(-1, 1, 1, 1),
        "bias": norm.bias.detach() - norm.running_mean * scale,
    }
