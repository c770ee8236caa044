"""The sum of the gradients of single images, each scaled down to a norm, at about the price of one plain gradient.

One forward and one backward pass over the batch tell, for every call of a layer, its inputs and the signal at its outputs
(Bu et al. 2023, book-keeping). They determine the gradient of each image in the layer's parameters, so its norm, and the
weighted sum; the gradients themselves are never in memory together, unless they are small. A parameter that is used in
another way than in one call of one layer (tokens, positions) becomes a copy per image if that is right, and its gradients
are computed image by image (`ModelFunction.gradients`) if not. Which of them is right is tried on made-up images and weights.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradveil.core.gradients import ModelFunction
from gradveil.core.kernels import first_derivative
from gradveil.core.layer_calls import RULES, ImageGradients, Layout, Read, Rule, kept
from gradveil.core.randomness import torch_stream
from gradveil.core.types import Tensors

CHUNK = 1 << 26  # values of per-image gradients in memory at a time, where they are computed image by image
PROBES = 3  # made-up images
TOLERANCE = (1e-3, 1e-5)  # of a probe, relative to the gradient of a parameter, and to that of all


@torch.no_grad()
def clipped_sum(
    model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors, clip: float
) -> tuple[Tensors, Tensor]:
    """The gradients of single images, scaled down to the norm `clip` and added up, and the factors that scaled them.

    The forward pass changes the buffers of the state, such as counters, as it does in training.
    """
    plan = _plan(model, state, x, y, noise) if len(x) else _Plan()
    parts, uses = _parts(model, plan, state, x, y, noise) if plan.fast else ({}, Counter[str]())
    if any(uses[name] != 1 for name in plan.reads | plan.turned):  # a model whose layers depend on its inputs
        parts, plan = {}, _Plan(rest=model)
    elif not plan.fast and not model.couples_images and any(True for _ in model.module.buffers()):
        model.summed_loss(state, x, y, noise, once=True)  # for what it changes
    squares = sum((part.squares.double() for part in parts.values()), torch.zeros(len(x), dtype=torch.double, device=x.device))
    factors = torch.ones_like(squares)
    total = {name: torch.zeros_like(p) for name, p in model.parameters(state).items() if name not in parts}
    for images, gradients in _image_by_image(plan.rest, state, x, y, noise) if plan.rest else ():
        rest = {name: kept(g) for name, g in gradients.items()}
        squares[images] += sum(part.squares for part in rest.values())
        factors[images] = _factors(squares[images], clip)
        for name, part in rest.items():
            total[name] += part.total(factors[images])
    factors, weights = _factors(squares, clip), model.parameters(state)
    total |= {name: part.total(factors).view_as(weights[name]) for name, part in parts.items()}
    return {name: total[name] for name in weights}, factors


def _factors(squares: Tensor, clip: float) -> Tensor:
    return (clip / squares.sqrt().clamp_min(1e-12)).clamp_max(1.0)


def _image_by_image(
    model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors
) -> Iterator[tuple[slice, Tensors]]:
    """Gradients of single images along a first axis that is as long as memory allows."""
    chunk = max(1, CHUNK // sum(p.numel() for p in model.parameters(state).values()))
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        draw = {name: values[part, None] for name, values in noise.items()}
        yield part, model.gradients(state, x[part, None], y[part, None], draw)


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """How the gradients of each parameter are computed."""

    reads: frozenset[str] = frozenset()  # from the one call of a layer that uses the parameter
    turned: frozenset[str] = frozenset()  # likewise; the first rows of all images come first
    copies: frozenset[str] = frozenset()  # each image has a copy of its own
    rest: ModelFunction | None = None  # image by image
    mean: bool = True  # whether the loss is the mean over images

    @property
    def fast(self) -> frozenset[str]:
        return self.reads | self.turned | self.copies


def _parts(
    model: ModelFunction, plan: _Plan, state: Tensors, x: Tensor, y: Tensor, noise: Tensors
) -> tuple[dict[str, ImageGradients], Counter[str]]:
    """What one pass over the batch tells about planned parameters, and how many calls used each of them."""
    parameters = model.parameters(state)
    fixed = {name: p.detach() for name, p in parameters.items()}
    copies = {name: _copied(fixed[name], len(x)).requires_grad_() for name in sorted(plan.copies)}
    calls = _Calls({id(fixed[name]): name for name in plan.reads | plan.turned}, plan.turned, x)
    with torch.enable_grad(), first_derivative():
        with calls:
            value = model.summed_loss({**state, **fixed, **copies}, x, y, noise, once=True, mean=plan.mean)
        ends = [calls.anchor, *copies.values()]
        _, *gradients = torch.autograd.grad(value, ends, allow_unused=True) if value.requires_grad else [None] * len(ends)
    copied = {name: _unused(fixed[name], x) if g is None else kept(g) for name, g in zip(copies, gradients, strict=True)}
    return calls.parts | copied, calls.uses


def _unused(parameter: Tensor, x: Tensor) -> ImageGradients:
    return ImageGradients(torch.zeros(len(x), device=x.device), lambda _: torch.zeros_like(parameter))


def _copied(parameter: Tensor, images: int) -> Tensor:
    """A copy per image along the first axis: that of the parameter if it is one long, as of tokens, or a new one."""
    whole = parameter if parameter.ndim > 1 and len(parameter) == 1 else parameter[None]
    return whole.expand(images, *whole.shape[1:])


class _Anchor(torch.autograd.Function):
    """Lets signals flow back to a tensor that depends on no other: the backward pass ends at `anchor`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, outputs: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(outputs)  # not a view: later layers may change it in place
        return outputs

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *signal: Tensor) -> tuple[None, Tensor]:
        return None, signal[0].new_zeros(())


