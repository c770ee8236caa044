"""From a mechanism and its releases to an upper limit on what anyone learns, and back from a risk to the noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from gradveil.certification import gaussian, sampled
from gradveil.certification.mechanism import Mechanism, Releases, Sampling
from gradveil.core.errors import UserError
from gradveil.core.results import Record
from gradveil.core.text import plural

DELTA = 1e-5
LINE_UP = 1001
CERTAIN = 0.9999  # a limit above it is no limit
SEARCH_DIGITS, SEARCH_FACTOR = 3, 1.1  # of the noise for a risk where only a search gives it

COUPLED = "BatchNorm in training mode: it couples the images of a batch."  # where each image is clipped by itself
VOID = (
    "Statistics or anything else that leaves the client without noise.",
    "Batches that are not drawn as accounted, or more releases than counted.",
    "Learning rate, clipping or noise tuned on private data.",
    "A decision that looked at the data: which images, which round, which model.",
)


class Certificate(Record):
    """An upper limit that holds against everyone who sees all releases, whatever else they know of other images."""

    mechanism: str
    noise: float  # standard deviation as a multiple of the clipping norm
    upper: float  # on the success of a line-up of m equally likely candidates
    m: int
    advantage: float  # on true minus false positive rate of a test whether the unit took part
    epsilon: float  # at delta
    delta: float
    mu: float | None  # with and without the unit; None: the limits come from an accountant
    unit: Literal["image", "person"]
    images_per_person: int
    adjacency: Literal["add/remove"] = "add/remove"
    releases: int  # that an image takes part in, or may take part in
    aggregate: int  # clients of whose updates only the sum is seen
    sampling: Sampling
    sample_rate: float
    assumptions: tuple[str, ...]
    void: tuple[str, ...]

    def sentences(self) -> tuple[str, str, str]:
        """What is promised, in words. Limits are rounded up."""
        used = f"one {self.unit}" + (f" with {plural(self.images_per_person, 'image')}" if self.unit == "person" else "")
        seen = "the release" if self.releases == 1 else f"all {self.releases:,} releases"
        if self.aggregate > 1:
            seen = f"only sums of {self.aggregate:,} clients"
        people = "images" if self.unit == "image" else "people"
        line_up = (
            f"Nobody who sees {seen} picks the right one of {self.m:,} equally likely {people} with a probability above "
            f"{percent(self.upper)} (guessing: {percent(1 / self.m)})."
        )
        if self.upper > CERTAIN:
            line_up = f"The noise stops no line-up: who sees {seen} may always pick the right one of {self.m:,} {people}."
        return (
            line_up,
            f"No test whether {used} took part beats guessing by more than {percent(self.advantage)} (true minus false "
            "positives).",
            f"All of it is differentially private for {used} more or less: epsilon {rounded_up(self.epsilon, 3)} at delta "
            f"{self.delta:g}.",
        )


def certify(mechanism: Mechanism, releases: Releases, m: int = LINE_UP, delta: float = DELTA) -> Certificate:
    """What the mechanism promises for these releases."""
    if m < 2:
        raise UserError("a line-up needs at least 2 candidates.")
    if not 0 < delta < 1:
        raise UserError(f"delta={delta:g} is no probability between 0 and 1.")
    if not 0 < mechanism.noise < math.inf:
        raise UserError(f"{mechanism.name}: nothing is promised without noise; set one, or a --risk.")
    noise, count, images = releases.noise(mechanism), releases.count(mechanism), releases.images_per_person
    group = images if mechanism.bounded == "image" else 1  # the bound of an update holds for all its images
    one, mu = math.sqrt(count) / noise, None
    if _is_sampled(mechanism, releases):
        limits = sampled.limits(noise, releases.rate, count)
        upper = float(limits.power(np.array([1 / m]), group)[0])
        advantage = limits.advantage(group)
        epsilon = min(limits.epsilon(delta, group), gaussian.epsilon_at(delta, group * one))
    else:
        # Every candidate of a line-up is compared with one reference, an empty update; so the bound counts once.
        upper = gaussian.line_up(group * one, m)
        mu = group * one * mechanism.sensitivity
        advantage, epsilon = gaussian.advantage(mu), gaussian.epsilon_at(delta, mu)
    return Certificate(
        mechanism=mechanism.name,
        noise=mechanism.noise,
        upper=upper,
        m=m,
        advantage=advantage,
        epsilon=epsilon,
        delta=delta,
        mu=mu,
        unit="image" if images == 1 else "person",
        images_per_person=images,
        releases=count,
        aggregate=releases.aggregate,
        sampling=releases.sampling,
        sample_rate=releases.rate,
        assumptions=_assumptions(mechanism, releases),
        void=(COUPLED, *VOID) if mechanism.bounded == "image" else VOID,
    )


def noise_for(risk: float, mechanism: Mechanism, releases: Releases, m: int = LINE_UP) -> float:
    """The noise with which the limit of a line-up is `risk`: in closed form, or the smallest that a search shows to do."""
    if not 1 / m < risk < 1:
        raise UserError(f"risk={risk:g}: guessing reaches {1 / m:.2g} in a line-up of {m:,}; name a risk above that, below 1.")
    group = releases.images_per_person if mechanism.bounded == "image" else 1
    mu, count = gaussian.mu_of(risk, m) / group, releases.count(mechanism)
    if not _is_sampled(mechanism, releases):
        return math.sqrt(count) / mu / releases.noise(replace(mechanism, noise=1.0))

    def holds(noise: float) -> bool:
        return certify(replace(mechanism, noise=noise), releases, m).upper <= risk

    # The search begins where the central limit puts it; what it returns was certified.
    high = 1 / math.sqrt(math.log1p((mu / releases.rate) ** 2 / count))
    while not holds(high):
        high *= SEARCH_FACTOR
    low = high / SEARCH_FACTOR
    while holds(low):
        low, high = low / SEARCH_FACTOR, low
    while high - low > high * 10.0**-SEARCH_DIGITS:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _is_sampled(mechanism: Mechanism, releases: Releases) -> bool:
    """Whether a secret sample counts. What is clipped after local training depends on all batches of a round."""
    return mechanism.bounded == "image" and releases.rate < 1


def _assumptions(mechanism: Mechanism, releases: Releases) -> tuple[str, ...]:
    if mechanism.bounded == "update":
        bound = "Each round sends one update, scaled down as a whole to the clipping norm; the noise is added after that."
        batches = "How batches are drawn makes no difference: any two updates within the clipping norm may be compared."
    else:
        bound = "The gradient of each image is scaled down to the clipping norm by itself; noise is added to every sum."
        batches = "Every epoch takes every image once; the sizes of batches are public."
    if _is_sampled(mechanism, releases):
        batches = (
            f"Each image is in each batch with probability {releases.rate:.3g}, in secret and independently of all others; "
            "sums are divided by the expected size of a batch."
        )
    lines = [bound, batches, "The noise is new in every release, and nobody can predict it."]
    if releases.aggregate > 1:
        lines += [
            "Secure aggregation works: nobody sees the update of one client.",
            f"All {releases.aggregate:,} clients of a sum weigh the same, add their noise, and tell it to nobody.",
        ]
    return (*lines, "All candidates are equally likely, and exactly one took part.", *mechanism.conditions)


def rounded_up(value: float, digits: int) -> str:
    """With so many significant digits, and never below the value."""
    if value == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    number = math.ceil(value / step - 1e-9) * step
    return f"{number:,.0f}" if number >= 10**digits else f"{number:.{digits}g}"


def percent(share: float) -> str:
    """`11%`, `0.1%`, never below the share; `99.9%` and more with as many digits as tell it from all."""
    if share > 0.99:
        return "100%" if share > CERTAIN else f"{math.ceil(share * 1e4 - 1e-9) / 100:g}%"
    return f"{rounded_up(100 * share, 2)}%"
