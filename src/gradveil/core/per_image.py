"""The sum of the gradients of single images, each scaled down to a norm, at about the price of one plain gradient.

One forward and one backward pass over the batch tell, for every call of a layer, its inputs and the signal at its outputs
(Bu et al. 2023, book-keeping). They determine the gradient of each image in the layer's parameters, so its norm, and the
weighted sum; the gradients themselves are never in memory together, unless they are small. A parameter that is used in
another way than in one call of one layer (tokens, positions) becomes a copy per image if that is right, and its gradients
are computed image by image (`ModelFunction.gradients`) if not. Which of them is right is tried on made-up images and weights,
and tried again where a parameter matters that did not matter then. In every pass each parameter must have its one use: a second
one that weights or buffers hid from the trial is noticed.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradveil.core.gradients import ModelFunction
from gradveil.core.kernels import first_derivative
from gradveil.core.layer_calls import RULES, ImageGradients, Layout, Read, Rule, kept
from gradveil.core.losses import NAMED
from gradveil.core.randomness import torch_stream
from gradveil.core.types import Tensors

CHUNK = 1 << 26  # values of per-image gradients in memory at a time, where they are computed image by image
PROBES = 3  # made-up images
TOLERANCE = (1e-3, 1e-5)  # of a probe, relative to the gradient of a parameter, and to that of all
SHOWN = 1e-4  # of the gradient of all: a probe tells nothing about a parameter with less
MATTERS = 1e-3  # of the gradient of all: an image's norm depends on a parameter with more


@torch.no_grad()
def clipped_sum(
    model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors, clip: float
) -> tuple[Tensors, Tensor]:
    """The gradients of single images, scaled down to the norm `clip` and added up, and the factors that scaled them.

    An image whose gradient is not finite counts as zero, so that it changes nothing for the others. The forward pass changes
    the buffers of the state, such as counters, as it does in training.
    """
    total, squares = _sum(model, state, x, y, noise, clip)
    factors, usable = _factors(squares, clip), squares.isfinite()
    if not bool(usable.all()):
        draw = {name: values[usable] for name, values in noise.items()}
        total, factors[usable] = clipped_sum(model, state, x[usable], y[usable], draw, clip)
    return total, factors


def _sum(model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors, clip: float) -> tuple[Tensors, Tensor]:
    """The sum, and the squares of the norms."""
    plan = _plan(model, state, x, y, noise) if len(x) else _Plan()
    parts = _as_planned(model, plan, state, x, y, noise)
    if parts and _matter(parts, plan.fast - plan.shown):
        plan = _plan(model, state, x, y, noise, again=True)
        parts = _as_planned(model, plan, state, x, y, noise)
    if parts is None or _matter(parts, plan.fast - plan.shown):
        parts, plan = {}, _Plan(rest=model)
    elif not plan.fast and not model.couples_images and any(True for _ in model.module.buffers()):
        model.summed_loss(state, x, y, noise, once=True)  # for what it changes
    squares = _squares(parts.values(), x)
    total = {name: torch.zeros_like(p) for name, p in model.parameters(state).items() if name not in parts}
    for images, gradients in _image_by_image(plan.rest, state, x, y, noise) if plan.rest else ():
        rest = {name: kept(g) for name, g in gradients.items()}
        squares[images] += sum(part.squares for part in rest.values())
        for name, part in rest.items():
            total[name] += part.total(_factors(squares[images], clip))
    factors, weights = _factors(squares, clip), model.parameters(state)
    total |= {name: part.total(factors).view_as(weights[name]) for name, part in parts.items()}
    return {name: total[name] for name in weights}, squares


def _squares(parts: Iterable[ImageGradients], x: Tensor) -> Tensor:
    return sum((part.squares.double() for part in parts), torch.zeros(len(x), dtype=torch.double, device=x.device))


def _factors(squares: Tensor, clip: float) -> Tensor:
    return torch.where(squares.isfinite(), (clip / squares.sqrt().clamp_min(1e-12)).clamp_max(1.0), 0.0)


def _as_planned(
    model: ModelFunction, plan: "_Plan", state: Tensors, x: Tensor, y: Tensor, noise: Tensors
) -> dict[str, ImageGradients] | None:
    """What one pass tells; None where layers were called otherwise than planned: they depend on the images."""
    if not plan.fast:
        return {}
    try:
        parts, calls = _parts(model, plan, state, x, y, noise)
    except RuntimeError:  # a copy that does not fit; what is wrong with the model itself, single images will tell
        return None
    return parts if all(calls[name] == [plan.sizes[name]] for name in plan.reads | plan.turned) else None


def _matter(parts: dict[str, ImageGradients], names: frozenset[str]) -> bool:
    """Whether the norm of an image depends on one of these parameters."""
    squares = sum(part.squares.double() for part in parts.values())
    return any(bool((parts[name].squares > MATTERS**2 * squares).any()) for name in names & parts.keys())


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
    sizes: Mapping[str, float] = field(default_factory=dict)  # of that layer's outputs, per image
    shown: frozenset[str] = frozenset()  # those with gradients large enough to tell that the way is right

    @property
    def fast(self) -> frozenset[str]:
        return self.reads | self.turned | self.copies


def _parts(
    model: ModelFunction, plan: _Plan, state: Tensors, x: Tensor, y: Tensor, noise: Tensors
) -> tuple[dict[str, ImageGradients], dict[str, list[float]]]:
    """What one pass over the batch tells about planned parameters, and of each the sizes of outputs that it was used for."""
    parameters = model.parameters(state)
    fixed = {name: p.detach() for name, p in parameters.items()}
    copies = {name: _copied(fixed[name], len(x)).requires_grad_() for name in sorted(plan.copies)}
    calls = _Calls({id(fixed[name]): name for name in plan.reads | plan.turned}, plan, x)
    try:
        with torch.enable_grad(), first_derivative():
            with calls:
                mean = model.loss_fn in NAMED.values()  # another loss may weigh the images of a batch against each other
                value = model.summed_loss({**state, **fixed, **copies}, x, y, noise, once=True, mean=mean)
            ends = [calls.anchor, *copies.values()]
            _, *gradients = torch.autograd.grad(value, ends, allow_unused=True) if value.requires_grad else [None] * len(ends)
    finally:
        calls.end()
    copied = {name: _unused(fixed[name], x) if g is None else kept(g) for name, g in zip(copies, gradients, strict=True)}
    return calls.parts | copied, calls.sizes


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

    def __init__(self, names: dict[int, str], plan: _Plan, x: Tensor):
        super().__init__()
        self.names, self.plan, self.turned, self.images = names, plan, plan.turned, len(x)
        self.anchor = torch.zeros((), device=x.device, requires_grad=True)
        self.sizes = defaultdict[str, list[float]](list)  # of the outputs of each call, per image
        self.parts: dict[str, ImageGradients] = {}
        self.handles: list[RemovableHandle] = []

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
        for name in self._used((args, kwargs), outputs) - listened.keys():
            self.sizes[name].append(math.nan)  # by another function, which no rule covers
        if not listened or not isinstance(outputs, Tensor):
            return outputs
        size = outputs.numel() / self.images
        for name in listened:
            self.sizes[name].append(size)
        listened = {name: read for name, read in listened.items() if self.plan.sizes.get(name, size) == size}
        if not listened or not torch.is_grad_enabled():
            return outputs
        if not outputs.requires_grad:
            outputs = _anchored(outputs.clone() if outputs._is_view() else outputs, self.anchor)
        self.handles.append(outputs.register_hook(lambda signal: self._read(listened, signal)))
        return outputs

    def end(self) -> None:
        """Nothing refers to itself by way of hooks, graph and inputs any longer: memory is free at once."""
        for handle in self.handles:
            handle.remove()

    def _used(self, arguments: object, outputs: object) -> set[str]:
        """The listened parameters among the arguments of a function that makes a tensor of them."""
        used = {self.names[id(t)] for t in _tensors(arguments) if id(t) in self.names}
        return used if used and any(id(t) not in self.names for t in _tensors(outputs)) else set()

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


def _tensors(values: object) -> Iterator[Tensor]:
    """Those among arguments or results, in lists and dictionaries too."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


