from itertools import permutations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.metrics import match, mse


def test_least_total_error_of_all_orders():
    x, y = torch.rand(2, 5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    totals = {order: mse(x, y[list(order)]).sum().item() for order in permutations(range(5))}
    assert tuple(match(x, y).tolist()) == min(totals, key=totals.__getitem__)


def test_no_reconstruction_is_used_twice():
    """Both images are nearest to the same reconstruction; the best-of rule would score it twice."""
    x = torch.tensor([0.5, 0.6]).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    y = torch.tensor([0.55, 0.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    assert match(x, y).tolist() == [1, 0]


def test_errors_are_squared():
    """Distances are 0 and 0.9 in one order, 0.5 and 0.5 in the other: the sum prefers the first, squares the second."""
    x = torch.tensor([[0.5, 0.0], [0.95, 0.218]]).view(2, 1, 1, 2)
    y = torch.tensor([[0.5, 0.0], [0.05, 0.218]]).view(2, 1, 1, 2)
    assert match(x, y).tolist() == [1, 0]


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 12), noise=st.floats(0, 1))
def test_the_order_of_reconstructions_does_not_matter(seed, n, noise):
    stream = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 6, 6, generator=stream)
    y = (x + noise * torch.randn(x.shape, generator=stream)).clamp(0, 1)
    shuffled = y[torch.randperm(n, generator=stream)]
    assert torch.equal(y[match(x, y)], shuffled[match(x, shuffled)])
