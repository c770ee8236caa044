"""The exchange test: its level without a leak, its power with one, and its bounds where images are few."""

import numpy as np
import pytest
from scipy.stats import binomtest

from gradveil.metrics.leak_test import Background, Slots, detectable, evidence, exchange_test, null_rate, power, victims_needed


def make_slots(batches=8, size=1, classes=4, strangers=40):
    label = np.arange(batches * size) % classes
    return Slots(np.arange(batches * size) // size, label, np.repeat(np.arange(classes), strangers))


def synthetic(slots, rng, pixels=60, leaking=0):
    """Likenesses of random images to random answers, the first victims' own images among them: as an audit makes them."""
    images = rng.normal(size=(len(slots.batch) + len(slots.stranger_label), pixels))
    images[:, :10] += 2 * np.concatenate([slots.label, slots.stranger_label])[:, None]  # classes differ
    answers = rng.normal(size=(len(slots.batch), pixels))
    answers[:, :10] += 2 * slots.label[:, None]
    answers[:leaking] = images[:leaking]
    images, answers = ((x - x.mean(1, keepdims=True)) for x in (images, answers))
    images, answers = ((x / np.linalg.norm(x, axis=1, keepdims=True)) for x in (images, answers))
    table = np.abs(answers @ images.T)
    return np.stack([table[slots.batch == b].max(0) for b in range(slots.batch.max() + 1)])


@pytest.mark.parametrize(("batches", "size"), [(8, 1), (32, 1), (8, 8), (2, 8)])
@pytest.mark.parametrize("strangers", [3, 40])
def test_without_a_leak_five_percent_are_alarms(batches, size, strangers):
    slots = make_slots(batches, size, strangers=strangers)
    rng = np.random.default_rng([batches, size, strangers])
    alarms = sum(exchange_test(synthetic(slots, rng), slots, seed, 199).leaks for seed in range(200))
    assert binomtest(alarms, 200, 0.05, alternative="greater").pvalue > 0.001, alarms
    assert binomtest(alarms, 200, 0.05, alternative="less").pvalue > 0.001, alarms


@pytest.mark.parametrize(("batches", "size", "leaking"), [(32, 1, 3), (8, 8, 1), (8, 1, 1)])
def test_planted_images_are_seen(batches, size, leaking):
    slots, rng = make_slots(batches, size), np.random.default_rng(0)
    assert sum(exchange_test(synthetic(slots, rng, leaking=leaking), slots, seed).leaks for seed in range(30)) >= 27


def with_distractors(slots, rng, count=30, **options):
    """A table, and of each victim the most similar of `count` further images of its class."""
    more = Slots(slots.batch, slots.label, np.concatenate([slots.stranger_label, np.repeat(np.unique(slots.label), count)]))
    table = synthetic(more, rng, **options)
    kept = len(slots.batch) + len(slots.stranger_label)
    others = more.stranger_label[len(slots.stranger_label) :]
    nearest = [table[b, kept:][others == label].max() for b, label in zip(slots.batch, slots.label, strict=True)]
    return table[:, :kept], np.array(nearest)


@pytest.mark.parametrize(("batches", "size"), [(32, 1), (8, 8), (2, 8)])
def test_without_a_leak_hits_alarm_no_more_often(batches, size):
    slots, rng, alarms = make_slots(batches, size), np.random.default_rng([batches, size]), 0
    for seed in range(300):
        table, nearest = with_distractors(slots, rng)
        alarms += exchange_test(table, slots, seed, 199, nearest).leaks
    assert binomtest(alarms, 300, 0.05, alternative="greater").pvalue > 0.001, alarms
    assert binomtest(alarms, 300, 0.05, alternative="less").pvalue > 0.001, alarms


def test_several_images_that_are_rebuilt_just_well_enough_are_seen_by_hits():
    """Batches whose answers resemble everything drown the evidence of the others, where images are identified."""
    slots, rng, seen = make_slots(8, 8), np.random.default_rng(0), np.zeros(3)
    clear = slots.batch >= 4
    nearest = np.where(clear, 0.21, 0.96)
    for seed in range(30):
        table = rng.uniform(0.5, 0.95, (8, 64 + 160))
        table[4:] = rng.uniform(0.0, 0.2, (4, 64 + 160))
        planted = np.flatnonzero(clear)[::5]  # 7 of 64
        table[slots.batch[planted], planted] = 0.25
        single = np.where(np.arange(64) == planted[0], nearest, 1.0)  # but for one, a distractor is as alike
        tests = (nearest, None, single)
        seen += [exchange_test(table, slots, seed, nearest=n).leaks for n in tests]
    assert seen[0] == 30 and seen[1] <= 6 and seen[2] <= 6, "a single hit says nothing"


def test_p_is_the_share_of_arrangements_as_large():
    """Two victims of one class, two strangers: all 12 arrangements by hand."""
    slots = Slots(np.array([0, 1]), np.array([0, 0]), np.array([0, 0]))
    table = np.array([[0.9, 0.1, 0.2, 0.3], [0.4, 0.8, 0.5, 0.6]])
    weights = evidence(table)
    every = [weights[0, i] + weights[1, j] for i in range(4) for j in range(4) if i != j]
    outcome = exchange_test(table, slots, 0, 4000)
    assert outcome.statistic == pytest.approx(max(every))
    assert outcome.p == pytest.approx(1 / 12, abs=0.02) and slots.smallest_p == pytest.approx(1 / 12)
    assert outcome.null_mean == pytest.approx(np.mean(every), rel=0.03)
    assert not outcome.leaks


def test_classes_are_never_mixed_and_untested_victims_stay():
    slots = Slots(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 2]), np.array([0] * 5 + [1] * 5))
    assert slots.tested.tolist() == [True, True, True, False]
    images = slots.arrangements(500, np.random.default_rng(0))
    labels = np.concatenate([slots.label, slots.stranger_label])
    assert (labels[images] == slots.label).all() and (images[:, 3] == 3).all()
    assert all(len(set(row)) == 4 for row in images.tolist())
    counts = np.bincount(images[:, 1], minlength=14)[[1, *range(9, 14)]]
    assert (abs(counts - 500 / 6) < 5 * (500 / 6) ** 0.5).all()
    assert slots.used.tolist() == [
        [True, True, True, False] + [True] * 10,
        [True, False, True, True] + [True] * 5 + [False] * 5,
    ]


