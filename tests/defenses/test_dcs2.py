"""DCS²: Eq. 9 falls, Eq. 10 is what leaves, the projection never points away, and whom it protects."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Trace
from gradveil.core.randomness import TorchStream
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors, Update
from gradveil.defenses import Defense, parse
from gradveil.defenses.base import Setup
from gradveil.defenses.gradient import dcs2
from gradveil.defenses.gradient.dcs2 import DCS2, project

SHAPE = (1, 10, 10)
MEAN, STD = torch.tensor([0.4]), torch.tensor([0.5])


def smooth() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 4))
    for p in net.parameters():
        nn.init.uniform_(p, -0.5, 0.5)
    return net


def norms_and_dropout() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(64, 4))


def images(n: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(4, (n,), generator=rng))


PUBLIC = images(30, seed=9)


def client(
    defense: str | Defense,
    module: nn.Module | None = None,
    *,
    public: Batch | None = PUBLIC,
    mode: str = "eval",
    training: LocalTraining | None = None,
) -> Client:
    defense = parse(defense)
    f = ModelFunction(defense.model(module or smooth(), SHAPE), mode=mode)  # type: ignore[arg-type]
    return prepare_client(
        defense, training or LocalTraining(), Setup(Task(f, SHAPE, 4, MEAN, STD), f.state(), images(40), public)
    )


def send(c: Client, batch: Batch, draw: int = 0) -> tuple[Update, Trace]:
    return c.round(c.task.model.state(), batch, draw)


def normal(x: Tensor) -> Tensor:
    return (x - MEAN) / STD


def gradient(c: Client, x: Tensor, y: Tensor) -> Tensors:
    """By plain backward on the module itself."""
    module = c.task.model.module
    module.zero_grad()
    F.cross_entropy(module(normal(x)), y).backward()
    return {k: p.grad.clone() for k, p in module.named_parameters()}  # type: ignore[union-attr]


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def terms(c: Client, x: Tensor, y: Tensor, private: Batch) -> tuple[float, float, float]:
    """Gradient cosine, distance and relative shift of the output of one concealed sample."""
    likeness = torch.cosine_similarity(flat(gradient(c, x, y)), flat(gradient(c, private.x, private.y)), dim=0)
    out, there = c.task.model.module(normal(x)), c.task.model.module(normal(private.x))
    shift = (out - there).norm() / there.norm()
    return float(likeness), float((normal(x) - normal(private.x)).norm()), float(shift.detach())


# -- projection ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-4, 1e3), turn=st.floats(-1, 1), margin=st.sampled_from([0.0, 0.5]))
def test_the_projection_never_points_away_from_the_true_gradient(seed: int, scale: float, turn: float, margin: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (7,)}
    true = {k: scale * torch.randn(s, generator=rng) for k, s in shapes.items()}
    mixed = {k: turn * t + 0.1 * scale * torch.randn(t.shape, generator=rng) for k, t in true.items()}
    sent = project(mixed, true, margin)
    g, before, after = (flat(t).double() for t in (true, mixed, sent))
    assert {k: v.shape for k, v in sent.items()} == {k: v.shape for k, v in true.items()}
    assert g @ after >= -1e-5 * g.norm() * after.norm() - 1e-6 * g.norm() ** 2
    if g @ before >= 0:
        assert torch.equal(before, after)
    else:  # moved along g alone: to the plane ⟨g, ·⟩ = 0, the nearest point allowed, or by the margin if that is more
        moved = (after - before) @ g / (g @ g)
        assert torch.allclose(after - before, moved * g, atol=1e-4 * scale)
        assert moved == pytest.approx(max(margin, float(-(g @ before) / (g @ g))), rel=1e-3, abs=1e-5)


# -- crafting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["data", "noise", "mixup", "noise-mixup"])
def test_eq_9_falls_the_cosine_rises_and_the_concealed_sample_keeps_away(start: str) -> None:
    batch = images(1, seed=3)
    (_, first), (_, last) = (send(client(f"dcs2:start={start},steps={n}"), batch) for n in (0, 120))
    c = client("none")

    def eq9(trace: Trace) -> tuple[float, float, float]:
        likeness, distance, shift = terms(c, trace.secrets["dcs2.concealed"], trace.secrets["dcs2.concealed_labels"], batch)
        value = 1 - likeness + float(torch.exp(torch.tensor(-0.01 * distance))) + 0.01 * shift
        return value, likeness, distance

    (value0, likeness0, distance0), (value1, likeness1, distance1) = eq9(first), eq9(last)
    assert value1 < value0 - 0.1
    assert likeness1 > likeness0
    assert distance1 > max(distance0, 10)


def test_start_points_are_public_images_noise_or_a_mixture() -> None:
    batch = images(5, seed=3)
    found = {s: send(client(f"dcs2:start={s},steps=0"), batch)[1].secrets for s in ("data", "mixup", "noise")}
    x0, y0 = found["data"]["dcs2.concealed"], found["data"]["dcs2.concealed_labels"]
    place = [int((PUBLIC.x - x).abs().amax((1, 2, 3)).argmin()) for x in x0]
    assert torch.allclose(PUBLIC.x[place], x0, atol=1e-6) and torch.equal(PUBLIC.y[place], y0)
    assert torch.allclose(found["mixup"]["dcs2.concealed"], 0.7 * x0 + 0.3 * batch.x, atol=1e-6)
    noise = normal(found["noise"]["dcs2.concealed"])
    assert abs(float(noise.mean())) < 0.15 and float(noise.std()) == pytest.approx(1, abs=0.1)
    alone = send(client("dcs2:steps=0", public=None), batch)[1].secrets
    assert torch.equal(alone["dcs2.concealed"], found["noise"]["dcs2.concealed"])


def test_labels_of_another_task_are_replaced() -> None:
    foreign = Batch(PUBLIC.x, PUBLIC.y + 3)  # of four classes only label 3 is one of ours
    labels = send(client("dcs2:steps=0", public=foreign), images(16))[1].secrets["dcs2.concealed_labels"]
    assert labels.max() < 4 and len(labels.unique()) > 1


def test_each_sample_is_crafted_as_if_alone_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    c, batch = client("dcs2:steps=30,match=each"), images(3, seed=4)
    together = send(c, batch)[1].secrets
    x, y = together["dcs2.concealed"], together["dcs2.concealed_labels"]
    start = send(client("dcs2:steps=0"), batch)[1].secrets["dcs2.concealed"]
    step = c._step(c.task.model.state(), batch, TorchStream())
    defense = c.defense
    assert isinstance(defense, DCS2)
    for i in range(3):
        own = defense.craft(batch[i : i + 1], Batch(normal(start[i : i + 1]), y[i : i + 1]), step, {}, {})
        assert torch.allclose(own, normal(x[i : i + 1]), atol=1e-2)
    monkeypatch.setattr(dcs2, "_ENTRIES", 1)
    assert torch.allclose(send(c, batch)[1].secrets["dcs2.concealed"], x, atol=1e-2)
    joint = send(client("dcs2:steps=30"), batch)[1].secrets["dcs2.concealed"]
    assert (joint - x).abs().max() > 0.1


def test_joint_matching_follows_the_gradient_of_all() -> None:
    batch = images(4, seed=3)
    c = client("none")

    def likeness(steps: int) -> float:
        secrets = send(client(f"dcs2:steps={steps}"), batch)[1].secrets
        both = (gradient(c, secrets["dcs2.concealed"], secrets["dcs2.concealed_labels"]), gradient(c, batch.x, batch.y))
        return float(torch.cosine_similarity(*map(flat, both), dim=0))

    assert likeness(100) > likeness(0) + 0.05


def test_clamping_keeps_pixels_valid() -> None:
    batch = images(2)
    wild, tame = (send(client(s), batch)[1].secrets["dcs2.concealed"] for s in ("dcs2:steps=60", "dcs2:steps=60,clamp=true"))
    assert wild.min() < -0.5 and wild.max() > 1.5
    assert tame.min() >= -1e-6 and tame.max() <= 1 + 1e-6


def test_crafting_stops_at_the_threshold() -> None:
    batch = images(4)
    x = send(client("dcs2:steps=400,lr=0.1,enough=1,threshold=30,match=each"), batch)[1].secrets["dcs2.concealed"]
    distance = (normal(x) - normal(batch.x)).flatten(1).norm(dim=1)
    assert (distance > 29).all() and (distance < 30 + 0.1 * 10 * 2).all()  # a step of Adam moves a pixel by about lr


# -- the gradient that leaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize(
    ("spec", "share", "parts"), [("", 0.7, 1), (",divide=true", 0.7, 3), (",divide=true,lambda_g=1", 1, 2)]
)
def test_what_leaves_is_eq_10(n: int, spec: str, share: float, parts: int) -> None:
    c, batch = client(f"dcs2:steps=5{spec}"), images(n)
    update, trace = send(c, batch)
    x, y = trace.secrets["dcs2.concealed"], trace.secrets["dcs2.concealed_labels"]
    assert x.shape == batch.x.shape and trace.secrets["dcs2.lambda_g"] == pytest.approx(share)
    plain, own, other = (gradient(c, *pair) for pair in ((batch.x, batch.y), (x, y), (x, batch.y)))
    mixed = {k: (plain[k] + share * own[k] + (1 - share) * other[k]) / parts for k in plain}
    assert flat(plain) @ flat(mixed) > 0  # nothing to project here
    assert list(update.tensors) == list(plain)
    for k, g in update.tensors.items():
        assert g.shape == plain[k].shape and g.dtype == plain[k].dtype
        assert torch.allclose(g, mixed[k], rtol=1e-3, atol=1e-4)
    assert torch.equal(trace.fed.x, batch.x)


def test_a_gradient_that_would_point_away_is_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    c, batch = client("dcs2:steps=1"), images(2)
    plain = flat(gradient(c, batch.x, batch.y))
    true = c.task.model.gradient

    def reverse(
        state: Tensors, x: Tensor, y: Tensor, noise: Tensors | None = None, *, differentiable: bool = False, **_: bool
    ) -> Tensors:
        if differentiable:  # while samples are crafted
            return true(state, x, y, noise, differentiable=True)
        sign = 1 if torch.equal(x, normal(batch.x)) else -3
        return {k: sign * g for k, g in true(state, normal(batch.x), batch.y, noise).items()}

    monkeypatch.setattr(c.task.model, "gradient", reverse)
    sent = flat(send(c, batch)[0].tensors)
    assert abs(float(plain @ sent)) < 1e-4 * float(plain @ plain)


def test_two_draws_differ_and_one_draw_repeats() -> None:
    c, batch = client("dcs2:steps=3"), images(1)
    a, b, other = (flat(send(c, batch, draw)[0].tensors) for draw in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, other)
    assert c.defense.random


# -- whom it protects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sensitive", "expected"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("last:2", [3, 4]),
        ("last:9", [0, 1, 2, 3, 4]),
        ("0/3", [0, 3]),
        ([1, 4], [1, 4]),
        (torch.tensor([False, True, False, False, True]), [1, 4]),
        (lambda batch: batch.y == 2, None),
        (lambda batch: torch.zeros(len(batch), dtype=torch.bool), []),
    ],
)
def test_only_the_sensitive_samples_are_concealed(sensitive: object, expected: list[int] | None) -> None:
    batch = images(5)
    expected = (batch.y == 2).nonzero().flatten().tolist() if expected is None else expected
    c = client(DCS2(sensitive=sensitive, steps=2))  # type: ignore[arg-type]
    update, trace = send(c, batch)
    if not expected:
        assert torch.equal(flat(update.tensors), flat(gradient(c, batch.x, batch.y)))
        assert not trace.secrets
        return
    assert trace.secrets["dcs2.sensitive"].tolist() == expected
    x, y = trace.secrets["dcs2.concealed"], trace.secrets["dcs2.concealed_labels"]
    assert len(x) == len(expected)
    parts = ((batch.x, batch.y), (x, y), (x, batch.y[expected]))
    whole, own, other = (flat(gradient(c, *p)) for p in parts)
    assert torch.allclose(flat(update.tensors), whole + 0.7 * own + 0.3 * other, rtol=1e-3, atol=1e-4)


def test_masks_become_text_that_is_read_back() -> None:
    defense = DCS2(sensitive=torch.tensor([True, False, True]))  # type: ignore[arg-type]
    assert defense.spec == "dcs2:sensitive=0/2"
    assert parse(defense.spec) == defense
    assert parse("dcs2:sensitive=last:3,clamp=true+prune:ratio=0.7").spec == "dcs2:sensitive=last:3,clamp=true+prune:ratio=0.7"


@pytest.mark.parametrize("text", ["some", "last:0", "first:2", "1/x"])
def test_what_is_not_a_choice_of_samples_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="last:k"):
        parse(f"dcs2:sensitive={text}")


def test_a_position_beyond_the_batch_is_refused_rather_than_left_unprotected() -> None:
    with pytest.raises(UserError, match="outside this batch of 3"):
        send(client("dcs2:sensitive=5"), images(3))


def test_a_function_that_gives_no_mask_is_refused() -> None:
    with pytest.raises(UserError, match="3 booleans"):
        send(client(DCS2(sensitive=lambda batch: batch.y[:2] == 0)), images(3))


def test_public_images_of_another_shape_are_refused() -> None:
    with pytest.raises(UserError, match="public images"):
        client("dcs2", public=Batch(torch.rand(3, 3, 4, 4), torch.zeros(3, dtype=torch.long)))


# -- settings --------------------------------------------------------------------------------------------------------


def test_presets_are_the_scripts_and_can_be_overridden() -> None:
    batch = images(1)

    def concealed(spec: str) -> Tensor:
        return send(client(f"dcs2:steps=20,{spec}"), batch)[1].secrets["dcs2.concealed"]

    tiny = concealed("preset=tinyimagenet")
    assert torch.equal(tiny, concealed("lambda_x=0.001,lambda_z=0.01,threshold=400"))
    assert not torch.equal(tiny, concealed("preset=mnist"))


# -- company ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("match", ["joint", "each"])
def test_batch_norm_and_dropout(n: int, mode: str, match: str) -> None:
    c, batch = client(f"dcs2:steps=3,match={match}", norms_and_dropout(), mode=mode), images(n)
    update, trace = send(c, batch)
    assert all(g.isfinite().all() for g in update.tensors.values())
    assert trace.secrets["dcs2.concealed"].isfinite().all()


def test_pruning_after_it() -> None:
    c, batch = client("dcs2:steps=3+prune:ratio=0.7"), images(2)
    update, _ = send(c, batch)
    alone = send(client("dcs2:steps=3"), batch)[0]
    for k, g in update.tensors.items():
        kept = g != 0
        assert kept.sum() == max(1, g.numel() - int(0.7 * g.numel()))
        assert torch.equal(g[kept], alone.tensors[k][kept])
    assert c.defense.stages == ["gradient", "update"]


@pytest.mark.parametrize("match", ["joint", "each"])
def test_a_random_model_keeps_its_draw_while_crafting(match: str) -> None:
    c, batch = client(f"precode:k=6+dcs2:steps=4,match={match}"), images(3)
    update, again = send(c, batch)[0], send(c, batch)[0]
    assert torch.equal(flat(update.tensors), flat(again.tensors))
    assert "3.bottleneck.encoder.weight" in update.tensors


def test_local_steps_tell_all_their_secrets() -> None:
    training = LocalTraining(epochs=2, batch_size=2, lr=0.1)
    update, trace = send(client("dcs2:steps=2,sensitive=last:1", training=training), images(4))
    assert update.kind == "delta" and trace.secrets["dcs2.concealed"].shape == (4, *SHAPE)


def test_crafting_ends_where_the_cosine_is_enough() -> None:
    """With a batch the joint gradients are soon alike; nothing moves where they are alike enough already."""
    batch = images(6)
    start, few, more = (
        send(client(spec), batch)[1].secrets["dcs2.concealed"]
        for spec in ("dcs2:steps=0", "dcs2:steps=40,enough=0.0001", "dcs2:steps=40,enough=1")
    )
    moved = [(x - start).abs().max() for x in (few, more)]
    assert moved[0] < moved[1]


def test_what_is_sent_keeps_the_length_of_the_gradient() -> None:
    batch = images(3)
    plain, free, kept = (
        flat(send(client(spec), batch)[0].tensors) for spec in ("none", "dcs2:steps=5", "dcs2:steps=5,length=kept")
    )
    sizes = [float(gradient.norm()) for gradient in (plain, free, kept)]
    assert sizes[2] == pytest.approx(sizes[0], rel=1e-5) and sizes[1] != pytest.approx(sizes[0], rel=1e-2)
    assert float(torch.cosine_similarity(kept, free, dim=0)) == pytest.approx(1, abs=1e-5)


def test_starts_of_the_same_class_have_its_label() -> None:
    batch = images(5)
    secrets = send(client("dcs2:steps=0,start=same-class"), batch)[1].secrets
    assert torch.equal(secrets["dcs2.concealed_labels"], batch.hard_labels)
