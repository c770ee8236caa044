"""Refiner's evaluation network: how much an image looks like uniform noise, from 0 (a picture) to 1 (noise).

The paper trains it for 20 epochs on mixtures of an image and noise, with the share of noise as the target and a
gradient penalty, and says no more. Its examples alone teach brightness: on dark images white scores as noise. So half
of the images are shown with other brightness and contrast, negatives and nearly flat ones too, as pictures still.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.randomness import generator
from gradveil.core.types import Tensors
from gradveil.defenses.base import Setup
from gradveil.storage.resumable import Shuffled, resumable, trained_once

IMAGES = 5_000  # at most; a device's share in the paper
BATCH = 64
LR = 5e-3
PENALTY = 0.01
VERSION = "1"  # of all this, in the names of stored evaluators


class Evaluator(nn.Module):
    """Two convolutions and a linear layer; smooth, since it is there to be differentiated.

    Pixels come in units of the noise's mean and deviation: texture is hardly learned without.
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
    """Trained on the client's own images; taken from the cache where the same was trained before."""
    images = setup.private.x[:IMAGES]
    file = setup.cache / f"refiner-{_key(images, epochs, setup.seed)}.safetensors" if setup.cache else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator(setup.seed, "refiner-weights").initial_seed())
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
        picture = relight(images[rows], rng)
        noise = torch.rand(picture.shape, generator=rng)
        share = torch.rand(len(rows), generator=rng)
        mixed = torch.lerp(picture, noise, share.view(-1, 1, 1, 1)).requires_grad_()
        with torch.enable_grad():
            found = evaluator(mixed)
            (slope,) = torch.autograd.grad(found.sum(), mixed, create_graph=True)
            # Lipschitz in units of the way from image to noise: per pixel the slope is far below 1 anyway.
            steep = slope.flatten(1).norm(dim=1) * (noise - picture).flatten(1).norm(dim=1)
            loss = F.mse_loss(found, share) + PENALTY * F.relu(steep - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if setup.progress:
            setup.progress("training Refiner's evaluator", step + 1, steps)
    return evaluator.state_dict()


def relight(images: Tensor, rng: torch.Generator) -> Tensor:
    """Half of the images as they are, half with a contrast between −1 and 1, often small, and a brightness to fit."""
    kept, size, sign, place = torch.rand(4, len(images), 1, 1, 1, generator=rng)
    contrast = (2 * sign - 1) * size
    darkest = place * (1 - contrast.abs()) + (-contrast).clamp_min(0)
    return torch.where(kept < 0.5, images, darkest + contrast * images)


def _key(images: Tensor, epochs: int, seed: int) -> str:
    facts = f"{VERSION}/{epochs}/{seed}/{tuple(images.shape)}".encode()
    return hashlib.sha256(facts + images.contiguous().numpy().tobytes()).hexdigest()[:16]
