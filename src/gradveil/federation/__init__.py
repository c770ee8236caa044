"""Federations: rounds of FedAvg and FedSGD under a defense, and training in one place."""

from gradveil.federation.central import CentralPlan, central_plan, train_central
from gradveil.federation.history import History
from gradveil.federation.inline import train
from gradveil.federation.plan import FederationPlan

__all__ = ["CentralPlan", "FederationPlan", "History", "central_plan", "train", "train_central"]
