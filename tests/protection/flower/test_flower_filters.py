"""`flower-local` and `clip` against Flower's mods, which run on the same update; and what adaptive clipping adds to `clip`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from gradveil.core.gradients import ModelFunction
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.defenses import Step, parse

app = pytest.importorskip("flwr.app", reason="compares with Flower's own code")
mods = pytest.importorskip("flwr.clientapp.mod", reason="compares with Flower's own code")

NAMES = ("0.weight", "0.bias")
SHAPES = ((30, 20), (30,))


def weights(seed: int, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [scale * rng.standard_normal(shape) for shape in SHAPES]


@pytest.fixture
def through(message: Callable) -> Callable[[Callable, list[np.ndarray], float], tuple[Tensors, dict]]:
    """What Flower's mod sends of an update: the weights of its reply minus those of the message, and its metrics."""

    def run(mod: Callable, moved: list[np.ndarray], norm: float) -> tuple[Tensors, dict]:
        start = weights(0)
        received = message(arrays={n: torch.from_numpy(a) for n, a in zip(NAMES, start, strict=True)})
        received.content["config"]["clipping_norm"] = norm

        def train(sent: object, context: object) -> object:
            trained = {n: app.Array(a + m) for n, a, m in zip(NAMES, start, moved, strict=True)}
            answer = {"arrays": app.ArrayRecord(trained), "metrics": app.MetricRecord({"loss": 1.0})}
            return app.Message(app.RecordDict(answer), reply_to=sent)

        reply = mod(received, None, train)
        assert not reply.has_error(), reply.error
        arrays = reply.content.array_records["arrays"].to_numpy_ndarrays()
        update = {n: torch.from_numpy(a - b) for n, a, b in zip(NAMES, arrays, start, strict=True)}
        return update, dict(reply.content.metric_records["metrics"])

    return run


def ours(spec: str, moved: list[np.ndarray], data: DataSet, seed: int = 0) -> Tensors:
    function = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)))
    step = Step(data.task(function), function.state(), Batch(data.private.x[:1], data.private.y[:1]), generator(seed))
    return parse(spec).update({n: torch.from_numpy(m) for n, m in zip(NAMES, moved, strict=True)}, step)


@pytest.mark.parametrize("norm", [0.5, 3.0, 1e3])
@pytest.mark.parametrize("mod", ["fixedclipping_mod", "adaptiveclipping_mod"])
def test_both_clipping_mods_send_what_clip_sends(mod: str, norm: float, shapes: DataSet, through: Callable) -> None:
    moved = weights(1, 0.1)
    theirs, metrics = through(getattr(mods, mod), moved, norm)
    mine = ours(f"clip:norm={norm}", moved, shapes)
    for name in NAMES:
        assert torch.allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-12)
    # The bit that adaptive clipping sends says nothing that the length of the update does not say.
    if mod == "adaptiveclipping_mod":
        length = math.sqrt(sum(float((t**2).sum()) for t in mine.values()))
        assert metrics["norm_bit"] == (length == pytest.approx(norm, rel=1e-6))


def test_local_dp_clips_and_adds_the_noise_of_the_formula(shapes: DataSet, through: Callable) -> None:
    moved, settings = weights(1, 0.1), {"clipping_norm": 0.7, "sensitivity": 0.3, "epsilon": 4.0, "delta": 1e-4}
    spec = "flower-local:" + ",".join(f"{key}={value}" for key, value in settings.items())
    clipped = ours("clip:norm=0.7", moved, shapes)
    np.random.seed(3)
    theirs, _ = through(mods.LocalDpMod(**settings), moved, 1.0)
    # With Flower's own draws: the clipped update, and noise of our standard deviation.
    np.random.seed(3)
    for name, shape in zip(NAMES, SHAPES, strict=True):
        drawn = torch.from_numpy(np.random.normal(0, parse(spec).added_noise(1).std, shape))  # type: ignore[union-attr]
        assert torch.allclose(theirs[name], clipped[name] + drawn, rtol=1e-6, atol=1e-9)
    # With ours: the same size and no bias, over 50 draws of 630 entries.
    noise = torch.stack([ours(spec, moved, shapes, seed)[NAMES[0]] - clipped[NAMES[0]] for seed in range(50)])
    assert float(noise.std()) == pytest.approx(0.3 * math.sqrt(2 * math.log(1.25e4)) / 4, rel=0.02)
    assert abs(float(noise.mean())) < 4 * float(noise.std()) / math.sqrt(noise.numel())


def test_without_sensitivity_only_the_clip_is_left(shapes: DataSet, through: Callable) -> None:
    moved = weights(1, 0.1)
    mine, clipped = (ours(spec, moved, shapes) for spec in ("flower-local:sensitivity=0,clipping_norm=0.7", "clip:norm=0.7"))
    theirs, _ = through(mods.LocalDpMod(0.7, 0.0, 1.0, 1e-5), moved, 1.0)
    for name in NAMES:
        assert torch.equal(mine[name], clipped[name])
        assert torch.allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-12)
    assert parse("flower-local:sensitivity=0").added_noise(1) is None


@pytest.mark.parametrize(("start", "grows"), [(2.0, False), (8.0, True)])
def test_the_norm_of_flowers_adaptive_clipping_runs_away_from_its_quantile(start: float, grows: bool) -> None:
    """As the page on filters says: half of these updates are longer than 5, and the norm does not settle there."""
    strategies = pytest.importorskip("flwr.serverapp.strategy", reason="compares with Flower's own code")
    lengths = np.linspace(1, 9, 100)
    server = strategies.DifferentialPrivacyClientSideAdaptiveClipping(
        strategies.FedAvg(), noise_multiplier=0, num_sampled_clients=100, initial_clipping_norm=start
    )
    norms = [server.clipping_norm]
    for _ in range(40):
        clipped = float((lengths > server.clipping_norm).mean())
        server._geometric_update(server._noisy_fraction(round(100 * clipped), 100))
        assert server.clipping_norm == pytest.approx(norms[-1] * math.exp(-0.2 * (clipped - 0.5)))
        norms.append(server.clipping_norm)
    assert (norms[-1] > 9) if grows else (norms[-1] < 1)
