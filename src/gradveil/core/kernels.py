"""Kernels of PyTorch without a second derivative, replaced by their plain form while an attack computes.

The graph that a forward pass leaves decides what can be differentiated twice, so the replacement is made around forward
passes and losses only. Global settings are restored, and the user's module is not changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints

_SETTINGS: tuple[
    tuple[Callable[[], bool], Callable[[bool], object], bool], ...
] = (  # how to read and to write a setting, and the value under which attention takes its plain form
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
)
_MISSING = re.compile(r"derivative for '?(?:aten::)?_?(\w+?)(?:_backward)?'? is not implemented")


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Forward passes inside the block can be differentiated twice."""
    before = [read() for read, _, _ in _SETTINGS]
    for _, write, value in _SETTINGS:
        write(value)
    try:
        with ExitStack() as stack:
            stack.enter_context(_replaced("CheckpointFunction", SimpleNamespace(apply=lambda f, _, *inputs: f(*inputs))))
            stack.enter_context(_replaced("_checkpoint_without_reentrant_generator", _nothing_around))
            stack.enter_context(_PlainFunctions())
            stack.enter_context(_not_compiled())
            yield
    finally:
        for (_, write, _), value in zip(_SETTINGS, before, strict=True):
            write(value)


@contextmanager
def first_derivative() -> Iterator[None]:
    """Reentrant checkpoints inside the block work with `torch.autograd.grad`, and save memory as before."""

    def apply(function: Callable[..., object], preserve: bool, *inputs: object) -> object:
        return checkpoints.checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=preserve)

    with _replaced("CheckpointFunction", SimpleNamespace(apply=apply)), _not_compiled():
        yield


def missing_second_derivative(error: BaseException) -> str | None:
    """The kernel that `error` says cannot be differentiated twice, or None if it says something else."""
    match = _MISSING.search(str(error))
    return match and match[1]


def _not_compiled() -> AbstractContextManager[object]:
    """What `torch.compile` made runs as it is written. Without PyTorch's compiler in memory nothing is compiled."""
    loaded = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


@contextmanager
def _replaced(name: str, value: object) -> Iterator[None]:
    """Another object under this name in `torch.utils.checkpoint`."""
    before = getattr(checkpoints, name)
    setattr(checkpoints, name, value)
    try:
        yield
    finally:
        setattr(checkpoints, name, before)


def _nothing_around(*_: object, **__: object) -> Iterator[None]:
    """Instead of the generator that a checkpoint runs before and after its function: nothing is recomputed later."""
    yield


class _PlainFunctions(TorchFunctionMode):
    """Calls of a few functions become calls of their plain form."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(input + 3) / 6


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(x1[..., :, None, :] - x2[..., None, :, :], p, -1)
    return distances


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    true = F.one_hot(target, input.shape[-1]).to(input)
    missed = (margin - input.gather(-1, target[..., None]) + input).clamp_min(0) ** p * (1 - true)
    values = (missed if weight is None else missed * weight[target][..., None]).mean(-1)
    return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values


_PLAIN: dict[Callable[..., object], Callable[..., object]] = {
    F.hardsigmoid: _hardsigmoid,
    torch.cdist: _cdist,
    F.multi_margin_loss: _multi_margin_loss,
}
