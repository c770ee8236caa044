"""GradDefense: sensitivity against one image at a time, slices of equal weight, noise in the chosen slices alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import TorchStream, torch_stream
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.defenses import Setup, Step, parse
from gradveil.defenses.gradient.graddefense import sensitivity

SHAPE = (1, 8, 8)


def net() -> ModelFunction:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Sigmoid(), nn.Dropout(0.3), nn.Flatten()]
    return ModelFunction(nn.Sequential(*body, nn.Linear(216, 4)))


def images(n: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(4, (n,), generator=rng))


def task_of(f: ModelFunction) -> Task:
    return Task(f, SHAPE, 4, torch.zeros(1), torch.ones(1))


def client(spec: str, public: Batch | None = None) -> Client:
    f = net()
    return prepare_client(parse(spec), LocalTraining(), Setup(task_of(f), f.state(), images(40), public))


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def test_sensitivity_equals_one_image_and_tensor_at_a_time() -> None:
    f, batch = net(), images(5)
    found = sensitivity(f, f.state(), batch.x, batch.y)
    parameters = dict(f.module.named_parameters())
    for row, parameter in zip(found, parameters.values(), strict=True):
        norms = []
        for i in range(len(batch)):
            x = batch.x[i : i + 1].clone().requires_grad_()
            loss = nn.functional.cross_entropy(f.module(x), batch.y[i : i + 1]) / len(batch)
            (g,) = torch.autograd.grad(loss, parameter, create_graph=True)
            norms.append(torch.autograd.grad(g.sum(), x)[0].norm())
        assert torch.allclose(
            row, torch.stack(norms).mean(), rtol=1e-4, atol=1e-6
        )  # under softmax the last one is rounding alone


def test_a_softmax_classifier_has_no_sensitivity_of_this_kind() -> None:
    f, batch = net(), images(5)
    found = dict(zip(f.trainable, sensitivity(f, f.state(), batch.x, batch.y), strict=True))
    assert max(found["5.weight"], found["5.bias"]) < 1e-6 < min(v for k, v in found.items() if k[0] != "5")


@pytest.mark.parametrize("slices", [1, 4, 10])
def test_slices_hold_equal_shares_of_the_sensitivity(slices: int) -> None:
    f, batch = net(), images(20)
    step = Step(task_of(f), f.state(), batch, TorchStream())
    cuts = parse(f"graddefense:slices={slices},noised=1").cuts(step, batch)  # type: ignore[attr-defined]
    sizes = [p.numel() for p in f.parameters(f.state()).values()]
    share = sensitivity(f, f.state(), batch.x, batch.y).double()
    share = share / share.sum()
    each = torch.cat([torch.full((n,), float(s / n)) for s, n in zip(share, sizes, strict=True)])
    assert cuts[0] == 0 and cuts[-1] == sum(sizes) and len(cuts) == slices + 1
    assert (cuts.diff() > 0).all()
    for a, b in pairwise(cuts.tolist()):
        assert abs(each[a:b].sum() - 1 / slices) <= 1.01 * each.max()


def test_noise_stays_in_the_chosen_slices() -> None:
    c, batch = client("graddefense:std=0.1"), images(16)
    plain = c.task.model.gradient(c.task.model.state(), batch.x, batch.y)
    update, trace = c.round(c.task.model.state(), batch, 0)
    assert {k: (v.shape, v.dtype) for k, v in update.tensors.items()} == {k: (v.shape, v.dtype) for k, v in plain.items()}
    bounds = trace.secrets["graddefense.noised"]
    assert bounds.shape == (5, 2)
    inside = torch.zeros(len(flat(plain)), dtype=torch.bool)
    for a, b in bounds.tolist():
        inside[a:b] = True
    change = flat(update.tensors) - flat(plain)
    assert (change[~inside] == 0).all() and (change[inside] != 0).float().mean() > 0.99
    assert change[inside].std().item() == pytest.approx(0.1, rel=0.15)


def test_slices_are_drawn_anew_for_each_draw_and_again_for_the_same() -> None:
    c, batch = client("graddefense:std=0.1", public=images(60, seed=5)), images(1)
    seen = [c.round(c.task.model.state(), batch, draw) for draw in (0, 0, 1, 2, 3)]
    assert torch.equal(flat(seen[0][0].tensors), flat(seen[1][0].tensors))
    assert len({str(t.secrets["graddefense.noised"].tolist()) for _, t in seen}) > 1


def test_no_noise_is_the_identity() -> None:
    c, batch = client("graddefense:std=0"), images(3)
    update, _ = c.round(c.task.model.state(), batch, 0)
    assert torch.equal(flat(update.tensors), flat(c.task.model.gradient(c.task.model.state(), batch.x, batch.y)))


def test_clipping_bounds_every_image_in_the_chosen_slices() -> None:
    c, batch = client("graddefense:clip=true,std=0.01"), images(3)
    state = c.task.model.state()
    step = Step(c.task, state, batch, TorchStream())
    whole = flat(step.gradient(batch))
    found, part = whole.clone(), slice(10, 300)
    c.defense._clip(found, [part], step)  # type: ignore[attr-defined]
    rows = [flat(step.gradient(batch[i : i + 1]))[part] for i in range(3)]
    assert all(r.norm() > 0.01 for r in rows)
    assert torch.allclose(found[part], sum(0.01 * r / r.norm() for r in rows) / 3, atol=1e-8)  # type: ignore[arg-type]
    assert torch.equal(found[:10], whole[:10]) and torch.equal(found[300:], whole[300:])


def test_refresh_measures_at_the_present_weights() -> None:
    f = net()
    kept, fresh = parse("graddefense"), parse("graddefense:refresh=true")
    setup = Setup(task_of(f), f.state(), images(20))
    memory = kept.prepare(setup)
    later = {k: v * 5 if k == "1.weight" else v for k, v in f.state().items()}

    def noised(defense: object) -> list[list[int]]:
        step = Step(task_of(f), later, images(1), torch_stream(0), memory)
        defense.gradient(step.gradient(step.batch), step)  # type: ignore[attr-defined]
        return step.secrets["graddefense.noised"].tolist()  # type: ignore[no-any-return]

    assert noised(kept) != noised(fresh)


def test_more_noised_slices_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match="is more than slices="):
        parse("graddefense:slices=3")


def test_clipping_is_refused_where_images_are_coupled() -> None:
    f = ModelFunction(net().module, mode="train")
    step = Step(task_of(f), f.state(), images(4), TorchStream())
    defense = parse("graddefense:clip=true")
    step.memory = (step.batch, torch.arange(11))
    with pytest.raises(UserError, match="couples"):
        defense.gradient(step.gradient(step.batch), step)
