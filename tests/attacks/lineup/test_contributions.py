"""Inner products of single gradients, and the whitening by them, against gradients that are written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.lineup import contributions as module
from gradveil.attacks.lineup.contributions import Contributions, LayerBlock, SingleGradients
from gradveil.attacks.lineup.others import Filter, OtherImages, Seen, Whitening
from gradveil.core.gradients import ModelFunction
from gradveil.core.loops import sampled
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors

SHAPE = (1, 6, 6)


def task_of(module: nn.Module, mode: str = "eval") -> Task:
    model = ModelFunction(module, mode="train" if mode == "train" else "eval")
    return Task(model, SHAPE, 3, torch.zeros(1), torch.ones(1))


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle: list[nn.Module] = [nn.BatchNorm2d(4)] if norm else []
    layers = [nn.Conv2d(1, 4, 3), *middle, nn.Tanh(), nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)]
    return nn.Sequential(*layers)


def batch(count: int, seed: int = 0) -> Batch:
    return Batch(torch.rand(count, *SHAPE, generator=generator(seed)), torch.arange(count) % 3)


def written_out(task: Task, state: Tensors, images: Batch) -> Tensor:
    """One row per image: all its gradients, double precision."""
    rows = [task.model.gradient(state, images.x[i : i + 1], images.y[i : i + 1]) for i in range(len(images))]
    return torch.stack([torch.cat([t.flatten() for t in row.values()]) for row in rows]).double()


def prepared(count: int = 7) -> tuple[Task, Tensors, SingleGradients, Batch, Contributions]:
    task = task_of(network())
    state, images = task.model.state(), batch(count)
    gradients = SingleGradients(task, state, images.x)
    return task, state, gradients, images, gradients.of(images, generator(0))


def test_inner_products_are_those_of_the_gradients() -> None:
    task, state, gradients, images, contributions = prepared()
    rows = written_out(task, state, images)
    assert sum(isinstance(block, LayerBlock) for block in contributions.blocks) == 2
    assert torch.allclose(contributions.dot(contributions).sum(0), rows @ rows.T, rtol=1e-4, atol=1e-7)
    assert torch.allclose(contributions.squares().sum(0), rows.square().sum(1), rtol=1e-4)
    sent = task.model.gradient(state, images.x[:3], images.y[:3])
    along = contributions.along(gradients.split(sent)).sum(0)
    assert torch.allclose(along, rows @ rows[:3].mean(0), rtol=1e-4, atol=1e-7)
    assert float(contributions.entries.sum()) == rows.shape[1]


def test_a_plan_computes_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1)  # image by image
    _, _, gradients, _, _ = prepared()
    images, chunks = batch(60), list[int]()
    monkeypatch.setattr(
        gradients, "_chunk", lambda x, *rest: chunks.append(len(x)) or SingleGradients._chunk(gradients, x, *rest)
    )
    with sampled() as sample:
        contributions = gradients.of(images, generator(0))
    assert len(chunks) < 10 and contributions.squares().shape[1] == 60
    assert sample.skipped > 0 and sample.shared > sample.skipped
    with sampled() as sample:
        gradients.of(images, generator(0), shared=False)
    assert sample.skipped > 0 and sample.shared == 0


def test_only_some_entries() -> None:
    task, state, gradients, images, contributions = prepared()
    mask = {
        name: (torch.rand(t.shape, generator=generator(5)) < 0.3).float() for name, t in task.model.parameters(state).items()
    }
    kept = [part.flatten().nonzero().flatten() for part in gradients.split(mask)]
    restricted = contributions.restricted(kept)
    rows = written_out(task, state, images) * torch.cat([t.flatten() for t in mask.values()])
    assert torch.allclose(restricted.dot(restricted).sum(0), rows @ rows.T, rtol=1e-4, atol=1e-7)


def test_single_gradients_are_clipped() -> None:
    task, state, images = task_of(network()), task_of(network()).model.state(), batch(7)
    lengths = written_out(task, state, images).norm(dim=1)
    bound = float(lengths.median())
    clipped = SingleGradients(task, state, images.x, bound).of(images, generator(0)).squares().sum(0).sqrt()
    assert torch.allclose(clipped, lengths.clamp_max(bound), rtol=1e-4)
    assert int((lengths > bound * 1.001).sum()) >= 2


def test_batchnorm_takes_the_statistics_of_other_images() -> None:
    task, images = task_of(network(norm=True), "train"), batch(16)
    state = task.model.state()
    gradients = SingleGradients(task, state, images.x)
    alone, together = (gradients.of(images[:n], generator(0)) for n in (3, 16))
    assert torch.allclose(alone.squares(), together.squares()[:, :3], rtol=1e-4)
    # Their mean is close to the gradient of the batch, which is only that with the statistics held fixed.
    sent = gradients.split(task.model.gradient(state, images.x, images.y))
    along = together.along(sent).sum(0).mean()
    length = sum(part.square().sum() for part in sent)
    assert float(along / length) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("free", [False, True])
def test_the_filter_is_the_likelihood_under_the_covariance_written_out(noise: float, free: bool) -> None:
    task, state, gradients, candidates, contributions = prepared()
    public, counts = batch(30, 9), torch.tensor([2.0, 0.0, 1.0], dtype=torch.double)
    background = OtherImages(gradients.of(public, generator(0)), public.y, 3)
    sent = task.model.gradient(state, *(t[[0, 1, 2, 4]] for t in (candidates.x, candidates.y)))
    blocks = gradients.split({name: 4 * t for name, t in sent.items()})
    whitening = Whitening(background, counts, 0.1, noise)
    seen = Seen(background.public.along(blocks), contributions.along(blocks))
    whitened = whitening.of(background.public.dot(contributions), contributions.squares())
    scores = Filter(0.1, free).scores(whitening, whitened, seen, counts)

    update = torch.cat([t.flatten() for t in sent.values()]).double() * 4
    others, rows = written_out(task, state, public), written_out(task, state, candidates)
    means = torch.stack([others[public.y == c].mean(0) for c in range(3)])
    away, spread = others - means[public.y], means - means.mean(0)
    covariance = (background.weights(counts)[:, None] * away).T @ away + 0.02 * 4 * spread.T @ spread
    names = torch.cat([torch.full((t.numel(),), i) for i, t in enumerate(task.model.parameters(state).values())])
    # Blocks: the two dense layers, then groups of the rest; entries of one block share a diagonal value.
    diagonal = torch.empty(len(update), dtype=torch.double)
    for parameters, value in zip([(2, 3), (4,), (0,), (1,)], whitening.diagonal, strict=True):
        diagonal[torch.isin(names, torch.tensor(parameters))] = value
    inverse = torch.linalg.inv(covariance + torch.diag(diagonal))
    mean = counts @ means
    if free:
        expected = rows + mean
        fit = expected @ inverse @ update
        wanted = fit * fit.abs() / ((expected @ inverse) * expected).sum(1) / 2
    else:
        left = update - mean - rows
        wanted = ((update - mean) @ inverse @ (update - mean) - ((left @ inverse) * left).sum(1)) / 2
    assert torch.allclose(scores, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))
    assert scores.argsort().tolist() == wanted.argsort().tolist()
