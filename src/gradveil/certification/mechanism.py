"""What is certified: a mechanism with a proof, and how often an image takes part in what it releases."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from gradveil.core.errors import UserError
from gradveil.core.settings import choose, settings

Bounded = Literal["image", "update"]
Sampling = Literal["full", "shuffled", "poisson"]


@dataclass(frozen=True)
class Mechanism:
    """Gaussian noise on something of bounded length.

    `noise` is the standard deviation as a multiple of the bound. `bounded` is what is scaled down to the bound: the gradient
    of every single image, before they are added, or the whole update.
    """

    name: str
    noise: float
    bounded: Bounded = "image"
    conditions: tuple[str, ...] = ()  # what else must hold
    by_client: bool = True  # whether every client adds such noise itself

    @property
    def sensitivity(self) -> int:
        """How far one image moves what is released, in units of the bound.

        A clipped update with the image and one without it may point in opposite directions.
        """
        return 1 if self.bounded == "image" else 2


@dataclass(frozen=True)
class NoProof:
    """Why nothing can be promised."""

    name: str
    reason: str


@settings
class Releases:
    """How often an image takes part, and how batches are drawn."""

    rounds: int = Field(ge=1, description="Rounds in which the same images are used.")
    local_epochs: int = Field(default=1, ge=1, description="Passes over the images per round.")
    sampling: Sampling = Field(default="full", description="full, shuffled (each image once per epoch) or poisson.")
    batch_size: int | None = Field(default=None, ge=1, description="Images in a Poisson batch on average; with --images.")
    images: int | None = Field(default=None, ge=1, description="Images of the client.")
    sample_rate: float | None = Field(default=None, gt=0, le=1, description="In place of these two: their ratio.")
    images_per_person: int = Field(default=1, ge=1, description="Images of one person.")
    aggregate: int = Field(default=1, ge=1, description="Clients of whose updates only the sum is seen.")

    def __post_init__(self) -> None:
        stated = [value is not None for value in (self.batch_size, self.images, self.sample_rate)]
        if self.sampling != "poisson" and any(stated):
            raise UserError("the size of a batch matters only with --sampling poisson; leave it out.")
        if self.sampling == "poisson" and stated not in ([True, True, False], [False, False, True]):
            raise UserError("--sampling poisson needs --batch-size and --images, or --sample-rate.")
        if self.rate > 1:
            raise UserError(f"--batch-size {self.batch_size} is more than --images {self.images}.")

    @property
    def rate(self) -> float:
        """The probability that an image is in a batch; 1 where every pass takes every image."""
        if self.batch_size is not None and self.images is not None:
            return self.batch_size / self.images
        return self.sample_rate or 1.0

    def noise(self, mechanism: Mechanism) -> float:
        """The noise in what is seen: that of all clients of a sum, where it adds up."""
        if self.aggregate > 1 and not mechanism.by_client:
            raise UserError(f"--aggregate: the noise of {mechanism.name} is added once to the sum, not by every client.")
        if self.aggregate > 1 and mechanism.bounded == "image" and (self.local_epochs, self.sampling) != (1, "full"):
            raise UserError(
                "--aggregate: noise of single local steps does not add up; clip updates as a whole, or make one step."
            )
        return mechanism.noise * math.sqrt(self.aggregate)

    def count(self, mechanism: Mechanism) -> int:
        """The releases that an image takes part in, or may take part in."""
        if mechanism.bounded == "update":
            return self.rounds  # local training ends in one update
        # As many steps as local training makes; 1/rate may be a whole number but for rounding.
        return self.rounds * self.local_epochs * math.ceil(1 / self.rate - 1e-9)


# -- mechanisms of other tools -----------------------------------------------------------------------------------------


class NamedMechanism(ABC):
    """The noise of another tool, as that tool names its settings."""

    @abstractmethod
    def mechanism(self) -> Mechanism: ...


@settings
class OpacusNoise(NamedMechanism):
    """Opacus' PrivacyEngine: every image's gradient is clipped, and noise is added to their sum."""

    noise_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def mechanism(self) -> Mechanism:
        condition = 'Opacus clips with clipping="flat", and draws its noise with secure_mode=True.'
        return Mechanism("opacus", self.noise_multiplier, conditions=(condition,))


@settings
class FlowerCentral(NamedMechanism):
    """Flower's DifferentialPrivacy…FixedClipping: updates are clipped, and the server adds noise to their mean."""

    noise_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def mechanism(self) -> Mechanism:
        conditions = (
            "The promise is towards those who see only the aggregated model: the server sees each update before the noise.",
            "As many clients take part in a round as num_sampled_clients says, all with the same weight.",
        )
        return Mechanism("flower-central", self.noise_multiplier, "update", conditions, by_client=False)


MECHANISMS: dict[str, type[NamedMechanism]] = {"opacus": OpacusNoise, "flower-central": FlowerCentral}


def named_mechanism(text: str) -> Mechanism | None:
    """The mechanism of another tool that `text` writes, such as `opacus:noise_multiplier=1.1`; None: it names none."""
    if text.strip().partition(":")[0] not in MECHANISMS:
        return None
    return choose("mechanism", text, MECHANISMS).mechanism()
