"""The last stage of the learned inverter: a small network from what ridge regression decodes to what images look like.

It learns on decodings of public images that were left out of their own decoder, so on pictures as faulty as a victim's;
and it is believed only where it lowers the error on public images that it was not trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.types import generator

WIDTH, KERNEL = 24, 5
EPOCHS, BATCH, RATE = 8, 64, 2e-3
HELD = 0.2  # share of the images that decide
LEAST = 50  # images below which there is nothing to learn from


def polish(decoded: Tensor, means: Tensor, truth: Tensor, asked: Tensor, asked_means: Tensor) -> Tensor:
    """`asked` after the network, or as it was. All are n × C × H × W pixels; `means` those of each image's class."""
    held = int(len(truth) * HELD)
    if len(truth) < LEAST:
        return asked
    network = _trained(decoded[held:], means[held:], truth[held:])
    before = ((decoded[:held].clamp(0, 1) - truth[:held]) ** 2).mean()
    after = ((_through(network, decoded[:held], means[:held]).clamp(0, 1) - truth[:held]) ** 2).mean()
    return _through(network, asked, asked_means) if after < before else asked


def _through(network: nn.Module, decoded: Tensor, means: Tensor) -> Tensor:
    """The network adds to what it is shown."""
    return decoded + network(torch.cat([decoded, means], 1))  # type: ignore[no-any-return]


def _trained(decoded: Tensor, means: Tensor, truth: Tensor) -> nn.Module:
    rng, channels = generator("polish"), truth.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator("polish-weights").initial_seed())
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
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    total = EPOCHS * -(-len(truth) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=total)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(truth), generator=rng).split(BATCH):
            with torch.enable_grad():
                loss = ((_through(network, decoded[rows], means[rows]) - truth[rows]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval().requires_grad_(False)
