"""MixUp: combinations recomputed from the secrets, the law of the coefficients, and what it refuses."""

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
from gradveil.defenses import Defense, parse
from gradveil.defenses.base import Chain, Setup
from gradveil.defenses.batch.mixup import different, dirichlet, within

CLASSES = 5


def client(spec: str, images: int = 40, training: LocalTraining | None = None) -> Client:
    rng = generator(7, "test")
    private = Batch(torch.rand(images, 3, 6, 6, generator=rng), torch.arange(images) % CLASSES)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(108, CLASSES)))
    made = prepare_client(
        parse(spec),
        training or LocalTraining(),
        Setup(Task(model, (3, 6, 6), CLASSES, torch.full((3,), 0.4), torch.full((3,), 0.2)), model.state(), private),
    )
    made.private = private  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("k", [2, 4, 6])
def test_fed_images_are_the_combinations_that_the_secrets_tell(k):
    one = client(f"mixup:k={k}")
    private, state = one.private, one.task.model.state()
    _, trace = one.round(state, private[10:18], 0)
    mixing, partners = trace.secrets["mixing"], trace.secrets["partners"]
    assert mixing.shape == partners.shape == (8, k)
    assert partners[:, 0].tolist() == list(range(10, 18))  # each image itself comes first
    for row in range(8):
        assert len(set(partners[row].tolist())) == k
        x = sum(w * private.x[p] for w, p in zip(mixing[row], partners[row], strict=True))
        y = torch.zeros(CLASSES)
        for w, p in zip(mixing[row], partners[row], strict=True):
            y[private.y[p]] += w
        torch.testing.assert_close(trace.fed.x[row], x)
        torch.testing.assert_close(trace.fed.y[row], y)
        largest = partners[row][mixing[row].argmax()]
        assert torch.equal(trace.secrets["component"][row], private.x[largest])


class Negative(Defense):
    """A data stage that is easily told from none."""

    name = "negative"

    def data(self, batch, step):
        return Batch(1 - batch.x, batch.y)


def test_after_a_data_stage_the_partners_are_protected_too():
    one = client(Chain([Negative(), parse("mixup:k=4")]))
    private = one.private
    _, trace = one.round(one.task.model.state(), private[10:14], 0)
    mixing, partners = trace.secrets["mixing"], trace.secrets["partners"]
    for row in range(4):
        own = mixing[row, 0] * (1 - private.x[10 + row])
        others = sum(w * (1 - private.x[p]) for w, p in zip(mixing[row, 1:], partners[row, 1:], strict=True))
        torch.testing.assert_close(trace.fed.x[row], own + others)


def test_the_update_is_the_gradient_of_the_soft_label_loss():
    one = client("mixup")
    state = one.task.model.state()
    update, trace = one.round(state, one.private[:4], 0)
    weight = state["1.weight"].clone().requires_grad_()
    x = (trace.fed.x - 0.4) / 0.2
    logits = x.flatten(1) @ weight.T + state["1.bias"]
    loss = -(trace.fed.y * logits.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(update.tensors["1.weight"], torch.autograd.grad(loss, weight)[0])


def test_draws_differ_between_rounds_and_repeat_by_key():
    one = client("mixup")
    state, batch = one.task.model.state(), one.private[:4]
    first, again, other = (one.round(state, batch, key)[1].fed.x for key in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_local_steps_leave_a_row_for_every_image_fed():
    one = client("mixup", training=LocalTraining(epochs=2, batch_size=3, lr=0.1))
    _, trace = one.round(one.task.model.state(), one.private[:8], 0)
    assert len(trace.fed) == 8
    assert len(trace.secrets["mixing"]) == 16  # two epochs; the first eight are those of `fed`
    images = torch.cat([one.private.x[:8, None], one.private.x[trace.secrets["partners"][:8, 1:]]], dim=1)
    mixed = (trace.secrets["mixing"][:8, :, None, None, None] * images).sum(dim=1)
    torch.testing.assert_close(trace.fed.x, mixed)


def test_an_image_that_is_not_the_clients_has_no_place():
    one = client("mixup")
    stranger = Batch(torch.full((1, 3, 6, 6), 0.5), torch.tensor([2]))
    _, trace = one.round(one.task.model.state(), stranger, 0)
    assert trace.secrets["partners"][0, 0] == -1
    assert (trace.secrets["partners"][0, 1:] >= 0).all()


def test_coefficients_follow_the_dirichlet_law():
    drawn = dirichlet(40_000, 4, generator(0, "law")).double()
    torch.testing.assert_close(drawn.sum(dim=1), torch.ones(40_000, dtype=torch.float64))
    alpha, total = torch.tensor([3.0, 1, 1, 1], dtype=torch.float64), 6.0
    torch.testing.assert_close(drawn.mean(dim=0), alpha / total, atol=0.004, rtol=0)
    torch.testing.assert_close(drawn.var(dim=0), alpha * (total - alpha) / (total**2 * (total + 1)), atol=0.002, rtol=0)


def test_limits_hold_and_bind():
    rng = generator(0, "limits")
    free = dirichlet(2000, 4, rng)
    assert (free.amax(dim=1) > 0.65).any()
    assert (free.amin(dim=1) < 0.02).any()
    kept = within(lambda rows: dirichlet(rows, 4, rng), 2000, 0.02, 0.65)
    assert kept.amax() <= 0.65
    assert kept.amin() >= 0.02


def test_partners_are_uniform_and_never_repeat():
    drawn = different(torch.zeros(6000, 1, dtype=torch.long), 3, 5, generator(0, "partners"))
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    share = torch.bincount(drawn[:, 1:].flatten(), minlength=5)[1:] / 6000
    torch.testing.assert_close(share, torch.full((4,), 0.75), atol=0.02, rtol=0)


@pytest.mark.parametrize("spec", ["mixup:k=4,upper=0.25", "mixup:k=2,lower=0.5"])
def test_impossible_limits_are_refused(spec):
    with pytest.raises(UserError, match="sum to 1"):
        parse(spec)


def test_too_few_images_are_refused():
    with pytest.raises(UserError, match="only 3"):
        client("mixup:k=4", images=3)