_anchored = cast(Callable[[Tensor, Tensor], Tensor], _Anchor.apply)


def _inside(function: FunctionType) -> Callable[..., object]:
    """A function of PyTorch that no longer hides from modes what it calls."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


class _Calls(TorchFunctionMode):
    """Listens to the calls of layers with parameters of these names, and in the backward pass to their signals."""

    def __init__(self, names: dict[int, str], turned: frozenset[str], x: Tensor):
        super().__init__()
        self.names, self.turned, self.images = names, turned, len(x)
        self.anchor = torch.zeros((), device=x.device, requires_grad=True)
        self.uses = Counter[str]()
        self.parts: dict[str, ImageGradients] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _ATTENTION(*args, **kwargs)
        outputs = func(*args, **kwargs)
        listened = self._listened(RULES[func], args, kwargs) if func in RULES else {}
        self.uses.update(listened.keys())
        if not listened or not isinstance(outputs, Tensor) or not torch.is_grad_enabled():
            return outputs
        if not outputs.requires_grad:
            outputs = _anchored(outputs.clone() if outputs._is_view() else outputs, self.anchor)
        outputs.register_hook(lambda signal: self._read(listened, signal))
        return outputs

    def _listened(self, rule: Rule, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Read]:
        reads: dict[str, Read] = {}
        for rows_first in (False, True) if self.turned else (False,):
            for parameter, read in rule(Layout(self.images, rows_first), *args, **kwargs):
                name = self.names.get(id(parameter))
                if name is not None and (name in self.turned) == rows_first:
                    reads[name] = read
        return reads

    def _read(self, listened: dict[str, Read], signal: Tensor) -> None:
        self.parts |= {name: read(signal) for name, read in listened.items()}
        listened.clear()  # and with it the inputs of the layer


_ATTENTION = _inside(cast(FunctionType, F.multi_head_attention_forward))


# -- which way is right ------------------------------------------------------------------------------------------------

_plans: WeakKeyDictionary[ModelFunction, dict[tuple[torch.Size, torch.Size], _Plan]] = WeakKeyDictionary()


def _plan(model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors) -> _Plan:
    """The fastest way that agrees with gradients of one image at a time."""
    plans = _plans.setdefault(model, {})
    key = (x.shape[1:], y.shape[1:])
    if key not in plans:
        plans[key] = _Plan(rest=model) if model.couples_images else _tried(model, state, x, y, noise)
    return plans[key]


def _tried(model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors) -> _Plan:
    rows = torch.arange(PROBES, device=x.device) % len(x)
    probe = _Probe(model.without_dropout, state, x[rows], y[rows], {name: draw[rows] for name, draw in noise.items()})
    names = frozenset(model.trainable)
    mean = bool(reads := probe.agreeing(_Plan(reads=names)))
    reads = reads or probe.agreeing(_Plan(reads=names, mean=False))
    turned = probe.agreeing(_Plan(turned=names - reads, mean=mean))
    others = names - reads - turned
    copies = probe.agreeing(_Plan(copies=others, mean=mean))
    if not copies:  # one that cannot be copied may have stopped the pass for all
        copies = frozenset(name for name in others if probe.agreeing(_Plan(copies=frozenset({name}), mean=mean)))
    rest = [name for name in model.trainable if name in others - copies]
    if len(rest) == len(names) or (rest and model.without_dropout is not model):  # one draw of dropout for all parameters
        return _Plan(rest=model)
    return _Plan(reads, turned, copies, model.restricted_to(rest) if rest else None, mean)


class _Probe:
    """Made-up images and weights, and the gradients of each image by itself."""

    def __init__(self, model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors):
        rng = torch_stream(0)
        self.model = model
        self.x, self.y, self.noise = rng.uniform(x.shape).to(x), y.detach(), noise
        # Weights away from where they are: zeros would let everything agree.
        moved = {name: p + _spread(p) * rng.normal(p.shape).to(p) for name, p in model.parameters(state).items()}
        self.state = {name: t.detach().clone() for name, t in {**state, **moved}.items()}
        self.alone = [self._alone(slice(i, i + 1)) for i in range(len(x))]

    def _alone(self, image: slice) -> Tensors:
        draw = {name: values[image] for name, values in self.noise.items()}
        return self.model.gradient(self.state, self.x[image], self.y[image], draw)

    def agreeing(self, plan: _Plan) -> frozenset[str]:
        """The planned parameters whose norms and sums are right."""
        if not plan.fast:
            return frozenset()
        state = {name: t.clone() for name, t in self.state.items()}
        try:
            parts, _ = _parts(self.model, plan, state, self.x, self.y, self.noise)
        except Exception:  # a copy that does not fit, a change in place: whatever the model does with its tensors
            return frozenset()
        return frozenset(name for name, part in parts.items() if self._agrees(name, part))

    def _agrees(self, name: str, part: ImageGradients) -> bool:
        for i, alone in enumerate(self.alone):
            size, whole = (sum(float(g.double().square().sum()) for g in gs) ** 0.5 for gs in ([alone[name]], alone.values()))
            allowed = TOLERANCE[0] * size + TOLERANCE[1] * whole
            factors = (torch.arange(len(self.x), device=self.x.device) == i).double()
            error = float((part.total(factors).view_as(alone[name]) - alone[name]).norm())
            if not (error <= allowed and abs(float(part.squares[i]) ** 0.5 - size) <= allowed):
                return False
        return True


def _spread(parameter: Tensor) -> float:
    """As far as made-up weights are from the true ones."""
    return 0.1 if parameter.ndim < 2 else 0.5 / (parameter[0].numel() or 1) ** 0.5
