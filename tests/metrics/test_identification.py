import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from gradveil.core.types import Batch
from gradveil.metrics import clopper_pearson, identification_rate, identify, likeness_table


def make_pool(n=600, classes=2, shape=(1, 6, 6), seed=0):
    """8-bit images whose classes differ, of a size at which correlations by chance are not small."""
    stream = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = torch.rand(n, *shape, generator=stream) * 0.7 + 0.3 * (y / max(1, classes - 1)).view(-1, 1, 1, 1)
    return Batch((255 * x).round() / 255, y)


def slow_rank(truth, label, guess, pool):
    """numpy, one image at a time, with every image of the class."""
    nearness = abs(np.corrcoef(truth.flatten(), guess.flatten())[0, 1])
    others = [x for x, y in zip(pool.x, pool.y, strict=True) if y == label and not torch.equal(x, truth)]
    nearer = sum(abs(np.corrcoef(x.flatten(), guess.flatten())[0, 1]) >= nearness for x in others)
    return 1 + nearer, len(others)


def test_equals_a_slow_computation():
    pool = make_pool(n=500)
    truth, labels = pool.x[:20], pool.y[:20]
    guess = truth + 0.6 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    found = identify(truth, labels, guess, pool)
    expected = [slow_rank(t, y, g, pool) for t, y, g in zip(truth, labels, guess, strict=True)]
    assert list(zip(found.ranks.tolist(), found.distractors.tolist(), strict=True)) == expected
    assert len({rank for rank, _ in expected}) > 3  # the noise is such that ranks really differ
    correlation = [np.corrcoef(t.flatten(), g.flatten())[0, 1] for t, g in zip(truth, guess, strict=True)]
    assert found.likeness.numpy() == pytest.approx(np.abs(correlation))


def test_a_perfect_reconstruction_is_identified_and_another_image_is_not():
    pool = make_pool()
    assert identify(pool.x[:8], pool.y[:8], pool.x[:8], pool).identified.all()
    assert not identify(pool.x[:8], pool.y[:8], pool.x[8:16], pool).identified.any()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), brightness=st.floats(-2, 2), contrast=st.floats(0.1, 5), negative=st.booleans())
def test_brightness_contrast_and_negation_hide_nothing(seed, brightness, contrast, negative):
    pool = make_pool(n=450)
    stream = torch.Generator().manual_seed(seed)
    guess = (pool.x[:6] + 0.4 * torch.randn(pool.x[:6].shape, generator=stream)).double()
    changed = brightness + (-contrast if negative else contrast) * guess
    before, after = (identify(pool.x[:6], pool.y[:6], g, pool) for g in (guess, changed))
    assert torch.equal(before.ranks, after.ranks)
    assert torch.allclose(before.likeness, after.likeness)


@pytest.mark.parametrize("value", [0.0, 0.3, float("nan"), float("inf")])
def test_a_constant_or_broken_reconstruction_identifies_nobody(value):
    pool = make_pool()
    found = identify(pool.x[:3], pool.y[:3], torch.full((3, 1, 6, 6), value), pool)
    assert torch.equal(found.ranks, found.distractors + 1)
    assert not found.identified.any()


def test_ties_count_against_the_adversary():
    pool = make_pool(n=450)
    truth, label = pool.x[:1], pool.y[:1]
    twin = Batch(torch.cat([pool.x, 1 - truth]), torch.cat([pool.y, label]))  # as near as the truth, being its negative
    assert identify(truth, label, truth, pool).identified.item()
    assert identify(truth, label, truth, twin).ranks.tolist() == [2]


def test_copies_of_the_truth_are_no_distractors():
    pool = make_pool(n=450)
    truth, label = pool.x[:1], pool.y[:1]
    copied = Batch(torch.cat([pool.x, truth, truth]), torch.cat([pool.y, label, label]))
    for images in (pool, copied):
        found = identify(truth, label, truth, images)
        assert found.ranks.tolist() == [1]
        assert found.distractors.tolist() == [224]
    absent = identify(truth, label, truth, pool[1:])
    assert absent.distractors.tolist() == [224]


def test_only_its_class_unless_that_is_small():
    pool = make_pool(n=600, classes=2)
    assert identify(pool.x[:1], pool.y[:1], pool.x[:1], pool).distractors.tolist() == [299]
    small = make_pool(n=600, classes=3)  # 200 of a class, so 199 besides the truth
    assert identify(small.x[:1], small.y[:1], small.x[:1], small).distractors.tolist() == [599]
    assert identify(small.x[:1] / 2, small.y[:1], small.x[:1], small).distractors.tolist() == [200]


def test_large_pools_are_cut_alike_every_time():
    pool = make_pool(n=3000, classes=2, shape=(1, 4, 4))
    guess = pool.x[:5] + 0.5 * torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    first, again, other = (identify(pool.x[:5], pool.y[:5], guess, pool, seed=s) for s in (0, 0, 1))
    assert ((first.distractors >= 999) & (first.distractors <= 1000)).all()
    assert torch.equal(first.ranks, again.ranks)
    assert not torch.equal(first.ranks, other.ranks)
    assert first.chance.numpy() == pytest.approx(1 / 1001, rel=2e-3)


