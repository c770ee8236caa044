"""Soteria: its scores against one backward pass a feature, and that nothing but the protected columns changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.defenses import Step, parse
from gradveil.defenses.gradient import soteria

SHAPE = (1, 8, 8)


class Net(nn.Module):
    """Two linear layers behind a convolution with BatchNorm and dropout; the last is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 4)
        self.conv, self.norm, self.drop = nn.Conv2d(1, 3, 3, 2), nn.BatchNorm2d(3), nn.Dropout(0.5)
        self.first = nn.Linear(27, 7)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = torch.sigmoid(self.norm(self.conv(x))).flatten(1)
        return maps, self.drop(torch.tanh(self.first(maps)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x)[1])


class Tokens(nn.Module):
    """Every row of the image is a token; the classifier sees them all before they are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sigmoid(x[:, 0]) ** 2).mean(1)


def step_for(module: nn.Module, n: int) -> Step:
    rng = generator(n, "step")
    f = ModelFunction(module)
    batch = Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(4, (n,), generator=rng))
    step = Step(Task(f, SHAPE, 4, torch.tensor([0.3]), torch.tensor([0.5])), f.state(), batch, rng)
    step.noise = f.draw_noise(n, rng)
    return step


def slowly(r: Tensor, x: Tensor, offset: float) -> Tensor:
    """One backward pass for every feature of every image."""
    score = torch.zeros(r.shape[-1])
    for b in range(len(r)):
        rows = r[b].reshape(-1, r.shape[-1])
        for t in range(len(rows)):
            for i in range(r.shape[-1]):
                (back,) = torch.autograd.grad(rows[t, i], x, retain_graph=True)
                score[i] += back[b].norm() / (rows[t, i].detach() + offset)
    return score.abs()


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("chunk", [1, 2**24])
def test_scores_equal_a_slow_loop(n: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soteria, "_CHUNK", chunk)
    step = step_for(Net(), n)
    found = parse("soteria:layers=all,offset=0.2").scores(step)  # type: ignore[attr-defined]
    x = step.task.normalize(step.batch.x).requires_grad_()
    maps, hidden = step.model.module.features(x)  # type: ignore[operator]
    assert list(found) == ["first.weight", "last.weight"]
    assert torch.allclose(found["first.weight"], slowly(maps, x, 0.2), rtol=1e-4)
    assert torch.allclose(found["last.weight"], slowly(hidden, x, 0.2), rtol=1e-4)


def test_tokens_count_like_images() -> None:
    step = step_for(Tokens(), 2)
    x = step.task.normalize(step.batch.x).requires_grad_()
    found = parse("soteria").scores(step)  # type: ignore[attr-defined]
    assert torch.allclose(found["fc.weight"], slowly(torch.sigmoid(x[:, 0]) ** 2, x, 0.1), rtol=1e-4)


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 0.8])
def test_only_the_most_traceable_columns_go(n: int, ratio: float) -> None:
    step, defense = step_for(Net(), n), parse(f"soteria:ratio={ratio}")
    plain = step.gradient(step.batch)
    sent = defense.gradient(plain, step)
    assert list(sent) == list(plain)
    score = defense.scores(step)["last.weight"]  # type: ignore[attr-defined]
    gone = score.argsort()[: -(-int(ratio * 10) * 6 // 10)]  # below the percentile of 7 scores: ranks 0 … 6
    expected = plain["last.weight"].clone()
    expected[:, gone] = 0
    for name, g in plain.items():
        assert torch.equal(sent[name], expected if name == "last.weight" else g) and sent[name].dtype == g.dtype
    assert torch.equal(step.secrets["soteria.last.weight"] == 0, torch.isin(torch.arange(7), gone))


def test_all_layers_are_masked_on_request() -> None:
    step = step_for(Net(), 3)
    sent = parse("soteria:layers=all,ratio=0.5").gradient(step.gradient(step.batch), step)
    assert {name for name, g in sent.items() if g.ndim == 2 and (g == 0).all(0).any()} == {"first.weight", "last.weight"}


def test_it_protects_a_model_with_a_random_part() -> None:
    defense = parse("precode:k=6+soteria:ratio=0.5")
    step = step_for(defense.model(Net(), SHAPE), 2)
    sent = defense.gradient(step.gradient(step.batch), step)
    assert (sent["last.layer.weight"] == 0).all(0).sum() == 3


def test_a_model_without_a_linear_layer_is_refused() -> None:
    step = step_for(nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), 1)
    with pytest.raises(UserError, match="fully connected"):
        parse("soteria").gradient(step.gradient(step.batch), step)
