"""The test behind a verdict: do the answers resemble the victims more than strangers of their class?

Victims and strangers are one random draw per class. If the answers hold nothing of the victims, then exchanging victims
and strangers over the slots within each class changes nothing but the names. So the statistic of such exchanges is its
distribution without a leak, whatever the data, the attacks and the batches are.

Two statistics are taken, as leaks are of two kinds. The summed evidence sees a few images that are rebuilt well among many
that are not; the number of victims that are more alike than every distractor, from the second on, sees several that are
rebuilt just well enough. The test asks how often an exchange is as rare as the victims by either (Westfall and Young 1993),
so its level is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]

LEVEL = 0.05  # share of audits without a leak that may say `leaks`
DRAWS = 999
POWER = 0.8  # with which a leak must be visible before its absence counts
LEAST_EXCESS = 0.5  # of the control's rate over its null, below which the failing of attacks says nothing
SHARPEST = 1e-4  # bounds the weight of one image: a perfect one counts 9.2, a half-good one 0.3
LEAST_STRANGERS, STRANGERS_PER_VICTIM = 40, 4  # per class, as far as there are images
TIE = 1e-9  # likenesses closer than this are a tie
TRIALS, TRIAL_DRAWS = 200, 499  # of a simulated audit
MOST_IMAGES = 2000  # of a simulated audit


def evidence(likeness: Numbers) -> Numbers:
    """What one image adds to the statistic: −log(1 − s² + 1e-4)."""
    weights: Numbers = -np.log(1 - np.minimum(likeness, 1.0) ** 2 + SHARPEST)
    return weights


def strangers_wanted(victims: int) -> int:
    """How many strangers a class with so many victims should have."""
    return max(LEAST_STRANGERS, STRANGERS_PER_VICTIM * victims)


@dataclass(frozen=True, eq=False)
class Slots:
    """The victims' places in the batches, and the strangers who could have stood there. Images: victims, then strangers."""

    batch: Integers  # per victim
    label: Integers  # per victim; all 0 where there are no classes
    stranger_label: Integers

    @cached_property
    def tested(self) -> NDArray[np.bool_]:
        """Per victim: whether its class has a stranger."""
        return np.isin(self.label, self.stranger_label)

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        """Batches × images: whether an image of this class stands in the batch. Other likenesses are not needed."""
        labels = np.concatenate([self.label, self.stranger_label])
        batches = range(int(self.batch.max()) + 1)
        return np.stack([np.isin(labels, self.label[self.batch == b]) for b in batches])

    def arrangements(self, draws: int, rng: np.random.Generator) -> Integers:
        """Draws × victims: the image in each slot, exchanged within each class. Untested victims stay."""
        images = np.tile(np.arange(len(self.batch)), (draws, 1))
        for label in np.unique(self.label[self.tested]):
            slots = np.flatnonzero(self.label == label)
            candidates = np.concatenate([slots, len(self.label) + np.flatnonzero(self.stranger_label == label)])
            images[:, slots] = candidates[rng.random((draws, len(candidates))).argsort(axis=1)[:, : len(slots)]]
        return images

    @property
    def smallest_p(self) -> float:
        """The p-value of an arrangement that no other one equals, as far as arrangements can be told apart."""
        different = 0.0  # the logarithm of their number
        for label in np.unique(self.label[self.tested]):
            slots = self.label == label
            images = int(slots.sum()) + int((self.stranger_label == label).sum())
            different += math.lgamma(images + 1) - math.lgamma(images - int(slots.sum()) + 1)
            different -= sum(math.lgamma(n + 1) for n in np.bincount(self.batch[slots]))  # within a batch all are alike
        return max(1 / (DRAWS + 1), math.exp(-different))


@dataclass(frozen=True)
class Exchanged:
    """The outcome of the test."""

    statistic: float
    null_mean: float
    p: float

    @property
    def leaks(self) -> bool:
        return self.p <= LEVEL


def exchange_test(likeness: Numbers, slots: Slots, seed: int, draws: int = DRAWS, nearest: Numbers | None = None) -> Exchanged:
    """Exchange victims and strangers; p is the share of arrangements that are at least as rare as that of the victims.

    It is never below what so few images can give, not even by the luck of the draws.

    Args:
        likeness: batches × images: the largest |correlation| of the image with any answer for the batch.
        slots: which images are the victims of which batch.
        seed: of the draws.
        draws: number of arrangements.
        nearest: per victim, the likeness of the most similar distractor. Without it only the evidence counts.
    """
    if not slots.tested.any():
        return Exchanged(0.0, 0.0, 1.0)
    weights, rows, victims = evidence(likeness), slots.batch[slots.tested], np.flatnonzero(slots.tested)
    drawn = slots.arrangements(draws, np.random.default_rng(seed))[:, slots.tested]
    images = np.concatenate([victims[None], drawn])  # the victims themselves first
    sums = weights[rows, images].sum(axis=1)
    hits = None if nearest is None else (likeness[rows, images] > nearest[victims] + TIE).sum(axis=1)
    return Exchanged(float(sums[0]), float(sums[1:].mean()), max(_first_p(sums, hits), slots.smallest_p))


def _first_p(sums: Numbers, hits: Integers | None) -> float:
    """The share of arrangements that are as rare as the first, by the sum of the evidence or by the hits beyond one."""
    p = _p_values(sums, 1e-9 * max(1.0, float(sums[0])))
    return float(p[0] if hits is None else _p_values(-np.minimum(p, _p_values(np.maximum(hits, 1))))[0])


def _p_values(statistics: Numbers | Integers, equal: float = 1e-12) -> Numbers:
    """Of each arrangement: the share of all whose statistic is as large."""
    return (len(statistics) - np.searchsorted(np.sort(statistics), statistics - equal)) / len(statistics)


