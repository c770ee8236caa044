"""A small generative network of images like the public ones: WGAN-GP (Gulrajani et al. 2017), trained once and kept.

GGL and DCS² take a generator of 128 numbers to 32×32 pixels, 512 channels wide, and train it for 100 epochs of CelebA.
This one has 32 channels and is trained in minutes on one core: it need not please the eye, a search in it has to come
near the private images.
"""

import copy
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.hashing import digest
from gradveil.core.loops import is_sampled
from gradveil.core.progress import Steps
from gradveil.core.randomness import generator, seeded
from gradveil.core.types import Batch, Tensors
from gradveil.storage.resumable import resumable, trained_once

LATENT, WIDTH = 64, 32
SMALLEST = 8  # side from which transposed convolutions double the picture
STEPS = 1_000  # of the generator at most; two for each image where there are few
CRITIC, BATCH, RATE, BETAS, PENALTY = 2, 32, 1e-3, (0.5, 0.9), 10.0
AVERAGE = 0.99  # of the generator's weights along its training
MOST = 10_000  # public images that are trained on
TERMS = ("2", LATENT, WIDTH, STEPS, CRITIC, BATCH, RATE, BETAS, PENALTY, AVERAGE)  # a version first
_KEPT: dict[str, Tensors] = {}  # weights trained or read in this process


class Generator(nn.Module):
    """Normal numbers, and a label where it has classes, to pixels in [0, 1]."""

    def __init__(self, shape: tuple[int, int, int], classes: int = 0):
        super().__init__()
        self.shape, self.classes = shape, classes
        doublings, self.side = _doublings(shape)
        self.first = nn.Linear(LATENT + classes, WIDTH * self.side**2)
        layers: list[nn.Module] = [nn.BatchNorm2d(WIDTH), nn.ReLU()]
        widths = [*_widths(doublings), shape[0]]
        for i, (before, after) in enumerate(pairwise(widths)):
            layers.append(nn.ConvTranspose2d(before, after, 4, stride=2, padding=1))
            if i < doublings - 1:
                layers += [nn.BatchNorm2d(after), nn.ReLU()]
        if not doublings:
            layers.append(nn.Conv2d(WIDTH, shape[0], 3, padding=1))
        self.rest = nn.Sequential(*layers)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        z = torch.cat([z, F.one_hot(y, self.classes).to(z)], 1) if self.classes else z
        x = torch.sigmoid(self.rest(self.first(z).view(-1, WIDTH, self.side, self.side)))
        height, width = self.shape[1:]
        top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
        return x[..., top : top + height, left : left + width]


class Critic(nn.Module):
    """How real a picture looks, without bounds."""

    def __init__(self, shape: tuple[int, int, int], classes: int = 0):
        super().__init__()
        self.classes = classes
        doublings, _ = _doublings(shape)
        widths = [shape[0] + classes, *reversed(_widths(max(doublings, 1)))]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            entries = self.layers(torch.zeros(1, widths[0], *shape[1:])).shape[1]
        self.last = nn.Linear(entries, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.classes:
            told = F.one_hot(y, self.classes).to(x)[:, :, None, None].expand(-1, -1, *x.shape[-2:])
            x = torch.cat([x, told], 1)
        score: Tensor = self.last(self.layers(x))
        return score.squeeze(1)


def _doublings(shape: tuple[int, int, int]) -> tuple[int, int]:
    """How often a small square doubles to hold the picture, and its side."""
    count, side = 0, max(shape[1:])
    while side > SMALLEST:
        count, side = count + 1, -(-side // 2)
    return count, side


def _widths(doublings: int) -> list[int]:
    return [max(WIDTH >> i, 16) for i in range(doublings)]


def generator_for(public: Batch, classes: int, cache: Path | None = None, progress: Steps | None = None) -> Generator:
    """Trained on these images; of this process or of the cache where the same was trained before."""
    public = Batch(public.x[:MOST], public.hard_labels[:MOST])
    network, _ = _networks(public, classes)
    name = digest(repr((TERMS, classes)), {"x": public.x, **({"y": public.y} if classes else {})})[:24]
    file = cache / f"gan-{name}.safetensors" if cache else None
    if is_sampled():
        network.load_state_dict(train(public, classes))
        return network.eval().requires_grad_(False)
    if name not in _KEPT or (file and not file.exists()):
        _KEPT[name] = trained_once(file, lambda partial: _KEPT.get(name) or train(public, classes, progress, partial))
    network.load_state_dict(_KEPT[name])
    return network.eval().requires_grad_(False)


def _networks(public: Batch, classes: int) -> tuple[Generator, Critic]:
    channels, height, width = public.x.shape[1:]
    with seeded(0, "gan-weights"):
        return Generator((channels, height, width), classes), Critic((channels, height, width), classes)


def train(public: Batch, classes: int, progress: Steps | None = None, checkpoint: Path | None = None) -> Tensors:
    """The generator's weights, averaged along its training."""
    rng, (network, critic) = generator(0, "gan"), _networks(public, classes)
    steps = min(STEPS, 2 * len(public))
    average = copy.deepcopy(network)
    climb = torch.optim.Adam(critic.parameters(), RATE, BETAS)
    follow = torch.optim.Adam(network.parameters(), RATE, BETAS)

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randint(len(public), (BATCH,), generator=rng)
        return public.x[rows], public.y[rows], torch.randn(BATCH, LATENT, generator=rng)

    for step in resumable(steps, checkpoint, (network, critic, average, climb, follow, rng)):
        for _ in range(CRITIC):
            x, y, z = draw()
            with torch.no_grad():
                made = network(z, y)
            between = torch.lerp(made, x, torch.rand(BATCH, 1, 1, 1, generator=rng)).requires_grad_()
            with torch.enable_grad():
                real, false, mixed = critic(torch.cat([x, made, between]), y.repeat(3)).split(BATCH)
                (slope,) = torch.autograd.grad(mixed.sum(), between, create_graph=True)
                loss = false.mean() - real.mean() + PENALTY * ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
                climb.zero_grad()
                loss.backward()
            climb.step()
        _, y, z = draw()
        with torch.enable_grad():
            follow.zero_grad()
            (-critic(network(z, y), y).mean()).backward()
        follow.step()
        share = 1 - min(AVERAGE, (1 + step) / (10 + step))  # short trainings forget their beginning too
        for kept, new in zip(average.state_dict().values(), network.state_dict().values(), strict=True):
            kept.lerp_(new, share) if kept.is_floating_point() else kept.copy_(new)
        if progress:
            progress(step + 1, steps)
    return {name: t.detach() for name, t in average.state_dict().items()}
