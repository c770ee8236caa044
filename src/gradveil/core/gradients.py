"""Gradients of any torch module as a pure function, for many victims at once, differentiable for attacks.

`x` is N × B × C × H × W: N victims, each with a batch of B images. Two routes give the same numbers: `vmap(grad)` over
victims, and a loop over them for models that do not vmap. vmap is taken only after it has agreed with the loop on a probe.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from gradveil.core.errors import UserError, one_line
from gradveil.core.kernels import first_derivative, plain_kernels
from gradveil.core.local_training import LocalTraining, MiniBatch, Moments
from gradveil.core.randomness import Stream, torch_stream
from gradveil.core.types import Mode, Tensors

Loss = Callable[[Tensor, Tensor], Tensor]
Route = Literal["vmap", "loop"]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy; labels are class numbers or soft."""
    return F.cross_entropy(logits, y)


def copied(module: nn.Module) -> nn.Module:
    """A copy of the module. Half precision becomes single: attacks need the digits."""
    refuse_script(module)
    try:
        duplicate = copy.deepcopy(module)
    except Exception as error:  # a user's class may hold anything
        raise UserError(f"the model cannot be copied ({type(error).__name__}: {one_line(error)}).") from None
    half = any(p.dtype in (torch.half, torch.bfloat16) for p in duplicate.parameters())
    return duplicate.float() if half else duplicate


