"""InstaHide: signs act in the network's space, only signs hide the mix, and the cross-dataset scheme's rules."""

import pytest
import torch
from torch import nn

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.defenses import parse
from gradveil.defenses.base import Setup

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.25, 0.2, 0.3])
PRIVATE, PUBLIC = 30, 20


def client(spec: str, *, public: bool = False) -> tuple[Client, Batch, Batch]:
    rng = generator(3, "test")
    private = Batch(torch.rand(PRIVATE, 3, 5, 5, generator=rng), torch.arange(PRIVATE) % 4)
    others = Batch(torch.rand(PUBLIC, 3, 5, 5, generator=rng), torch.arange(PUBLIC) % 7)
    model = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(75, 4)))
    made = prepare_client(
        parse(spec),
        LocalTraining(),
        Setup(Task(model, (3, 5, 5), 4, MEAN, STD), model.state(), private, others if public else None),
    )
    return made, private, others


def normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)


def test_the_network_sees_the_mix_with_signs_flipped():
    one, private, _ = client("instahide:k=3")
    _, trace = one.round(one.task.model.state(), private[:12], 0)
    secrets = trace.secrets
    mixed = torch.einsum("nk,nkchw->nchw", secrets["mixing"], private.x[secrets["partners"]])
    seen = normalized(trace.fed.x)
    torch.testing.assert_close(seen, secrets["signs"] * normalized(mixed), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(seen.abs(), normalized(mixed).abs(), atol=1e-5, rtol=1e-4)
    assert set(secrets["signs"].unique().tolist()) == {-1, 1}
    assert abs(float(secrets["signs"].float().mean())) < 0.1
    torch.testing.assert_close(trace.fed.y.sum(dim=1), torch.ones(12))
    assert secrets["mixing"].max() <= 0.65


def test_signs_are_drawn_anew():
    one, private, _ = client("instahide")
    state = one.task.model.state()
    first, other = (one.round(state, private[:6], key)[1].secrets["signs"] for key in (0, 1))
    assert 0.35 < float((first == other).float().mean()) < 0.65


@pytest.mark.parametrize("k", [4, 5, 6])
def test_cross_dataset_takes_labels_from_private_images_alone(k):
    one, private, public = client(f"instahide:k={k},public=true", public=True)
    _, trace = one.round(one.task.model.state(), private[:15], 0)
    mixing, partners = trace.secrets["mixing"], trace.secrets["partners"]
    own = (k + 1) // 2
    assert (partners[:, :own] < PRIVATE).all()
    assert ((partners[:, own:] >= PRIVATE) & (partners[:, own:] < PRIVATE + PUBLIC)).all()
    assert all(len(set(row)) == k for row in partners.tolist())
    assert (mixing[:, :2].sum(dim=1) >= 0.3).all()
    torch.testing.assert_close(mixing.sum(dim=1), torch.ones(15))
    torch.testing.assert_close(trace.fed.y.sum(dim=1), mixing[:, :own].sum(dim=1))
    both = torch.cat([private.x, public.x])
    mixed = torch.einsum("nk,nkchw->nchw", mixing, both[partners])
    torch.testing.assert_close(normalized(trace.fed.x).abs(), normalized(mixed).abs(), atol=1e-5, rtol=1e-4)


def test_cross_dataset_without_public_images_is_refused():
    with pytest.raises(UserError, match="public images"):
        client("instahide:public=true")
