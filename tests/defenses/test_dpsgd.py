"""DP-SGD against gradients taken one by one, its noise against its formula, its accountant against the theory."""

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradveil as gv
from gradveil.certification import certificate
from gradveil.certification.mechanism import Mechanism
from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining, freeze
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.defenses import parse
from gradveil.defenses.base import Setup
from gradveil.defenses.gradient.dpsgd import DpSgd, noise_for
from gradveil.protection.promise import mechanism_of


class Noisy(nn.Module):
    """A network with a random part of its own, to see that each image keeps its draw."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 3)
        self.register_buffer("noise", torch.zeros(1, 8))

    def draw(self, images: int, rng: torch.Generator) -> Tensor:
        return torch.randn(images, 8, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))) + self.noise)


def setup(spec: str, module: nn.Module | None = None, training: LocalTraining | None = None) -> tuple[Client, Batch]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = module or nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = Batch(torch.rand(6, 1, 4, 4, generator=generator(0, "images")), torch.arange(6) % 3)
    model = ModelFunction(module)
    one = prepare_client(
        parse(spec),
        training or LocalTraining(),
        Setup(Task(model, (1, 4, 4), 3, torch.tensor([0.5]), torch.tensor([0.25])), model.state(), batch),
    )
    return one, batch


def norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in tensors.values()))


def test_each_image_is_clipped_by_itself():
    plain, batch = setup("none")
    state = plain.task.model.state()
    single = [plain.round(state, batch[i : i + 1], 0)[0].tensors for i in range(6)]
    clip = sorted(norm(g) for g in single)[2]  # three are above it, the others not
    expected = {
        name: sum(g[name] * min(1.0, clip / norm(g)) for g in single) / 6  # type: ignore[misc]
        for name in single[0]
    }
    one, _ = setup(f"dpsgd:noise=0,clip={clip!r}")
    update, trace = one.round(state, batch, 0)
    for name, g in expected.items():
        torch.testing.assert_close(update.tensors[name], g, atol=1e-7, rtol=1e-5)
    factors = torch.tensor([min(1.0, clip / norm(g)) for g in single])
    torch.testing.assert_close(trace.secrets["clipped"], factors)
    assert int((factors < 1).sum()) == 3


def test_a_random_network_keeps_each_images_draw():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = Noisy()
    (plain, batch), (private, _) = setup("none", module), setup("dpsgd:noise=0,clip=1000", module)
    state = plain.task.model.state()
    expected, update = (one.round(state, batch, 0)[0].tensors for one in (plain, private))
    for name, g in expected.items():
        torch.testing.assert_close(update[name], g, atol=1e-6, rtol=1e-5)


def test_noise_has_the_deviation_of_the_formula():
    quiet, batch = setup("dpsgd:noise=0,clip=0.3")
    loud, _ = setup("dpsgd:noise=2,clip=0.3")
    state = quiet.task.model.state()
    exact = quiet.round(state, batch, 0)[0].tensors
    drawn = []
    for key in range(60):
        noisy = loud.round(state, batch, key)[0].tensors
        drawn.append(torch.cat([(noisy[name] - exact[name]).flatten() for name in exact]))
    noise = torch.cat(drawn)
    assert loud.defense.std(6) == pytest.approx(2 * 0.3 / 6)
    assert float(noise.std()) == pytest.approx(0.1, rel=0.03)
    assert abs(float(noise.mean())) < 0.004


def test_gain_lengthens_what_leaves_and_promises_the_same():
    short, batch = setup("dpsgd:noise=2,clip=0.3")
    long, _ = setup("dpsgd:noise=2,clip=0.3,gain=5")
    state = short.task.model.state()
    sent, longer = (one.round(state, batch, 0)[0].tensors for one in (short, long))
    for name, g in sent.items():
        torch.testing.assert_close(longer[name], 5 * g)
    assert long.defense.std(6) == pytest.approx(5 * short.defense.std(6))
    assert long.defense.clip_norm(1) == pytest.approx(1.5)
    proven = mechanism_of(short.defense)
    assert isinstance(proven, Mechanism)
    assert mechanism_of(long.defense) == dataclasses.replace(proven, name=long.defense.spec)


def test_every_local_step_is_private():
    training = LocalTraining(batch_size=2, lr=1.0)
    one, batch = setup("dpsgd:noise=0,clip=0.001", training=training)
    update, trace = one.round(one.task.model.state(), batch, 0)
    assert norm(update.tensors) <= 3 * 0.001 + 1e-7  # three steps, each bounded by the clip
    assert len(trace.secrets["clipped"]) == 6


def test_a_poisson_sample_gets_the_noise_of_its_expected_size_and_an_empty_one_too():
    training = LocalTraining(epochs=40, batch_size=1, lr=1.0, sampling="poisson")
    loud, batch = setup("dpsgd:noise=2,clip=0.3", training=training)
    state = loud.task.model.state()
    sizes = [len(part) for (part,) in training.steps(6, loud.draws("order", 0))]
    assert 0 in sizes and max(sizes) > 2
    spread = norm(loud.round(state, batch, 0)[0].tensors)
    values = sum(p.numel() for p in loud.task.model.parameters(state).values())
    # 240 steps, each with noise of 2 · 0.3 / 1 on every entry, whatever the number of images in it.
    assert spread == pytest.approx(0.6 * math.sqrt(240 * values), rel=0.2)
    quiet, _ = setup("dpsgd:noise=0,clip=0.001", training=training)
    update, trace = quiet.round(state, batch, 0)
    assert len(trace.secrets["clipped"]) == sum(sizes)
    assert 0 < norm(update.tensors) <= 0.001 * sum(sizes) + 1e-6  # a sum over images divided by 1, not by their number


def rdp_epsilon(noise: float, delta: float, rounds: int) -> float:
    """The Gaussian mechanism composed without subsampling, in closed form, at its best order."""
    order = np.arange(1.01, 400, 0.01)
    spent = rounds * order / (2 * noise**2) + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    return float(spent.min())


@pytest.mark.parametrize(("epsilon", "rounds"), [(3.0, 10), (2.0, 100)])
def test_the_noise_for_an_epsilon_agrees_with_the_theory(epsilon, rounds):
    pytest.importorskip("opacus")
    assert rdp_epsilon(noise_for(epsilon, 1e-5, rounds, 1.0), 1e-5, rounds) == pytest.approx(epsilon, rel=0.02)


def test_the_noise_for_an_epsilon_spends_just_that():
    pytest.importorskip("opacus")
    method = parse("dpsgd:epsilon=8,rounds=50,clip=4,sample_rate=0.1")
    assert isinstance(method, DpSgd)
    spent, fewer = (
        gv.certify(method, rounds=rounds, sampling="poisson", sample_rate=0.1).epsilon
        for rounds in (5, 1)  # of 10 gradients each
    )
    assert fewer < 6.5 < spent <= 8.0  # the certificate has a tighter accountant than the one that chose the noise
    assert noise_for(8, 1e-5, 50, 1.0) > method.multiplier  # no credit for subsampling: more noise
    assert method.std(16) == pytest.approx(method.multiplier * 4 / 16)


def test_a_missing_accountant_is_told_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(UserError, match=r"gradveil\[dp\]"):
        setup("dpsgd:epsilon=3.21,rounds=7")


@pytest.mark.parametrize("settings", ["noise=1,epsilon=8", "noise=1,risk=0.05", "epsilon=8,risk=0.05"])
def test_noise_epsilon_and_risk_exclude_each_other(settings):
    with pytest.raises(UserError, match="set one of noise, epsilon and risk"):
        parse(f"dpsgd:{settings}")


def test_the_noise_for_a_risk_promises_just_that_over_all_rounds():
    method = parse("dpsgd:risk=0.05,rounds=20")
    assert isinstance(method, DpSgd) and method.std(8) == pytest.approx(method.multiplier / 8)
    assert gv.certify(method, rounds=20).upper == pytest.approx(0.05, rel=1e-6)
    assert gv.certify(method, rounds=21).upper > 0.051  # one more than planned
    longer = parse("dpsgd:risk=0.05,rounds=20,line_up=10001")
    assert gv.certify(longer, rounds=20, line_up=10001).upper == pytest.approx(0.05, rel=1e-6)
    assert gv.certify(longer, rounds=20).upper > 0.1  # a shorter line-up is easier
    with pytest.raises(UserError, match="guessing reaches"):
        setup("dpsgd:risk=0.0001")


def test_the_noise_for_a_risk_counts_poisson_samples_in_whole_epochs(monkeypatch):
    pytest.importorskip("opacus")
    monkeypatch.setattr(certificate, "SEARCH_DIGITS", 1)
    method = parse("dpsgd:risk=0.05,rounds=3,sample_rate=0.5")
    assert isinstance(method, DpSgd)
    promised, more = (gv.certify(method, rounds=n, sampling="poisson", sample_rate=0.5).upper for n in (2, 4))
    assert 0.03 < promised <= 0.05 < more
    assert method.multiplier < parse("dpsgd:risk=0.05,rounds=4").multiplier


def test_a_sample_that_hardly_ever_holds_an_image_counts_as_one_epoch(monkeypatch):
    asked = []
    monkeypatch.setattr(certificate, "noise_for", lambda risk, mechanism, releases, line_up: asked.append(releases) or 1.0)
    assert DpSgd(risk=0.123, rounds=1, sample_rate=1e-10).multiplier == 1.0
    assert asked[0].rounds == 1


@pytest.mark.parametrize("setting", ["clip", "noise", "epsilon"])
def test_settings_without_end_are_refused(setting):
    with pytest.raises(UserError, match="finite"):
        parse(f"dpsgd:{setting}=inf")


def test_a_frozen_network_is_clipped_over_its_head_alone():
    training = LocalTraining(frozen=("1.*",))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    freeze(module, training.frozen)
    (plain, batch), (private, _) = setup("none", module, training), setup("dpsgd:noise=0,clip=0.1", module, training)
    state = plain.task.model.state()
    single = [plain.round(state, batch[i : i + 1], 0)[0].tensors for i in range(6)]
    assert list(single[0]) == ["3.weight", "3.bias"] and all(norm(g) > 0.1 for g in single)
    update, _ = private.round(state, batch, 0)
    for name in single[0]:
        expected = torch.stack([g[name] * 0.1 / norm(g) for g in single]).mean(0)
        torch.testing.assert_close(update.tensors[name], expected, atol=1e-7, rtol=1e-5)
    loud, _ = setup("dpsgd:noise=2", module, training)
    assert list(loud.round(state, batch, 0)[0].tensors) == ["3.weight", "3.bias"]
