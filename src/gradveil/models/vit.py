"""A small vision transformer (Dosovitskiy et al. 2021), of the size that is trained on 32×32 images."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError, shape_text
from gradveil.core.settings import settings
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network


@MODELS.register("vit")
@settings
class ViT(Network):
    """Patches with learned positions, encoder layers of PyTorch with norms first, and a linear classifier.

    Args:
        patch: side of a patch, in pixels.
        width, depth, heads: features per patch, encoder layers, and parts into which attention divides the features.
        dropout: share of the features that training drops.
        pool: what the classifier sees: a class token, or the mean of all patches.
    Example: gradveil audit --data cifar10 --model vit:patch=8
    """

    patch: int = Field(default=4, ge=1)
    width: int = Field(default=96, ge=4)
    depth: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    pool: Literal["token", "mean"] = "token"

    def build(self, input_shape: Shape, num_classes: int) -> nn.Module:
        if input_shape[1] % self.patch or input_shape[2] % self.patch:
            raise UserError(f"images of {shape_text(input_shape)} do not divide into patches of {self.patch} pixels.")
        if self.width % self.heads:
            raise UserError(f"width={self.width} does not divide into {self.heads} heads.")
        return _Transformer(self, input_shape, num_classes)


class _Transformer(nn.Module):
    def __init__(self, form: ViT, input_shape: Shape, num_classes: int):
        super().__init__()
        channels, height, width = input_shape
        patches = height // form.patch * (width // form.patch)
        self.embed = nn.Conv2d(channels, form.width, form.patch, stride=form.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, form.width)) if form.pool == "token" else None
        self.position = nn.Parameter(0.02 * torch.randn(1, patches + (self.token is not None), form.width))
        layers = [
            nn.TransformerEncoderLayer(
                form.width, form.heads, 4 * form.width, form.dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(form.depth)
        ]
        self.encoder = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(form.width)
        self.fc = nn.Linear(form.width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT
        if self.token is not None:
            tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        encoded = self.encoder(tokens + self.position)
        scores: Tensor = self.fc(self.norm(encoded[:, 0] if self.token is not None else encoded.mean(1)))
        return scores
