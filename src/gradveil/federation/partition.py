"""Who holds which images: every image goes to exactly one client, and every client holds at least one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.federation.named import choose

Shares = list[Tensor]  # for each client the places of its images


class Partition(ABC):
    """A way to share images out by their labels."""

    @abstractmethod
    def share(self, labels: Tensor, clients: int, rng: torch.Generator) -> Shares: ...


@settings
class Iid(Partition):
    """At random, as evenly as whole images allow."""

    def share(self, labels: Tensor, clients: int, rng: torch.Generator) -> Shares:
        return list(torch.randperm(len(labels), generator=rng).tensor_split(clients))


@settings
class Dirichlet(Partition):
    """Each class is spread over the clients in proportions drawn from Dirichlet(alpha) (Hsu et al. 2019)."""

    alpha: float = Field(0.5, ge=1e-3, le=1e6)  # small: each class with few clients; large: nearly IID

    def share(self, labels: Tensor, clients: int, rng: torch.Generator) -> Shares:
        # torch's own sampler underflows to equal shares at small alpha; numpy's does not.
        draw = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
        held: list[list[Tensor]] = [[] for _ in range(clients)]
        for places in _by_class(labels, rng):
            bounds = np.cumsum(draw.dirichlet(np.full(clients, self.alpha)))[:-1]
            cuts = np.rint(bounds * len(places)).astype(int).tolist()
            for own, part in zip(held, places.tensor_split(cuts), strict=True):
                own.append(part)
        return _no_empty_hands([torch.cat(own) for own in held])


@settings
class Classes(Partition):
    """Each client holds images of `per_client` classes; a class is shared evenly by those who hold it."""

    per_client: int = Field(2, ge=1)  # McMahan et al. 2017: two digits a client

    def share(self, labels: Tensor, clients: int, rng: torch.Generator) -> Shares:
        groups = _by_class(labels, rng)
        if self.per_client > len(groups):
            raise UserError(
                f"classes:per_client={self.per_client} asks for more classes than there are ({len(groups)})."
            )
        if clients * self.per_client < len(groups):
            raise UserError(
                f"{clients} clients with {self.per_client} classes each leave some of {len(groups)} classes to nobody; "
                f"per_client={-(-len(groups) // clients)} is the least that works."
            )
        # Classes are dealt in turn from one shuffled round: no client gets one twice, none stays in the pack.
        order = torch.randperm(len(groups), generator=rng).tolist()
        holders: list[list[int]] = [[] for _ in groups]
        for hand in range(clients * self.per_client):
            holders[order[hand % len(groups)]].append(hand // self.per_client)
        held: list[list[Tensor]] = [[] for _ in range(clients)]
        for places, who in zip(groups, holders, strict=True):
            for client, part in zip(who, places.tensor_split(len(who)), strict=True):
                held[client].append(part)
        shares = [torch.cat(own) for own in held]
        if not all(len(s) for s in shares):
            raise UserError(
                f"{len(labels)} images are too few for {clients} clients with {self.per_client} classes each."
            )
        return shares


PARTITIONS: dict[str, type[Partition]] = {"iid": Iid, "dirichlet": Dirichlet, "classes": Classes}


def share(labels: Tensor, clients: int, how: str = "iid", seed: int = 0) -> Shares:
    """The places in `labels` that each client holds, each client's in ascending order."""
    partition = choose("partition", how, PARTITIONS)
    if clients > len(labels):
        raise UserError(f"{len(labels)} images cannot be shared out to {clients} clients; each needs at least one.")
    return [s.sort().values for s in partition.share(labels, clients, generator(seed, "partition"))]


def _by_class(labels: Tensor, rng: torch.Generator) -> list[Tensor]:
    """The places of each class that is there, in random order."""
    shuffled = torch.randperm(len(labels), generator=rng)
    return [shuffled[labels[shuffled] == c] for c in labels.unique(sorted=True)]


def _no_empty_hands(shares: Shares) -> Shares:
    """One image of the richest client to each that got none."""
    for poor in range(len(shares)):
        if not len(shares[poor]):
            rich = max(range(len(shares)), key=lambda k: len(shares[k]))
            shares[poor], shares[rich] = shares[rich][-1:], shares[rich][:-1]
    return shares