def test_victims_together_equal_victims_alone():
    pool = make_pool(n=700, classes=3)
    guess = pool.x[:9] + 0.5 * torch.randn(9, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    together = identify(pool.x[:9], pool.y[:9], guess, pool)
    alone = [identify(pool.x[i : i + 1], pool.y[i : i + 1], guess[i : i + 1], pool).ranks.item() for i in range(9)]
    assert together.ranks.tolist() == alone


def test_random_reconstructions_are_identified_at_about_chance():
    """2,000 victims, 19 distractors each: chance 0.05. The bounds are five standard errors."""
    pool = make_pool(n=2000, classes=1)
    stream = torch.Generator().manual_seed(3)
    guess = torch.rand(2000, 1, 6, 6, generator=stream)
    others = Batch(torch.rand(19, 1, 6, 6, generator=stream), torch.zeros(19, dtype=torch.long))
    found = identify(pool.x, pool.y, guess, others)
    assert found.chance.mean().item() == pytest.approx(0.05)
    assert found.identified.double().mean().item() == pytest.approx(0.05, abs=5 * (0.05 * 0.95 / 2000) ** 0.5)
    assert found.ranks.double().mean().item() == pytest.approx(10.5, abs=5 * (400 / 12 / 2000) ** 0.5)


def test_without_distractors_nobody_is_identified():
    pool = make_pool(n=1)
    found = identify(pool.x, pool.y, pool.x, pool)
    assert found.distractors.tolist() == [0]
    assert not found.identified.any()
    assert found.chance.tolist() == [1]


def test_soft_labels_count_as_their_largest():
    pool = make_pool()
    soft = torch.nn.functional.one_hot(pool.y, 2) * 0.6 + 0.2
    guess = pool.x[:4].flip(-1)
    hard, softly = (identify(pool.x[:4], y[:4], guess, Batch(pool.x, y)) for y in (pool.y, soft))
    assert torch.equal(hard.ranks, softly.ranks)


def test_shapes_must_agree():
    pool = make_pool()
    with pytest.raises(ValueError, match="do not fit"):
        identify(torch.zeros(1, 1, 5, 5), torch.zeros(1), torch.zeros(1, 1, 5, 5), pool)


@settings(deadline=None)
@given(n=st.integers(1, 300), share=st.floats(0, 1), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_clopper_pearson_equals_scipy(n, share, confidence):
    hits = round(share * n)
    exact = binomtest(hits, n).proportion_ci(confidence, method="exact")
    assert clopper_pearson(hits, n, confidence) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_clopper_pearson_at_its_ends():
    assert clopper_pearson(0, 10) == pytest.approx((0, 0.3085), abs=1e-4)
    assert clopper_pearson(0, 0) == (0, 1)
    with pytest.raises(ValueError, match="hits"):
        clopper_pearson(3, 2)


def test_a_batch_is_one_trial_of_the_interval():
    identified = torch.tensor([True, False, False, True, True, True, True, True])
    single, paired = (identification_rate(identified, 0.001, batches) for batches in (8, 4))
    assert single.rate == paired.rate == 0.75 and single.chance == paired.chance == 0.001
    assert (single.low, single.high) == clopper_pearson(6, 8)
    assert (paired.low, paired.high) == clopper_pearson(3, 4)
    halved = identification_rate(identified[:5], 0.001, 3)  # 3 of 5 images in 3 batches: 1.8 of 3
    assert halved.low < clopper_pearson(2, 3)[0] and halved.high > clopper_pearson(1, 3)[1]


def slow_likeness(image, answers):
    return max(abs(np.corrcoef(image.flatten(), answer.flatten())[0, 1]) for answer in answers)


def test_any_answer_of_the_batch_counts_for_truth_and_distractors_alike():
    pool, stream = make_pool(n=500), torch.Generator().manual_seed(4)
    truth, labels, rest = pool.x[:12], pool.y[:12], pool[12:]
    answers = truth.flip(0) + 0.6 * torch.randn(truth.shape, generator=stream)
    batch = torch.arange(12) // 4
    answers = answers.view(3, 4, 1, 6, 6).flip(0).reshape(12, 1, 6, 6)  # in its batch, but at no true image's place
    found = identify(truth, labels, answers, rest, batch=batch)
    for i in range(12):
        rebuilt = answers[batch == batch[i]]
        nearness = slow_likeness(truth[i], rebuilt)
        others = [slow_likeness(x, rebuilt) for x in rest.x[rest.y == labels[i]]]
        assert found.likeness[i].item() == pytest.approx(nearness)
        assert found.nearest[i].item() == pytest.approx(max(others))
        assert found.ranks[i].item() == 1 + sum(other >= nearness for other in others)
    table = likeness_table(answers, batch, pool.x)
    assert table.shape == (3, 500)
    assert table[2, 77].item() == pytest.approx(slow_likeness(pool.x[77], answers[8:]))
    assert torch.allclose(table[batch, torch.arange(12)], found.likeness)


def test_the_chance_of_strangers_is_one_in_the_candidates_also_in_batches_of_eight():
    """1,600 victims in batches of 8, 19 distractors: matching to the truth first would give more than twice as many."""
    stream = torch.Generator().manual_seed(5)
    images = torch.rand(1600, 1, 6, 6, generator=stream)
    others = Batch(torch.rand(19, 1, 6, 6, generator=stream), torch.zeros(19, dtype=torch.long))
    labels, answers = torch.zeros(1600, dtype=torch.long), torch.rand(1600, 1, 6, 6, generator=stream)
    found = identify(images, labels, answers, others, batch=torch.arange(1600) // 8)
    assert found.identified.double().mean().item() == pytest.approx(0.05, abs=5 * (0.05 * 0.95 / 1600) ** 0.5)
