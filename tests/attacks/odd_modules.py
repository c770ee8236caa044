"""Odd but common modules: one tiny network per entry, on images of 1 × 12 × 12 with three classes."""

import odd_forwards
import torch
from odd_layers import ViT
from odd_registry import NETS
from torch import nn

__all__ = ["NETS", "NO_SECOND_DERIVATIVE", "ViT", "build", "odd_forwards"]

NO_SECOND_DERIVATIVE = {"bag of embeddings weighed by pixels": "PyTorch has no second derivative of embedding_bag"}


def build(name: str) -> nn.Module:
    """The network with the weights that a fixed seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return NETS[name]()
