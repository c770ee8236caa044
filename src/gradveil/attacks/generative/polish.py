"""The last stage of the learned inverter: a small network from what ridge regression decodes to what images look like.

It learns on decodings of public images that were left out of their own decoder, so on pictures as faulty as a victim's;
and it is believed only where it lowers the error on public images that it was not trained on.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.core.hashing import digest
from gradveil.core.randomness import generator, seeded
from gradveil.core.types import Tensors
from gradveil.storage.resumable import Shuffled, resumable, trained_once

WIDTH, KERNEL = 24, 5
EPOCHS, BATCH, RATE = 8, 64, 2e-3
HELD = 0.2  # share of the images that decide
LEAST = 50  # images below which there is nothing to learn from
TERMS = ("2", WIDTH, KERNEL, EPOCHS, BATCH, RATE)  # of the training, in the names of stored networks; a version first


def polish(
    decoded: Tensor, means: Tensor, truth: Tensor, asked: Tensor, asked_means: Tensor, *, cache: Path | None = None
) -> Tensor:
    """`asked` after the network, or as it was. All are n × C × H × W pixels; `means` those of each image's class."""
    held = int(len(truth) * HELD)
    if len(truth) < LEAST:
        return asked
    network = _network_for(decoded[held:], means[held:], truth[held:], cache)
    before = ((decoded[:held].clamp(0, 1) - truth[:held]) ** 2).mean()
    after = ((_through(network, decoded[:held], means[:held]).clamp(0, 1) - truth[:held]) ** 2).mean()
    return _through(network, asked, asked_means) if after < before else asked


def _through(network: nn.Module, decoded: Tensor, means: Tensor) -> Tensor:
    """The network adds to what it is shown."""
    return decoded.add(network(torch.cat([decoded, means], 1)))


def _network_for(decoded: Tensor, means: Tensor, truth: Tensor, cache: Path | None) -> nn.Module:
    """Trained on these pictures; taken from the cache where the same was trained before."""
    network = _network(truth.shape[1])
    name = digest(repr(TERMS), {"decoded": decoded, "means": means, "truth": truth})[:24] if cache else ""
    file = cache / f"polish-{name}.safetensors" if cache else None
    network.load_state_dict(trained_once(file, lambda partial: _train(network, decoded, means, truth, partial)))
    return network.eval().requires_grad_(False)


def _network(channels: int) -> nn.Module:
    with seeded("polish-weights"):
        network = nn.Sequential(
            nn.Conv2d(2 * channels, WIDTH, KERNEL, padding=KERNEL // 2),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2),
            nn.ReLU(),
            last := nn.Conv2d(WIDTH, channels, KERNEL, padding=KERNEL // 2),
        )
    nn.init.zeros_(last.weight)  # it begins by changing nothing
    if last.bias is not None:
        nn.init.zeros_(last.bias)
    return network


def _train(network: nn.Module, decoded: Tensor, means: Tensor, truth: Tensor, checkpoint: Path | None) -> Tensors:
    rng, optimizer = generator("polish"), torch.optim.Adam(network.parameters(), RATE)
    shuffled = Shuffled(len(truth), BATCH, rng)
    steps = shuffled.steps(EPOCHS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in resumable(steps, checkpoint, (network, optimizer, schedule, shuffled, rng)):
        rows = shuffled.draw()
        with torch.enable_grad():
            loss = ((_through(network, decoded[rows], means[rows]) - truth[rows]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
    return network.state_dict()
