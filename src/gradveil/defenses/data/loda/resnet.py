"""LODA's own extractor: ResNet18, trained on public images as the public code does; too slow for a CPU at full size."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.hashing import digest
from gradveil.core.progress import Progress
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.data.loda.extractors import Extractor
from gradveil.models import build
from gradveil.storage.resumable import Shuffled, resumable, trained_once

EPOCHS, BATCH, RATE, MOMENTUM, DECAY = 200, 128, 0.1, 0.9, 5e-4  # the rate falls ×0.1 after half and three quarters
PADDED = 4  # pixels before the random crop
NETWORK = "resnet18"


class ResNetExtractor(Extractor):
    """The outputs of its 20 convolutions before batch norm, in the order of the code; the pooled features; the outputs."""

    def __init__(self, module: nn.Module):
        self.module = module.eval().requires_grad_(False)
        self._convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
        self._classifier = [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
        self.layers = (*(f"conv{i + 1}" for i in range(len(self._convolutions))), "pooled", "logits")

    def walk(self, x: Tensor) -> Iterator[Tensor]:
        """The network takes raw pixels. It does not run in the order of its layers, so all are computed."""
        outputs: dict[nn.Module, Tensor] = {}
        pooled: list[Tensor] = []
        handles = [c.register_forward_hook(lambda m, _, out: outputs.__setitem__(m, out)) for c in self._convolutions]
        handles.append(self._classifier.register_forward_hook(lambda _m, inputs, _out: pooled.append(inputs[0])))
        try:
            logits = self.module(x)
        finally:
            for handle in handles:
                handle.remove()
        yield from (outputs[c] for c in self._convolutions)
        yield pooled[0]
        yield logits


def resnet_extractor(
    public: Batch, cache: Path | None, progress: Progress | None = None, *, epochs: int = EPOCHS, network: str = NETWORK
) -> ResNetExtractor:
    """Trained on these public images now, or read from the cache."""
    labels = public.hard_labels
    module = build(network, input_shape=public.image_shape, num_classes=int(labels.max()) + 1, seed=0)
    name = digest(repr((network, epochs, BATCH, RATE, MOMENTUM, DECAY)), {"x": public.x, "y": labels})[:24]
    file = cache / f"extractor-{name}.safetensors" if cache else None
    module.load_state_dict(trained_once(file, lambda partial: _train(module, public.x, labels, epochs, progress, partial)))
    return ResNetExtractor(module)


def _train(module: nn.Module, x: Tensor, y: Tensor, epochs: int, progress: Progress | None, checkpoint: Path | None) -> Tensors:
    rng = generator(0, "extractor")
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY)
    shuffled = Shuffled(len(x), BATCH, rng)
    steps = shuffled.steps(epochs)
    milestones = [steps // 2, steps * 3 // 4]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    module.train()
    for step in resumable(steps, checkpoint, (module, optimizer, schedule, shuffled, rng)):
        rows = shuffled.draw()
        with torch.enable_grad():
            loss = F.cross_entropy(module(_cropped_and_flipped(x[rows], rng)), y[rows])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        if progress:
            progress("training the extractor of LODA", step + 1, steps)
    return module.state_dict()


def _cropped_and_flipped(images: Tensor, rng: torch.Generator) -> Tensor:
    count, (height, width) = len(images), images.shape[2:]
    padded = F.pad(images, [PADDED] * 4)
    tops, lefts = torch.randint(2 * PADDED + 1, (2, count), generator=rng)
    flips = torch.rand(count, generator=rng) < 0.5
    places: Sequence[tuple[int, int, bool]] = list(zip(tops.tolist(), lefts.tolist(), flips.tolist(), strict=True))
    parts = [p[:, t : t + height, left : left + width] for p, (t, left, _) in zip(padded, places, strict=True)]
    return torch.stack([part.flip(2) if flip else part for part, (_, _, flip) in zip(parts, places, strict=True)])
