"""PRECODE: the bottleneck's algebra against torch's own, and that it fits into any network."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from gradveil.client import prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import TorchStream, torch_stream
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.defenses import parse
from gradveil.defenses.base import Setup
from gradveil.defenses.model.precode import VariationalBottleneck, bottlenecks
from gradveil.models import build

SHAPE = (1, 12, 12)


class Odd(nn.Module):
    """A user's network: the classifier is registered first and not called `fc`; another linear layer runs before it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 4)
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(3))
        self.squeeze = nn.Linear(27, 9)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.relu(self.squeeze(self.body(x).flatten(1)))))


def random_images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(n, *SHAPE, generator=rng), torch.randint(4, (n,), generator=rng)


@pytest.mark.parametrize(
    "name", ["smlp", "dmlp", "lenet", "convnet", "resnet20", "resnet20-4", "resnet18", "resnet34", "vgg16", "densenet121"]
)
def test_every_network_takes_it_before_its_classifier(name: str) -> None:
    plain = build(name, input_shape=(3, 32, 32), num_classes=7)
    guarded = parse("precode").model(plain, (3, 32, 32)).eval()
    assert list(bottlenecks(guarded)) == ["fc.bottleneck"]
    assert guarded(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    before, after = dict(plain.named_parameters()), dict(guarded.named_parameters())
    features = plain.get_parameter("fc.weight").shape[1]
    new = {k: tuple(v.shape) for k, v in after.items() if "bottleneck" in k}
    assert new == {
        "fc.bottleneck.encoder.weight": (512, features),
        "fc.bottleneck.encoder.bias": (512,),
        "fc.bottleneck.decoder.weight": (features, 256),
        "fc.bottleneck.decoder.bias": (features,),
    }
    kept = {k.replace("fc.layer", "fc"): v for k, v in after.items() if "bottleneck" not in k}
    assert list(kept) == list(before) and all(torch.equal(kept[k], before[k]) for k in before)
    assert list(after)[-2:] == ["fc.layer.weight", "fc.layer.bias"]  # the classifier stays last in an update


def test_a_users_classifier_is_found_and_the_module_left_alone() -> None:
    module = Odd()
    state = copy.deepcopy(module.state_dict())
    guarded = parse("precode:k=5").model(module, SHAPE)
    assert list(bottlenecks(guarded)) == ["head.bottleneck"]
    assert guarded.head.bottleneck.encoder.in_features == 9
    assert guarded.training and module.training
    assert isinstance(module.head, nn.Linear)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


def test_a_bare_linear_layer_is_a_network_too() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    assert list(bottlenecks(parse("precode").model(module, SHAPE))) == ["1.bottleneck"]


@pytest.mark.parametrize(("unit", "scale"), [("nats", 1.0), ("bits", 1 / math.log(2))])
def test_the_penalty_is_the_divergence_that_torch_computes(unit: str, scale: float) -> None:
    bottleneck = VariationalBottleneck(6, k=4, beta=0.3, unit=unit)  # type: ignore[arg-type]
    z = 3 * torch.randn(5, 6)
    bottleneck(z)
    mean, raw = bottleneck.encoder(z).chunk(2, dim=1)
    expected = kl_divergence(Normal(mean, F.softplus(raw)), Normal(0.0, 1.0)).sum(1).mean()
    assert torch.allclose(bottleneck.penalty(), 0.3 * scale * expected, rtol=1e-5)


def test_the_penalty_and_its_gradient_stay_finite_for_a_vanishing_spread() -> None:
    bottleneck = VariationalBottleneck(2, k=3)
    with torch.no_grad():
        bottleneck.encoder.weight.zero_()
        bottleneck.encoder.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -400.0, -15.0, 400.0]))
    bottleneck(torch.randn(4, 2))
    expected = 1e-3 * 0.5 * (-1 + 800 - 1 + 30 + 400**2 - 1 - 2 * math.log(400))
    penalty = bottleneck.penalty()
    assert penalty.item() == pytest.approx(expected, rel=1e-4)
    penalty.backward()
    assert bottleneck.encoder.bias.grad is not None and bottleneck.encoder.bias.grad.isfinite().all()


def test_the_draw_is_an_input_and_without_it_the_module_samples_also_at_inference() -> None:
    bottleneck = VariationalBottleneck(6, k=4).eval()
    z, draw = torch.randn(3, 6), torch.randn(3, 4)
    assert not torch.equal(bottleneck(z), bottleneck(z))
    assert "noise" not in bottleneck.state_dict()
    bottleneck.noise = draw
    mean, raw = bottleneck.encoder(z).chunk(2, dim=1)
    assert torch.allclose(bottleneck(z), bottleneck.decoder(mean + F.softplus(raw) * draw))
    rng = torch_stream(3)
    assert torch.equal(bottleneck.draw(7, rng), torch.randn(7, 4, generator=torch.Generator().manual_seed(3)))


