"""Every network that trains can be attacked: odd but common modules, and settings of PyTorch that must be restored."""

from __future__ import annotations

import copy
from collections.abc import Callable

import odd_modules
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradveil as gv
from gradveil.attacks import parse
from gradveil.attacks.registry import registry
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.kernels import _PLAIN, plain_kernels
from gradveil.core.observation import Observation
from gradveil.data import DataSet
from gradveil.defenses.data.loda import extractors

# The closed forms; a search by L-BFGS, one by signed steps, and one for the labels too.
SEARCHES = ("lbfgs-l2", "ig:restarts=1", "dlg:restarts=1")
VIT = odd_modules.build("transformer encoder")
STOCK = "transformer with a class token, a convolution and dropout"
FEW = ("linear", "rgap", *SEARCHES)


def assert_pictures_or_a_reason(attack: str, seen: list[Observation]) -> str | None:
    """Finite pictures, or one line that says why the attack does not apply."""
    name = attack.partition(":")[0]
    try:
        (answer,) = parse(attack)(seen)
    except UserError as error:
        text = str(error)
        assert f"attack '{name}'" in text
        assert "\n" not in text
        return text
    assert answer.failed is None, f"{attack}: {answer.failed}"
    assert torch.isfinite(answer.images).all()
    return None


@pytest.mark.usefixtures("hurried")
@pytest.mark.filterwarnings("ignore")  # some modules are out of date, which is why they are here
@pytest.mark.parametrize("net", odd_modules.NETS)
def test_every_odd_module_is_attacked(net: str, observe_victims: Callable, shapes: DataSet) -> None:
    module = odd_modules.build(net)
    before = copy.deepcopy(module.state_dict())
    seen, _ = observe_victims(data=shapes, model=module, victims=1)
    state = {n: t.clone() for n, t in seen[0].state.items()}
    reasons = {attack: assert_pictures_or_a_reason(attack, seen) for attack in FEW}
    expected = odd_modules.NO_SECOND_DERIVATIVE.get(net)
    for attack in SEARCHES:
        assert (reasons[attack] is None) if expected is None else (expected in str(reasons[attack]))
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items()), "the user's module was changed"
    assert all(torch.equal(t, state[n]) for n, t in seen[0].state.items()), "the server's state was changed"


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", registry.names())
def test_every_attack_takes_a_transformer(
    name: str, observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "STEPS", 3)
    seen, _ = observe_victims(data=shapes, model=VIT, victims=1, level="upper-bound")
    assert_pictures_or_a_reason(name, seen)


def test_the_gradient_of_compiled_and_checkpointed_modules_is_that_of_the_plain_ones() -> None:
    x, y = torch.rand(2, 2, 1, 12, 12), torch.tensor([[0, 1], [2, 0]])
    for odd in ("compiled", "compiled in place"):
        _assert_same_gradients(odd_modules.build(odd), _plain("compiled"), x, y)
    net = odd_modules.build("sequential checkpoint").net
    assert isinstance(net, nn.Module)
    _assert_same_gradients(odd_modules.build("sequential checkpoint"), net, x, y)


def _plain(name: str) -> nn.Module:
    module = odd_modules.build(name)._orig_mod
    assert isinstance(module, nn.Module)
    return module