def null_rate(likeness: Numbers, nearest: Numbers, slots: Slots) -> float:
    """The share of identified images, victims and strangers exchanged: the mean over all who could stand in each slot.

    Args:
        likeness: batches × images.
        nearest: per victim, the likeness of the most similar distractor.
        slots: which images are the victims of which batch.
    """
    labels = np.concatenate([slots.label, slots.stranger_label])
    shares = [(likeness[slots.batch[k], labels == slots.label[k]] > nearest[k]).mean() for k in np.flatnonzero(slots.tested)]
    return float(np.mean(shares)) if shares else 0.0


# -- which leak would have been seen -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Background:
    """Answers without a leak, from which audits with other numbers of victims are put together.

    Args:
        likeness: batches × strangers.
        slots: of the audit that the likenesses come from.
        private: number of private images per class; victims and strangers are drawn from them.
        nearest: per victim of that audit, the likeness of the most similar distractor; None: not known yet.
    """

    likeness: Numbers
    slots: Slots
    private: Integers
    nearest: Numbers | None = None

    def audit(self, batches: int, rng: np.random.Generator) -> tuple[Numbers, Slots, Numbers] | None:
        """Likenesses, slots and most similar distractors of an audit with this number of batches.

        None where there are too few private images.
        """
        rows = np.arange(batches) % len(self.likeness)
        places = [np.flatnonzero(self.slots.batch == row) for row in rows]
        batch, label = np.repeat(np.arange(batches), [len(p) for p in places]), self.slots.label[np.concatenate(places)]
        # More batches also take victims of classes that had none: they count as copies of the classes that had some.
        classes = len(self.private)
        copies = max(1, int((self.private > 0).sum()) // len(np.unique(self.slots.label)))
        label, private = label + classes * (batch // len(self.likeness) % copies), np.tile(self.private, copies)
        victims = np.bincount(label, minlength=len(private))
        if not len(self.slots.stranger_label) or (victims > private).any() or len(label) > MOST_IMAGES:
            return None
        strangers, columns = [], np.zeros(len(label), dtype=np.int64)
        for name in np.unique(label):
            # A class that had no stranger has none here either.
            same_class = np.flatnonzero(self.slots.stranger_label == name % classes)
            if len(same_class):
                number = min(strangers_wanted(victims[name]), private[name] - victims[name])
                columns[label == name] = rng.choice(same_class, victims[name])
                strangers.append((np.full(number, name), rng.choice(same_class, number)))
        names, others = (np.concatenate(parts) for parts in zip(*strangers, strict=True))
        nearest = np.ones(len(label)) if self.nearest is None else self.nearest[np.concatenate(places)]
        return self.likeness[np.ix_(rows, np.concatenate([columns, others]))], Slots(batch, label, names), nearest


def power(background: Background, leaked: Sequence[float], share: float, batches: int, seed: int = 0) -> float:
    """The share of simulated audits that say `leaks`, where each victim is rebuilt with probability `share`.

    Args:
        background: answers without a leak.
        leaked: likenesses of rebuilt victims, to draw from.
        share: of all images whose update leaks; an audit draws its victims from them.
        batches: number of batches of the audit.
        seed: of the simulation.
    """
    rng = np.random.default_rng(seed)
    simulated = background.audit(batches, rng)
    if simulated is None or not simulated[1].tested.any():
        return 0.0
    likeness, slots, nearest = simulated
    weights, rows, tested = evidence(likeness), slots.batch, np.flatnonzero(slots.tested)
    places = slots.arrangements(TRIAL_DRAWS + TRIALS, rng)
    sums = weights[rows[tested], places[:, tested]].sum(axis=1)
    is_hit = likeness[rows, places] > nearest + TIE
    hits = is_hit[:, tested].sum(axis=1)
    stands = np.full((TRIAL_DRAWS, weights.shape[1]), -1)  # in which batch an arrangement puts an image
    np.put_along_axis(stands, places[:TRIAL_DRAWS], np.broadcast_to(rows, (TRIAL_DRAWS, len(rows))), axis=1)
    strength, seen = evidence(np.asarray(leaked, dtype=np.float64)), 0
    for trial in range(TRIAL_DRAWS, TRIAL_DRAWS + TRIALS):
        truth, leaking = places[trial], tested[rng.random(len(tested)) < share]
        gains = np.maximum(rng.choice(strength, len(leaking)) - weights[rows[leaking], truth[leaking]], 0.0)
        at_home, missed = stands[:, truth[leaking]] == rows[leaking], ~is_hit[trial, leaking]
        evident = np.concatenate([[sums[trial] + gains.sum()], sums[:TRIAL_DRAWS] + at_home @ gains])
        identified = np.concatenate([[hits[trial] + missed.sum()], hits[:TRIAL_DRAWS] + at_home @ missed.astype(np.int64)])
        seen += _first_p(evident, None if background.nearest is None else identified) <= LEVEL
    return float(seen / TRIALS)


def detectable(background: Background, leaked: Sequence[float]) -> float | None:
    """The smallest share of leaking images that is seen with a power of 80%; None where not even all are seen."""
    batches, low, high = len(background.likeness), 0.0, 1.0
    if power(background, leaked, high, batches) < POWER:
        return None
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if power(background, leaked, middle, batches) >= POWER else (middle, high)
    return round(high, 2)


def victims_needed(background: Background, leaked: Sequence[float], share: float) -> int | None:
    """The smallest number of batches at which a leak of this share is seen with a power of 80%.

    None where the private images are too few. The number is correct to about an eighth.
    """
    batches = 1
    while background.audit(batches, np.random.default_rng(0)) is not None:
        if power(background, leaked, share, batches) >= POWER:
            return batches
        batches += max(1, batches // 8)
    return None