_ATTENTION = _inside(cast(FunctionType, F.multi_head_attention_forward))


# -- which way is right ------------------------------------------------------------------------------------------------

_plans: WeakKeyDictionary[ModelFunction, dict[tuple[torch.Size, torch.Size], _Plan]] = WeakKeyDictionary()


def _plan(model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors, *, again: bool = False) -> _Plan:
    """The fastest way that agrees with gradients of one image at a time."""
    plans = _plans.setdefault(model, {})
    key = (x.shape[1:], y.shape[1:])
    if key not in plans or again:
        plans[key] = _Plan(rest=model) if model.couples_images else _tried(model, state, x, y, noise)
    return plans[key]


def _tried(model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors) -> _Plan:
    rows = torch.arange(PROBES, device=x.device) % len(x)
    probe = _Probe(model.without_dropout, state, x[rows], y[rows], {name: draw[rows] for name, draw in noise.items()})
    names = frozenset(model.trainable)
    reads = probe.agreeing(_Plan(reads=names))
    turned = probe.agreeing(_Plan(turned=names - reads))
    others = names - reads - turned
    copies = probe.agreeing(_Plan(copies=others))
    if not copies:  # one that cannot be copied may have stopped the pass for all
        copies = frozenset(name for name in others if probe.agreeing(_Plan(copies=frozenset({name}))))
    rest = [name for name in model.trainable if name in others - copies]
    if len(rest) == len(names) or (rest and model.without_dropout is not model):  # one draw of dropout for all parameters
        return _Plan(rest=model)
    return _Plan(reads, turned, copies, model.restricted_to(rest) if rest else None, probe.sizes, probe.shown)


