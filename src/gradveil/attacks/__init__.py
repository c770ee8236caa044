"""Attacks: matching (optimisation), analytic (closed forms), generative (learned priors), adaptive (counters)."""

from gradveil.attacks.base import Answer, Attack, Budget, Target
from gradveil.attacks.registry import attack, parse, registry

__all__ = ["Answer", "Attack", "Budget", "Target", "attack", "parse", "registry"]