def _assert_same_gradients(odd: nn.Module, plain: nn.Module, x: Tensor, y: Tensor) -> None:
    rows = []
    for function in (ModelFunction(odd), ModelFunction(plain)):
        for route in ("vmap", "loop"):
            rows.append(list(function.gradients(function.state(), x, y, route=route).values()))
        single = [function.gradient(function.state(), x[n], y[n]) for n in range(2)]
        rows.append([torch.stack([gradient[name] for gradient in single]) for name in single[0]])
    for other in rows[1:]:
        for one, two in zip(rows[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


# -- plain forms of kernels --------------------------------------------------------------------------------------------

PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hardsigmoid": lambda a, _: F.hardsigmoid(3 * a),
    "distances": torch.cdist,
    "distances by sums": lambda a, b: torch.cdist(a, b, p=1.0),
    "margin": lambda a, b: F.multi_margin_loss(a, b[:, 0].long()),
    "squared margin, weighed": lambda a, b: F.multi_margin_loss(
        a, b[:, 0].long(), p=2, margin=0.7, weight=torch.arange(1, 6).double(), reduction="sum"
    ),
    "margin per row": lambda a, b: F.multi_margin_loss(a, b[:, 0].long(), reduction="none"),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
    "causal attention": lambda a, b: F.scaled_dot_product_attention(
        a[None, None], b[None, None], b[None, None], is_causal=True, scale=0.3
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_form_has_the_values_and_slopes_of_its_kernel_and_a_second_derivative(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.rand(4, 5, generator=rng, dtype=torch.double) * 4 - 2 for _ in range(2))
    b = b.abs() if "margin" in name else b
    a.requires_grad_()
    kernel = PLAIN[name](a, b)
    with plain_kernels():
        plain = PLAIN[name](a, b)
    torch.testing.assert_close(plain, kernel)
    (expected,) = torch.autograd.grad((kernel**2).sum(), a, create_graph=True)
    (slope,) = torch.autograd.grad((plain**2).sum(), a, create_graph=True)
    torch.testing.assert_close(slope, expected)
    assert torch.autograd.grad((slope**2).sum(), a)[0].any()
    with pytest.raises(RuntimeError, match="is not implemented"):
        torch.autograd.grad((expected**2).sum(), a)


def test_every_replaced_function_has_such_a_test() -> None:
    assert {F.hardsigmoid, torch.cdist, F.multi_margin_loss} == set(_PLAIN)


def test_settings_of_pytorch_are_restored_also_after_an_error() -> None:
    def settings() -> list[object]:
        cuda, mha, again = torch.backends.cuda, torch.backends.mha, torch.utils.checkpoint
        sdp = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
        return [*sdp, mha.get_fastpath_enabled(), again.CheckpointFunction, again._checkpoint_without_reentrant_generator]

    before = settings()
    for value in (False, True):
        torch.backends.cuda.enable_math_sdp(value)
        expected = settings()
        with pytest.raises(ValueError, match="stop"), plain_kernels():
            assert settings() != expected
            raise ValueError("stop")
        assert settings() == expected
    assert settings() == before


def test_a_scripted_model_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="TorchScript module; give the torch.nn.Module that it was made from"):
        ModelFunction(torch.jit.trace(nn.Linear(2, 2), torch.rand(1, 2)))


# -- transformers ------------------------------------------------------------------------------------------------------


def test_a_stock_transformer_leaks_in_an_audit_also_with_its_dropout(shapes: DataSet) -> None:
    """Dropout is on at the clients, as in training: the adversary does not know which units it dropped."""
    data, net = (shapes.private.x, shapes.private.y), odd_modules.build(STOCK)
    frame = gv.audit(data, net, "none", ["swift"], victims=4, quiet=True).to_frame()
    assert list(frame.status) == ["ok"]
    assert list(frame.verdict) == ["leaks"]
    assert frame.identified_low[0] > 0.3
    assert frame.psnr_mean[0] > 60


def test_patches_are_told_exactly_and_a_noisy_update_says_that_they_are_not(
    observe_victims: Callable, best_psnr: Callable, shapes: DataSet
) -> None:
    for net in (STOCK, "transformer encoder"):
        seen, truth = observe_victims(data=shapes, model=odd_modules.build(net), victims=2)
        answers = parse("april")(seen)
        assert best_psnr(answers, truth).min() > 60
        assert max(answer.score for answer in answers) < 1e-5
    seen, truth = observe_victims(data=shapes, model=VIT, defense="gaussian:std=0.01", victims=2)
    answers = parse("april")(seen)
    assert best_psnr(answers, truth).max() < 40
    assert min(answer.score for answer in answers) > 1e-3


def test_patches_need_learned_positions_and_one_image(observe_victims: Callable, shapes: DataSet) -> None:
    for settings, reason in (
        ({"model": odd_modules.build("multi-head attention")}, "does not add learned positions to embedded patches"),
        ({"model": odd_modules.build("einsum")}, "does not add learned positions to embedded patches"),
        ({"model": VIT, "batch_size": 2}, "it reads the patches of a single image"),
    ):
        seen, _ = observe_victims(data=shapes, victims=1, **settings)
        with pytest.raises(UserError, match=reason):
            parse("april")(seen)


def test_fewer_features_than_patches_do_not_count_as_exact(observe_victims: Callable, shapes: DataSet) -> None:
    with torch.random.fork_rng(devices=[]):
        seen, _ = observe_victims(data=shapes, model=odd_modules.ViT(8), victims=1)
    assert parse("april")(seen)[0].score == 1