class _Probe:
    """Made-up images and weights, and the gradients of each image by itself."""

    def __init__(self, model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors):
        rng = torch_stream(0)
        self.model = model
        low, high = x.nan_to_num(0, 0, 0).aminmax()  # a network may treat other values in another way
        self.x, self.y, self.noise = low + (high - low) * rng.uniform(x.shape).to(x), y.detach(), noise
        # Weights away from where they are: zeros would let everything agree.
        moved = {name: p + _spread(p) * rng.normal(p.shape).to(p) for name, p in model.parameters(state).items()}
        self.state = {name: t.detach().clone() for name, t in {**state, **moved}.items()}
        self.alone = [self._alone(slice(i, i + 1)) for i in range(len(x))]
        self.norms = [{name: float(g.double().norm()) for name, g in alone.items()} for alone in self.alone]
        self.shown = frozenset(
            name for norms in self.norms for name in norms if norms[name] > SHOWN * math.hypot(*norms.values())
        )
        self.sizes: dict[str, float] = {}  # of the outputs of a layer, per image, by its parameters that agree

    def _alone(self, image: slice) -> Tensors:
        draw = {name: values[image] for name, values in self.noise.items()}
        return self.model.gradient(self.state, self.x[image], self.y[image], draw)

    def agreeing(self, plan: _Plan) -> frozenset[str]:
        """The planned parameters whose norms and sums are right."""
        if not plan.fast:
            return frozenset()
        state = {name: t.clone() for name, t in self.state.items()}
        try:
            parts, calls = _parts(self.model, plan, state, self.x, self.y, self.noise)
        except Exception:  # a copy that does not fit, a change in place: whatever the model does with its tensors
            return frozenset()
        agreeing = {n for n, part in parts.items() if (n in plan.copies or len(calls[n]) == 1) and self._agrees(n, part)}
        self.sizes |= {name: calls[name][0] for name in agreeing - plan.copies}
        return frozenset(agreeing)

    def _agrees(self, name: str, part: ImageGradients) -> bool:
        for i, (alone, norms) in enumerate(zip(self.alone, self.norms, strict=True)):
            size, allowed = norms[name], TOLERANCE[0] * norms[name] + TOLERANCE[1] * math.hypot(*norms.values())
            factors = (torch.arange(len(self.x), device=self.x.device) == i).double()
            error = float((part.total(factors).view_as(alone[name]) - alone[name]).norm())
            if not (error <= allowed and abs(float(part.squares[i]) ** 0.5 - size) <= allowed):
                return False
        return True


def _spread(parameter: Tensor) -> float:
    """As far as made-up weights are from the true ones."""
    return 0.1 if parameter.ndim < 2 else 0.5 / (parameter[0].numel() or 1) ** 0.5
