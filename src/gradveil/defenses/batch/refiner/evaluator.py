"""The evaluation network of Refiner: how much an image looks like uniform noise, from 0 (image) to 1 (noise).

The paper trains it for 20 epochs on mixtures of an image and noise, with the share of noise as the target and a
gradient penalty, and gives no details. From such examples it learns brightness only: on dark data a white image scores
as noise. So half of the images get other brightness and contrast, down to negatives and nearly flat images.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.hashing import digest
from gradveil.core.randomness import generator, seeded
from gradveil.core.types import Tensors
from gradveil.defenses.base import Setup
from gradveil.storage.resumable import Shuffled, resumable, trained_once

IMAGES = 5_000  # at most; the number of images per device in the paper
BATCH = 64
LR = 5e-3
PENALTY = 0.01
VERSION = "1"  # of this file, in the names of stored evaluators


class Evaluator(nn.Module):
    """Two convolutions and a linear layer, n × C × H × W → n; smooth, because it is differentiated.

    Pixels are normalised by mean and standard deviation of the noise; without this it hardly learns texture.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.SiLU(),
            nn.AvgPool2d(4, ceil_mode=True),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layers((x - 0.5) * 12**0.5)).squeeze(1)


def evaluator_for(setup: Setup, epochs: int) -> Evaluator:
    """An evaluator trained on the images of the client; read from the cache if it was trained before."""
    images = setup.private.x[:IMAGES]
    key = digest(f"{VERSION}/{epochs}/{setup.seed}", {"images": images})[:16]
    file = setup.cache / f"refiner-{key}.safetensors" if setup.cache else None
    with seeded(setup.seed, "refiner-weights"):
        evaluator = Evaluator(images.shape[1])
    trained = trained_once(file, lambda partial: _train(evaluator, images, epochs, setup, partial))
    evaluator.load_state_dict(trained)
    return evaluator.eval().requires_grad_(False)


def _train(evaluator: Evaluator, images: Tensor, epochs: int, setup: Setup, checkpoint: Path | None) -> Tensors:
    rng, optimizer = generator(setup.seed, "refiner-training"), torch.optim.Adam(evaluator.parameters(), lr=LR)
    shuffled = Shuffled(len(images), BATCH, rng)
    steps = shuffled.steps(epochs)
    for step in resumable(steps, checkpoint, (evaluator, optimizer, shuffled, rng)):
        rows = shuffled.draw()
        image = relight(images[rows], rng)
        noise = torch.rand(image.shape, generator=rng)
        share = torch.rand(len(rows), generator=rng)
        mixed = torch.lerp(image, noise, share.view(-1, 1, 1, 1)).requires_grad_()
        with torch.enable_grad():
            score = evaluator(mixed)
            (slope,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
            # Lipschitz in units of the distance from image to noise; per pixel the slope is far below 1.
            steep = slope.flatten(1).norm(dim=1) * (noise - image).flatten(1).norm(dim=1)
            loss = F.mse_loss(score, share) + PENALTY * F.relu(steep - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if setup.progress:
            setup.progress("training Refiner's evaluator", step + 1, steps)
    return evaluator.state_dict()


def relight(images: Tensor, rng: torch.Generator) -> Tensor:
    """Half of the images unchanged, half with a contrast between −1 and 1, often small, and a brightness that fits."""
    kept, size, sign, position = torch.rand(4, len(images), 1, 1, 1, generator=rng)
    contrast = (2 * sign - 1) * size
    darkest = position * (1 - contrast.abs()) + (-contrast).clamp_min(0)
    return torch.where(kept < 0.5, images, darkest + contrast * images)