def refuse_script(module: nn.Module) -> None:
    """Say so where a module cannot be called with other weights than its own."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UserError("the model is a TorchScript module; give the torch.nn.Module that it was made from.")


class ModelFunction:
    """A module as a function of (state, images), in one mode, with the loss that both sides use.

    The module is copied; a state is a dictionary of its parameters and buffers. Random parts of a model take their noise
    through buffers (`noise`), so that a draw is an input like any other. A submodule may add to the loss by a method
    `penalty()`, the mean over the images of its last forward pass, given out once and then forgotten.
    """

    def __init__(self, module: nn.Module, loss: Loss = cross_entropy, mode: Mode = "eval"):
        self.loss_fn = loss
        self.mode: Mode = mode
        self.module = copied(module)
        if any(is_lazy(t) for t in (*self.module.parameters(), *self.module.buffers())):
            raise UserError("the model has layers without weights (lazy ones); call it on some images once before.")
        self.module.train(mode == "train")
        for part in self.module.modules():
            if getattr(part, "inplace", False):
                vars(part)["inplace"] = False  # a captured activation must not be overwritten
        self._tracked: dict[str, _BatchNorm] = {}  # the layers that move running statistics, by path
        self._statistics: Tensors = {}  # of these layers
        if mode == "train":
            norms = {f"{path}." if path else "": m for path, m in self.module.named_modules() if isinstance(m, _BatchNorm)}
            self._tracked = {path: m for path, m in norms.items() if m.running_mean is not None}
            self._statistics = {f"{path}{n}": t.clone() for path, m in self._tracked.items() for n, t in m.named_buffers()}
            replace_all_batch_norm_modules_(self.module)  # batch statistics, no running ones: pure
        self.trainable = [n for n, p in self.module.named_parameters() if p.requires_grad]
        if not self.trainable:
            raise UserError("the model has no trainable parameters, so there is no update to attack.")
        self._buffers = [n for n, _ in self.module.named_buffers()]
        self._is_double = all(p.dtype == torch.double for p in self.module.parameters())
        self._penalties = _penalties(self.module)
        self._routes: dict[tuple[torch.Size, bool], Route] = {}

    def drop_penalties(self) -> None:
        """Leave out what submodules add to the loss: for a network cut before them."""
        self._penalties = []

    @property
    def couples_images(self) -> bool:
        """Whether the gradient of an image depends on the other images of its batch."""
        return self.mode == "train" and any(isinstance(m, _BatchNorm) for m in self.module.modules())

    @property
    def momenta(self) -> dict[str, float | None]:
        """The momentum of every layer that moves running statistics, by its path, which ends with a dot."""
        return {path: layer.momentum for path, layer in self._tracked.items()}

    @cached_property
    def without_dropout(self) -> "ModelFunction":
        """The same function with nothing left to chance by dropout: an adversary does not know which units it dropped."""
        if self.mode == "eval" or not any(_drops(part) for part in self.module.modules()):
            return self
        duplicate = self.with_module(copy.deepcopy(self.module))
        for part in duplicate.module.modules():
            for name in _drops(part):
                vars(part)[name] = 0.0
        return duplicate

    def with_module(self, module: nn.Module) -> "ModelFunction":
        """The same function by another module with the same parameters and submodules."""
        duplicate = self._duplicate()
        duplicate.module = module
        duplicate._penalties = _penalties(module) if self._penalties else []
        return duplicate

    def restricted_to(self, names: list[str]) -> "ModelFunction":
        """The same function; its gradients are of these parameters alone."""
        duplicate = self._duplicate()
        duplicate.trainable = names
        return duplicate

    def _duplicate(self) -> "ModelFunction":
        duplicate = copy.copy(self)
        duplicate._routes = {}
        vars(duplicate).pop("without_dropout", None)  # that of the original
        return duplicate

    def uncoupled(self, state: Tensors, x: Tensor) -> tuple["ModelFunction", Tensors]:
        """The function and state with BatchNorm at the statistics of `x`: an image no longer depends on those beside it."""
        if not self.couples_images:
            return self, state
        with self.batch_moments() as moments, torch.no_grad():
            self(state, x, self.draw_noise(len(x), torch_stream(0)))
        duplicate, state = self.with_module(copy.deepcopy(self.module)), dict(state)
        for moment in moments:
            layer = duplicate.module.get_submodule(moment.path.removesuffix("."))
            for name, values in (("running_mean", moment.mean), ("running_var", moment.variance)):
                setattr(layer, name, values)
                state[f"{moment.path}{name}"] = values
            layer.eval()
        return duplicate, state

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> Tensors:
        """A detached copy of the module's parameters and buffers, running statistics included."""
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers()), **self._statistics}
        return {name: t.detach().clone() for name, t in named.items()}

    def parameters(self, state: Tensors) -> Tensors:
        """The part of a state that is trained, in the module's order: what an update speaks of."""
        return {name: state[name] for name in self.trainable}

    def draw_noise(self, images: int, rng: Stream) -> Tensors:
        """A draw for every random part of the model: a submodule with `draw(images, rng)` reads it from its buffer `noise`."""
        parts = [(path, m) for path, m in self.module.named_modules() if callable(getattr(m, "draw", None))]
        return {f"{path}.noise" if path else "noise": m.draw(images, rng) for path, m in parts}

    # -- one victim --------------------------------------------------------------------------------------------------

    def __call__(self, state: Tensors, x: Tensor, noise: Tensors | None = None) -> Tensor:
        with plain_kernels():
            output = self._forward(state, x, noise)
        for penalty in self._penalties:
            penalty()  # taken out, so that the module keeps nothing of the images
        return output

    def _forward(self, state: Tensors, x: Tensor, noise: Tensors | None, *, keep_buffers: bool = True) -> Tensor:
        tensors = {**state, **(noise or {})}
        if keep_buffers:  # a forward pass may change them in place
            tensors |= {n: tensors[n].clone() for n in self._buffers if n in tensors}
        dtype = torch.double if self._is_double else x.dtype
        output: Tensor = functional_call(self.module, tensors, (x if x.dtype == dtype else x.to(dtype),))
        return output if dtype == x.dtype else output.to(x.dtype)

    def loss(self, state: Tensors, x: Tensor, y: Tensor, noise: Tensors | None = None) -> Tensor:
        """The loss of one batch, which can be differentiated twice."""
        with plain_kernels():
            return self._loss(state, x, y, noise)

    def _loss(self, state: Tensors, x: Tensor, y: Tensor, noise: Tensors | None, *, keep_buffers: bool = True) -> Tensor:
        value = self.loss_fn(self._forward(state, x, noise, keep_buffers=keep_buffers), y)
        for penalty in self._penalties:
            value = value + penalty()
        return value

    def summed_loss(
        self, state: Tensors, x: Tensor, y: Tensor, noise: Tensors | None = None, *, once: bool = False, mean: bool = False
    ) -> Tensor:
        """The losses of single images, added up. With `mean`, the loss of a batch is trusted to be their mean: faster.

        It can be differentiated twice, or `once`; then the forward pass changes the buffers of the state, as in training.
        """
        with nullcontext() if once else plain_kernels():
            outputs = self._forward(state, x, noise, keep_buffers=not once)
            if mean:
                value = len(x) * self.loss_fn(outputs, y)
            else:
                value = vmap(lambda output, target: self.loss_fn(output[None], target[None]))(outputs, y).sum()
            for penalty in self._penalties:
                value = value + len(x) * penalty()
        return value

    def _one(self, parameters: Tensors, fixed: Tensors, x: Tensor, y: Tensor, noise: Tensors) -> Tensors:
        gradient: Tensors = grad(lambda p: self.loss({**fixed, **p}, x, y, noise))(parameters)
        return gradient

    def gradient(
        self,
        state: Tensors,
        x: Tensor,
        y: Tensor,
        noise: Tensors | None = None,
        *,
        differentiable: bool = False,
        keep_buffers: bool = True,
    ) -> Tensors:
        """The gradient of one batch, as an undefended client computes it; detached, or differentiable in `x` and `state`.

        Without `keep_buffers` the forward pass changes the buffers of the state, such as counters, as it does in training.
        """
        leaves = {
            k: v if differentiable and v.requires_grad else v.detach().requires_grad_()
            for k, v in self.parameters(state).items()
        }
        with torch.enable_grad(), nullcontext() if differentiable else first_derivative():
            tensors = {**state, **leaves}
            if differentiable:
                value = self.loss(tensors, x, y, noise)
            else:
                value = self._loss(tensors, x, y, noise, keep_buffers=keep_buffers)
            gradient = torch.autograd.grad(
                value, list(leaves.values()), create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
        return dict(zip(leaves, gradient, strict=True))

    @contextmanager
    def batch_moments(self) -> Iterator[list[Moments]]:
        """Collect what BatchNorm layers see in the forward passes inside the block, in their order."""
        seen: list[Moments] = []

        def record(path: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
            seen.append(Moments.of(path, self._tracked[path].momentum, inputs[0]))

        handles = [layer.register_forward_pre_hook(partial(record, path)) for path, layer in self._tracked.items()]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    # -- many victims ------------------------------------------------------------------------------------------------

    def gradients(
        self,
        state: Tensors,
        x: Tensor,
        y: Tensor,
        noise: Tensors | None = None,
        *,
        stacked: bool = False,
        route: Route | None = None,
    ) -> Tensors:
        """Gradients of N victims' batches, stacked along the first axis and differentiable in `x`, `y` and `state`.

        With `stacked`, the trainable tensors of `state` have a first axis of N (each victim its own weights).
        """
        route = route or self.route(state, x, y, noise, stacked=stacked)
        noise = noise or {}
        parameters = self.parameters(state)
        fixed = {k: v for k, v in state.items() if k not in parameters}
        dims = (0 if stacked else None, None, 0, 0, 0)
        if route == "vmap":
            return vmap(self._one, in_dims=dims, randomness="different")(parameters, fixed, x, y, noise)
        rows, differentiable = list[Tensors](), torch.is_grad_enabled()
        for n in range(len(x)):
            weights = {k: v[n] for k, v in parameters.items()} if stacked else parameters
            draw = {k: v[n] for k, v in noise.items()}
            rows.append(self.gradient({**fixed, **weights}, x[n], y[n], draw, differentiable=differentiable))
        return {name: torch.stack([row[name] for row in rows]) for name in parameters}

    def route(self, state: Tensors, x: Tensor, y: Tensor, noise: Tensors | None = None, *, stacked: bool = False) -> Route:
        """`vmap` if it runs on this model and agrees with one victim at a time on a probe of this shape."""
        key = (x.shape[1:], stacked)
        if key not in self._routes:
            self._routes[key] = "vmap" if self._vmap_agrees(state, x, y, noise or {}, stacked) else "loop"
        return self._routes[key]

    def _vmap_agrees(self, state: Tensors, x: Tensor, y: Tensor, noise: Tensors, stacked: bool) -> bool:
        pick = slice(0, 2)
        probe = torch.rand(x[pick].shape, generator=torch.Generator().manual_seed(0)).to(x)
        noise = {k: v[pick].detach() for k, v in noise.items()}
        small = {k: (v[pick] if stacked and k in self.trainable else v).detach() for k, v in state.items()}
        try:
            fast = self.gradients(small, probe, y[pick].detach(), noise, stacked=stacked, route="vmap")
        except Exception:  # data-dependent control flow, in-place changes: what vmap refuses
            return False
        if self.mode == "train" and any(isinstance(m, nn.modules.dropout._DropoutNd) for m in self.module.modules()):
            return True  # fresh draws differ from call to call, so there is nothing to compare
        slow = self.gradients(small, probe, y[pick].detach(), noise, stacked=stacked, route="loop")
        error = sum(((fast[k] - slow[k]) ** 2).sum() for k in slow)
        return bool(error <= 1e-6 * sum((g**2).sum() for g in slow.values()))

    # -- local training ----------------------------------------------------------------------------------------------

    def updates(self, state: Tensors, x: Tensor, y: Tensor, training: LocalTraining, noise: Tensors | None = None) -> Tensors:
        """What N victims would send after their local training on `x`: gradients, or weight deltas, differentiable."""
        if training.kind == "gradient":
            return self.gradients(state, x, y, noise)
        victims = len(x)
        start = {k: v.expand(victims, *v.shape) for k, v in self.parameters(state).items()}

        def gradient(parameters: Tensors, part: MiniBatch) -> Tensors:
            draw = {k: v[:, part] for k, v in (noise or {}).items()}
            return self.gradients({**state, **parameters}, x[:, part], y[:, part], draw, stacked=True)

        return training.difference(start, training.steps(x.shape[1]), gradient)


def _penalties(module: nn.Module) -> list[Callable[[], Tensor]]:
    """What submodules add to the loss."""
    methods = (getattr(part, "penalty", None) for part in module.modules())
    return [method for method in methods if callable(method)]


def _drops(part: nn.Module) -> list[str]:
    """The settings of a layer that say how much it drops, where that is more than nothing."""
    names = ["p"] if isinstance(part, nn.modules.dropout._DropoutNd) else ["dropout", "drop_prob"]
    return [name for name in names if isinstance(share := getattr(part, name, None), (int, float)) and share > 0]
