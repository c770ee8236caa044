"""The laws of sharing out: nothing lost, nothing twice, nobody without, and the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.errors import UserError
from gradveil.federation.partition import share

labels = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(torch.tensor)
ways = st.sampled_from(["iid", "dirichlet", "dirichlet:alpha=0.001", "dirichlet:alpha=100", "classes", "classes:per_client=1"])


@given(labels, st.integers(1, 20), ways, st.integers(0, 5))
def test_every_image_has_exactly_one_holder(y: torch.Tensor, clients: int, how: str, seed: int) -> None:
    try:
        shares = share(y, clients, how, seed)
    except UserError:
        classes = len(y.unique())
        hand = 1 if how == "classes:per_client=1" else 2
        too_few = len(y) < clients * hand or clients * hand < classes or hand > classes
        assert clients > len(y) or (how.startswith("classes") and too_few) or _thin_class(y, clients, hand)
        return
    assert len(shares) == clients
    assert all(len(s) for s in shares)
    assert torch.cat(shares).sort().values.tolist() == list(range(len(y)))
    again = share(y, clients, how, seed)
    assert all(torch.equal(a, b) for a, b in zip(shares, again, strict=True))


def _thin_class(y: torch.Tensor, clients: int, hand: int) -> bool:
    """Some class has fewer images than clients that would hold it."""
    counts = y.unique(return_counts=True)[1]
    return bool(counts.min() < -(-clients * hand // len(counts)))


@given(st.integers(1, 12), st.integers(12, 90), st.integers(0, 3))
def test_iid_shares_differ_by_one_image_at_most(clients: int, n: int, seed: int) -> None:
    sizes = [len(s) for s in share(torch.zeros(n), clients, "iid", seed)]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 4), st.integers(1, 10), st.integers(0, 3))
def test_by_class_a_client_sees_that_many_classes_in_equal_shares(per_client: int, clients: int, seed: int) -> None:
    y = torch.arange(400) % 4
    if clients * per_client < 4:
        with pytest.raises(UserError, match="without a client"):
            share(y, clients, f"classes:per_client={per_client}", seed)
        return
    shares = share(y, clients, f"classes:per_client={per_client}", seed)
    assert {len(y[s].unique()) for s in shares} == {per_client}
    for c in range(4):
        held = [int((y[s] == c).sum()) for s in shares if (y[s] == c).any()]
        assert max(held) - min(held) <= 1


def _skew(y: torch.Tensor, how: str) -> float:
    """The mean share of a client's most frequent class."""
    shares = share(y, 10, how, 0)
    return sum(float(y[s].bincount().max()) / len(s) for s in shares) / len(shares)


def test_alpha_goes_from_one_class_a_client_to_all_alike() -> None:
    y = torch.arange(4000) % 10
    lopsided, between, even = (_skew(y, f"dirichlet:alpha={a}") for a in (0.01, 0.5, 1000))
    assert lopsided > 0.85
    assert 0.2 < between < 0.7
    assert even < 0.13


def test_the_seed_decides_who_holds_which_classes() -> None:
    y = torch.arange(60) % 6
    held = {tuple(y[share(y, 3, "classes", seed)[0]].unique().tolist()) for seed in range(8)}
    assert len(held) > 2


def test_seeds_share_out_differently() -> None:
    y = torch.arange(60) % 3
    for how in ("iid", "dirichlet", "classes"):
        assert any(a.tolist() != b.tolist() for a, b in zip(share(y, 3, how, 0), share(y, 3, how, 1), strict=True))


@pytest.mark.parametrize(
    ("how", "clients", "words"),
    [
        ("dirichle", 2, "did you mean 'dirichlet'"),
        ("iid:alpha=1", 2, "no setting 'alpha'"),
        ("dirichlet:alpha=0", 2, "alpha"),
        ("classes:per_client=9", 2, "more classes than there are"),
        ("iid", 50, "cannot be distributed"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(how: str, clients: int, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        share(torch.arange(12) % 3, clients, how)
    assert "\n" not in str(error.value)
