"""Federations: rounds of FedAvg and FedSGD under a defense, and training in one place."""

from gradveil.federation.central import train_central
from gradveil.federation.history import History
from gradveil.federation.inline import train
from gradveil.federation.plan import Plan

__all__ = ["History", "Plan", "train", "train_central"]