def test_vmap_over_draws_agrees_with_one_at_a_time() -> None:
    f = ModelFunction(parse("precode:k=8").model(Odd(), SHAPE))
    x, y = random_images(6)
    noise = {k: v.unflatten(0, (3, 2)) for k, v in f.draw_noise(6, torch_stream(1)).items()}
    assert {k: tuple(v.shape) for k, v in noise.items()} == {"head.bottleneck.noise": (3, 2, 8)}
    x, y = x.unflatten(0, (3, 2)), y.unflatten(0, (3, 2))
    assert f.route(f.state(), x, y, noise) == "vmap"
    fast = f.gradients(f.state(), x, y, noise)
    for n in range(3):
        one = f.gradient(f.state(), x[n], y[n], {k: v[n] for k, v in noise.items()})
        assert all(torch.allclose(fast[k][n], one[k], rtol=1e-4, atol=1e-6) for k in one)


def test_several_placements_add_their_losses_and_feature_maps_keep_their_shape() -> None:
    guarded = parse("precode:k=8,placement=body.2/head").model(Odd(), SHAPE)
    assert list(bottlenecks(guarded)) == ["head.bottleneck", "body.2.bottleneck"]
    assert guarded.body[2].bottleneck.encoder.in_features == 3 * 10 * 10
    f = ModelFunction(guarded)
    x, y = random_images(3)
    noise = f.draw_noise(3, TorchStream())
    plain = F.cross_entropy(f(f.state(), x, noise), y)
    torch.func.functional_call(f.module, {**f.state(), **noise}, (x,))
    extra = sum(b.penalty() for b in bottlenecks(f.module).values())
    assert torch.allclose(f.loss(f.state(), x, y, noise), plain + extra)


def test_initialisation_follows_the_seed_alone() -> None:
    module, stream = Odd(), torch.get_rng_state()
    first, again, other = (parse(s).model(module, SHAPE) for s in ("precode", "precode", "precode:seed=1"))
    assert torch.equal(torch.get_rng_state(), stream)
    weights = [m.head.bottleneck.encoder.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_network_can_be_copied_after_a_forward_pass() -> None:
    guarded = parse("precode").model(Odd(), SHAPE)
    guarded(torch.rand(2, *SHAPE))
    twin = copy.deepcopy(guarded)
    with pytest.raises(RuntimeError, match="forward pass"):
        twin.head.bottleneck.penalty()


@pytest.mark.parametrize(
    ("spec", "module", "message"),
    [
        ("precode:placement=haed", Odd(), "did you mean 'head'"),
        ("precode", nn.Sequential(nn.Conv2d(1, 4, 12), nn.Flatten()), "no linear classifier"),
        ("precode:placement=body.9", Odd(), "no layer 'body.9'"),
    ],
)
def test_what_cannot_be_placed_is_said_in_one_line(spec: str, module: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(spec).model(module, SHAPE)


def test_a_client_draws_afresh_each_round_and_tells_the_judge() -> None:
    defense = parse("precode:k=8")
    f = ModelFunction(defense.model(Odd(), SHAPE))
    x, y = random_images(4)
    one = torch.ones(1)
    client = prepare_client(defense, LocalTraining(), Setup(Task(f, SHAPE, 4, 0 * one, one), f.state(), Batch(x, y)))
    (a, trace), (b, _), (c, _) = (client.round(f.state(), Batch(x, y), draw) for draw in (0, 1, 0))
    key = "head.bottleneck.encoder.weight"
    assert torch.equal(a.tensors[key], c.tensors[key]) and not torch.equal(a.tensors[key], b.tensors[key])
    expected = f.gradient(f.state(), x, y, {"head.bottleneck.noise": trace.secrets["head.bottleneck.noise"]})
    assert all(torch.equal(a.tensors[k], expected[k]) for k in expected)
    assert defense.random and defense.stages == ["model"]


def test_it_learns_in_a_plain_loop() -> None:
    x, _ = random_images(32)
    y = (x.mean((1, 2, 3)) > x.mean()).long()
    torch.manual_seed(0)
    model = parse("precode").model(nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 2)), SHAPE)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + sum(b.penalty() for b in bottlenecks(model).values())
        loss.backward()
        optimizer.step()
    assert (model(x).argmax(1) == y).float().mean() > 0.9
