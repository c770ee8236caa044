import time

import pytest
import torch

from gradveil.core.results import ScoreRow, Statistic
from gradveil.core.types import Batch
from gradveil.metrics import clopper_pearson, mse, psnr, registry, score_all, ssim, summarize


@pytest.fixture(scope="module")
def pool():
    x = torch.rand(500, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    return Batch(x, torch.arange(500) % 2)


def score(truth, labels, reconstruction, **settings):
    return score_all([truth], [labels], [reconstruction], **settings)[0]


def noisy(x, level, seed=1):
    return (x + level * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))).clamp(0, 1)


def test_every_metric_uses_the_one_matching(pool):
    truth, labels = pool.x[:6], pool.y[:6]
    near = noisy(truth, 0.1)
    shuffle = torch.tensor([3, 0, 5, 1, 4, 2])
    scores = score(truth, labels, near[shuffle], pool=pool[6:])
    assert torch.equal(shuffle[scores.order], torch.arange(6))
    assert torch.equal(scores.mse, mse(truth, near))
    assert torch.equal(scores.psnr, psnr(truth, near))
    assert torch.equal(scores.ssim, ssim(truth, near))
    assert scores.identified.all()
    assert (scores.rank == 1).all()
    assert scores.chance == pytest.approx(1 / 248)  # 247 of a class are left
    assert not scores.failed.any()
    assert len(scores) == 6


def test_together_equals_one_by_one(pool):
    truths, labels = pool.x[:12].view(4, 3, 1, 12, 12), pool.y[:12].view(4, 3)
    guesses = noisy(truths, 0.5).flip(1)
    for together, (x, y, g) in zip(
        score_all(truths, labels, guesses, pool=pool[12:]), zip(truths, labels, guesses, strict=True), strict=True
    ):
        alone = score(x, y, g, pool=pool[12:])
        assert torch.equal(together.rank, alone.rank)
        assert torch.equal(together.order, alone.order)
        assert together.chance == alone.chance
        assert torch.allclose(together.psnr, alone.psnr)
        assert torch.allclose(together.ssim, alone.ssim)


def test_victims_may_differ_in_size(pool):
    parts = [pool[:1], pool[1:4], pool[4:6]]
    scores = score_all([p.x for p in parts], [p.y for p in parts], [p.x for p in parts], pool=pool, against="fed")
    assert [len(s) for s in scores] == [1, 3, 2]
    assert {s.against for s in scores} == {"fed"}
    assert summarize(scores).scored == 6


def test_images_that_are_not_finite_fail_and_stay_in_the_average(pool):
    truth, labels = pool.x[:4], pool.y[:4]
    broken = truth.clone()
    broken[1, 0, 3, 3] = float("nan")
    broken[2, 0, 0, 0] = float("inf")
    scores = score(truth, labels, broken[[1, 0, 3, 2]], pool=pool[4:])  # broken ones first and last: order counts
    assert set(scores.order[[1, 2]].tolist()) == {0, 3}
    assert scores.failed.tolist() == [False, True, True, False]
    assert scores.identified.tolist() == [True, False, False, True]
    grey = torch.full_like(truth[1:3], 0.5)
    assert torch.allclose(scores.psnr[1:3], psnr(truth[1:3], grey))

    row = summarize([scores])
    assert (row.scored, row.failed) == (4, 2)
    assert row.asr == 0.5
    assert row.identified.rate == 0.5
    assert row.psnr.mean == pytest.approx((320 + psnr(truth[1:3], grey).sum().item()) / 4)


def test_a_failed_image_never_counts_as_recognised():
    grey = torch.full((1, 1, 12, 12), 0.5)
    scores = score(grey, torch.tensor([0]), torch.full_like(grey, float("nan")), pool=None)
    assert scores.ssim.item() == pytest.approx(1)
    assert summarize([scores]).asr == 0


def test_summary_has_the_fields_and_numbers_it_promises(pool, monkeypatch):
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    truth, labels = pool.x[:8], pool.y[:8]
    guess = torch.cat([noisy(truth[:3], 0.05), noisy(truth[3:], 3.0)])
    scores = score_all(truth[:, None], labels[:, None], guess[:, None], pool=pool)
    row = summarize(scores)
    assert (row.against, row.scored, row.failed, row.label_accuracy) == ("original", 8, 0, None)
    values = psnr(truth, guess).numpy()
    expected = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    assert row.psnr.model_dump() == pytest.approx(expected)
    assert row.lpips is None
    assert row.asr == (ssim(truth, guess) >= 0.6).double().mean().item() == 3 / 8
    hits = sum(int(s.identified.sum()) for s in scores)
    assert 3 <= hits < 8
    low, high = clopper_pearson(hits, 8)
    assert row.identified.model_dump() == pytest.approx({"rate": hits / 8, "low": low, "high": high, "chance": 1 / 250})
    assert ScoreRow.model_validate_json(row.model_dump_json()) == row


def test_without_a_pool_identification_is_unknown(pool):
    scores = score(pool.x[:2], pool.y[:2], pool.x[:2], pool=None, lpips=None)
    assert scores.identified is None
    assert scores.rank is None
    assert summarize([scores]).identified is None
    assert scores.lpips is None


def test_chance_is_the_mean_over_images(pool):
    """One victim's class is large, the others' is small and replaced by everyone."""
    uneven = Batch(pool.x, (torch.arange(500) >= 300).long())
    large = score(uneven.x[:1], uneven.y[:1], uneven.x[:1], pool=uneven)
    small = score(uneven.x[498:], uneven.y[498:], uneven.x[498:], pool=uneven[:-1])
    assert large.chance == pytest.approx(1 / 300)
    assert small.chance == pytest.approx((1 / 499 + 1 / 500) / 2)
    assert summarize([large, small]).identified.chance == pytest.approx((1 / 300 + 1 / 499 + 1 / 500) / 3)


def test_nothing_to_summarize_is_an_error():
    with pytest.raises(ValueError, match="no scores"):
        summarize([])


def test_thirty_two_victims_in_well_under_a_second():
    images = torch.rand(20_000, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    pool = Batch(images, torch.arange(20_000) % 10)
    seconds = []
    for _ in range(3):  # processor time, and the best of three: other work on the machine says nothing about ours
        started = time.process_time()
        scores = score_all(images[:32, None], pool.y[:32, None], images[:32, None], pool=pool, lpips=None)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 1  # about 0.05 on an idle core
    assert all(s.identified.all() for s in scores)


def test_a_registered_metric_is_measured_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METRICS", dict(registry._METRICS))
    registry.metric("brightness")(lambda truth, guess: (guess - truth).mean(dim=(1, 2, 3)))
    registry.metric("unmeasurable")(lambda truth, guess: None)
    registry.metric("infinite")(lambda truth, guess: torch.full((len(truth),), float("inf")))
    truth = torch.zeros(2, 1, 8, 8)
    scores = score(truth, torch.tensor([0, 1]), truth + 0.5, pool=None, lpips=None)
    assert scores.others["brightness"].tolist() == [0.5, 0.5]
    assert sorted(scores.others) == ["brightness", "infinite"]
    row = summarize([scores])
    assert row.others == {"brightness": Statistic(mean=0.5, std=0.0, min=0.5, max=0.5)}


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two metrics are named 'psnr'"):
        registry.metric("psnr")(lambda truth, guess: None)
