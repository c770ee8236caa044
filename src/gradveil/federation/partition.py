"""Who holds which images: every image goes to exactly one client, and every client holds at least one."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.core.settings import choose, settings

Shares = list[Tensor]  # per client the positions of its images


class Partition(ABC):
    """A way to distribute images over clients by their labels."""

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

    alpha: float = Field(default=0.5, ge=1e-3, le=1e6)  # small: each class with few clients; large: nearly IID

    def share(self, labels: Tensor, clients: int, rng: torch.Generator) -> Shares:
        # The sampler of torch underflows to equal shares at small alpha; the one of numpy does not.
        draw = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
        held: list[list[Tensor]] = [[] for _ in range(clients)]
        for positions in _by_class(labels, rng):
            bounds = np.cumsum(draw.dirichlet(np.full(clients, self.alpha)))[:-1]
            cuts = np.rint(bounds * len(positions)).astype(int).tolist()
            for parts, part in zip(held, positions.tensor_split(cuts), strict=True):
                parts.append(part)
        return _fill_empty([torch.cat(parts) for parts in held])


@settings
class Classes(Partition):
    """Each client holds images of `per_client` classes; a class is shared evenly by those who hold it."""

    per_client: int = Field(default=2, ge=1)  # McMahan et al. 2017: two digits per client

    def share(self, labels: Tensor, clients: int, rng: torch.Generator) -> Shares:
        groups = _by_class(labels, rng)
        if self.per_client > len(groups):
            raise UserError(f"classes:per_client={self.per_client} asks for more classes than there are ({len(groups)}).")
        if clients * self.per_client < len(groups):
            raise UserError(
                f"{clients} clients with {self.per_client} classes each leave some of {len(groups)} classes without a client; "
                f"per_client={-(-len(groups) // clients)} is the least that works."
            )
        # Clients take classes in turn from one shuffled order: no client takes a class twice, and no class is left over.
        order = torch.randperm(len(groups), generator=rng).tolist()
        holders: list[list[int]] = [[] for _ in groups]
        for turn in range(clients * self.per_client):
            holders[order[turn % len(groups)]].append(turn // self.per_client)
        held: list[list[Tensor]] = [[] for _ in range(clients)]
        for positions, owners in zip(groups, holders, strict=True):
            for client, part in zip(owners, positions.tensor_split(len(owners)), strict=True):
                held[client].append(part)
        shares = [torch.cat(parts) for parts in held]
        if not all(len(s) for s in shares):
            raise UserError(f"{len(labels)} images are too few for {clients} clients with {self.per_client} classes each.")
        return shares


PARTITIONS: dict[str, type[Partition]] = {"iid": Iid, "dirichlet": Dirichlet, "classes": Classes}


def share(labels: Tensor, clients: int, partition: str = "iid", seed: int = 0) -> Shares:
    """The positions in `labels` that each client holds, in ascending order."""
    method = choose("partition", partition, PARTITIONS)
    if clients > len(labels):
        raise UserError(f"{len(labels)} images cannot be distributed over {clients} clients; each needs at least one.")
    return [s.sort().values for s in method.share(labels, clients, generator(seed, "partition"))]


def _by_class(labels: Tensor, rng: torch.Generator) -> list[Tensor]:
    """The positions of each class that occurs, in random order."""
    shuffled = torch.randperm(len(labels), generator=rng)
    return [shuffled[labels[shuffled] == c] for c in torch.unique(labels)]


def _fill_empty(shares: Shares) -> Shares:
    """Move one image of the largest share to each empty one."""
    for empty in range(len(shares)):
        if not len(shares[empty]):
            largest = max(range(len(shares)), key=lambda k: len(shares[k]))
            shares[empty], shares[largest] = shares[largest][-1:], shares[largest][:-1]
    return shares
