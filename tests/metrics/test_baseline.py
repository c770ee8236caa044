import pytest
import torch

from gradveil.core.types import Batch
from gradveil.metrics import baseline, psnr


@pytest.fixture
def public():
    x = torch.rand(60, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 3
    return Batch(x + y.view(-1, 1, 1, 1), y)


def test_the_mean_of_each_class(public):
    images = baseline(public, torch.tensor([2, 0, 2]))
    assert torch.allclose(images[1], public.x[0::3].mean(dim=0))
    assert torch.allclose(images[0], public.x[2::3].mean(dim=0))
    assert torch.equal(images[0], images[2])


def test_the_overall_mean_without_a_label_or_without_its_class(public):
    overall = public.x.mean(dim=0)
    assert torch.allclose(baseline(public, torch.tensor([7]))[0], overall)
    images = baseline(public, None, 4)
    assert images.shape == (4, 3, 5, 5)
    assert torch.allclose(images, overall.expand(4, -1, -1, -1))


def test_soft_labels(public):
    soft = torch.tensor([[0.1, 0.7, 0.2]])
    assert torch.equal(baseline(public, soft), baseline(public, torch.tensor([1])))


def test_no_public_data_is_an_error(public):
    with pytest.raises(ValueError, match="empty"):
        baseline(public[:0], torch.tensor([0]))


def test_knowing_the_class_helps():
    """Images of a class share a pattern, so the class mean comes nearer to a new one than the overall mean."""
    stream = torch.Generator().manual_seed(0)
    patterns = torch.rand(4, 1, 8, 8, generator=stream)
    y = torch.arange(400) % 4
    x = 0.7 * patterns[y] + 0.3 * torch.rand(400, 1, 8, 8, generator=stream)
    public, victims = Batch(x[40:], y[40:]), Batch(x[:40], y[:40])
    informed, blind = baseline(public, victims.y), baseline(public, None, 40)
    assert psnr(victims.x, informed).mean() > psnr(victims.x, blind).mean() + 3