def test_images_of_one_batch_and_class_cannot_be_told_apart():
    together = Slots(np.zeros(3, int), np.zeros(3, int), np.zeros(2, int))
    apart = Slots(np.arange(3), np.zeros(3, int), np.zeros(2, int))
    assert together.smallest_p == pytest.approx(1 / 10) and apart.smallest_p == pytest.approx(1 / 60)
    alone = Slots(np.arange(3), np.zeros(3, int), np.zeros(0, int))
    assert alone.smallest_p == 1.0 and exchange_test(np.eye(3), alone, 0).p == 1.0


def test_luck_does_not_make_p_smaller_than_the_images_allow():
    slots = Slots(np.zeros(1, int), np.zeros(1, int), np.zeros(18, int))  # 1 in 19
    table = np.r_[0.9, np.linspace(0, 0.5, 18)][None]
    assert not any(exchange_test(table, slots, seed).leaks for seed in range(40))


def test_evidence_is_bounded_and_grows():
    assert evidence(np.array([0.0, 0.5, 1.0, 1.0 + 1e-12])) == pytest.approx([0.0, 0.2875, 9.2103, 9.2103], abs=2e-4)


def test_the_null_rate_is_that_of_exchanged_images():
    slots, rng = make_slots(6, 2, 3, 5), np.random.default_rng(0)
    table, nearest = rng.random((6, 12 + 15)), np.full(12, 0.6)
    images = slots.arrangements(20_000, rng)
    sampled = (table[slots.batch, images] > nearest).mean()
    assert null_rate(table, nearest, slots) == pytest.approx(sampled, abs=0.005)


# -- power -------------------------------------------------------------------------------------------------------------


def background(batches=8, size=1, strangers=40, private=200):
    slots = make_slots(batches, size, strangers=strangers)
    table = synthetic(slots, np.random.default_rng(0))
    return Background(table[:, len(slots.batch) :], slots, np.full(4, private))


def test_simulated_power_is_that_of_audits():
    """Half-good images leak: neither never seen nor always."""
    slots, rng, hits = make_slots(16), np.random.default_rng(1), 0
    for seed in range(150):
        table = synthetic(slots, rng)
        leaking = np.flatnonzero(rng.random(16) < 0.25)
        table[leaking, leaking] = np.maximum(table[leaking, leaking], 0.75)
        hits += exchange_test(table, slots, seed, 199).leaks
    assert 0.2 < hits / 150 < 0.98
    assert power(background(16), [0.75], 0.25, 16) == pytest.approx(hits / 150, abs=0.12)
    assert power(background(16), [0.75], 0.0, 16) == pytest.approx(0.05, abs=0.05)


def test_the_smallest_visible_leak_is_about_one_image():
    assert detectable(background(8), [1.0]) == pytest.approx(1 - 0.2 ** (1 / 8), abs=0.04)
    assert detectable(background(32), [1.0]) == pytest.approx(1 - 0.2 ** (1 / 32), abs=0.02)
    assert detectable(background(2, strangers=1, private=2), [1.0]) is None


def test_the_victims_needed_fall_with_the_leak_and_are_bounded_by_the_data():
    needed = [victims_needed(background(), [1.0], share) for share in (0.1, 0.25, 0.5)]
    assert 13 <= needed[0] <= 20 and 5 <= needed[1] <= 8 and needed[2] in (3, 4)
    weaker = victims_needed(background(), [0.7], 0.25)
    assert weaker is not None and weaker > needed[1]
    assert victims_needed(background(private=3), [1.0], 0.01) is None


def test_more_victims_of_a_data_set_with_few_images_per_class_come_from_other_classes():
    few = background(strangers=3, private=4)  # 8 victims of 4 classes
    many = Background(few.likeness, few.slots, np.full(40, 4))  # 40 classes in all
    assert victims_needed(few, [1.0], 0.1) is None
    needed = victims_needed(many, [1.0], 0.1)
    assert needed is not None and 15 <= needed <= 40
    table, slots, _ = many.audit(24, np.random.default_rng(0))
    assert table.shape == (24, 24 + 12 * 2) and len(np.unique(slots.label)) == 12
