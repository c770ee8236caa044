"""Defenses. The folder says the stage at which a method acts: model, data, batch, gradient, update."""

from gradveil.defenses.base import STAGES, Chain, Defense, Setup, Step
from gradveil.defenses.registry import defense, parse, registry

__all__ = ["STAGES", "Chain", "Defense", "Setup", "Step", "defense", "parse", "registry"]
