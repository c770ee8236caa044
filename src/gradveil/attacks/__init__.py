"""Attacks: matching (a search), analytic (closed forms), generative (learned priors), counters, and generic ones."""

from gradveil.attacks.base import Answer, Attack, Budget, ClosedForm, Cost, Target, Workload
from gradveil.attacks.registry import attack, parse, registry

__all__ = ["Answer", "Attack", "Budget", "ClosedForm", "Cost", "Target", "Workload", "attack", "parse", "registry"]
