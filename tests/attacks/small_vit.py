"""A user's small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PATCH = 6  # pixels; images of the tests have 1 × 12 × 12


class LoRA(nn.Module):
    """A frozen layer with a trained one of low rank beside it, after its first round: `up` is no longer 0."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class ViT(nn.Module):
    """Encoder layers of PyTorch, learned or fixed positions; with `rank` only LoRA and head are trained."""

    def __init__(self, width: int = 32, learned: bool = True, rank: int = 0, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.embed = nn.Conv2d(1, width, PATCH, stride=PATCH)
            waves = torch.arange(4.0)[:, None] / 10 ** torch.linspace(0, 2, width // 2)
            fixed = torch.cat([waves.sin(), waves.cos()], 1)
            self.position = nn.Parameter(0.1 * torch.randn(4, width)) if learned else nn.Buffer(fixed)
            self.first, self.norm = (LoRA(width, rank) if rank else nn.Linear(width, width)), nn.LayerNorm(width)
            self.encoder = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.head = nn.Linear(width, 3)
            nn.init.normal_(self.norm.bias, std=0.1)  # as after training
        if rank:
            for part in (self.embed, self.norm, self.encoder):
                part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT + self.position
        tokens = tokens + torch.tanh(self.first(self.norm(tokens)))
        scores: Tensor = self.head(self.encoder(tokens).mean(1))
        return scores
