"""Networks: those of the papers, by name; or a user's own, as a module or as what makes one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.core.settings import load_object
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network

__all__ = ["MODELS", "Name", "Network", "build", "names"]

_IMPORT = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")


class Name(NamedTuple):
    name: str
    description: str


def names() -> list[Name]:
    """Every registered network, with the first line of what its file says about it."""
    return [Name(network.name, (inspect.getdoc(network) or "").partition("\n")[0]) for network in MODELS]


def build(
    spec: str | nn.Module | Callable[..., Any], *, input_shape: Shape, num_classes: int, seed: int = 0
) -> nn.Module:
    """The module that `spec` names, makes or is, once it has answered a probe with one score for each class.

    Weights are drawn from `seed` alone, and the global random stream is left as it was. A module comes back as it is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator(seed, "model").initial_seed())
        if isinstance(spec, str):
            model = _from_text(spec.strip(), input_shape, num_classes)
        else:
            name = getattr(spec, "__name__", type(spec).__name__)
            model = _from_object(spec, name, input_shape, num_classes)
        _check(model, input_shape, num_classes)
    return model


def _from_text(text: str, input_shape: Shape, num_classes: int) -> nn.Module:
    own = _IMPORT.fullmatch(text)
    if own and own["path"] not in MODELS:
        return _from_object(load_object(text, kind="model"), text, input_shape, num_classes)
    return MODELS.parse(text).build(input_shape, num_classes)


def _from_object(made: Any, name: str, input_shape: Shape, num_classes: int) -> nn.Module:
    """A module as it is; anything else is called, with the image shape and number of classes if it takes them."""
    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        raise UserError(f"model '{name}' is a {type(made).__name__}; give a module, or a function that returns one.")
    try:
        model = made(**_accepted(made, {"input_shape": input_shape, "num_classes": num_classes}))
    except (Exception, SystemExit) as error:  # the user's own code: whatever it raises is the message
        raise UserError(f"model '{name}' raised {type(error).__name__}: {_one_line(error)}") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"model '{name}' returned a {type(model).__name__}; it must return a torch module.")
    return model


def _accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-ins have no signature to look at
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return offered
    by_name = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {key: value for key, value in offered.items() if key in by_name}


def _check(model: nn.Module, input_shape: Shape, num_classes: int) -> None:
    """Two images through the model, in evaluation mode so that no statistics change."""
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise UserError("the model has no trainable parameters, so there is no update to protect or attack.")
    for name, p in model.named_parameters():
        if p.is_meta:
            raise UserError(f"parameter '{name}' of the model is on the device 'meta', where tensors have no values.")
        if p.is_complex():
            raise UserError(
                f"parameter '{name}' of the model is complex; attacks and defenses know real numbers alone."
            )
    modes = {module: module.training for module in model.modules()}
    shape = "×".join(map(str, input_shape))
    try:
        with torch.no_grad():
            output = model.eval()(torch.full((2, *input_shape), 0.5, device=parameter.device, dtype=parameter.dtype))
    except (Exception, SystemExit) as error:  # whatever a user's forward pass raises is the message
        raise UserError(f"the model does not take images of {shape}: {_one_line(error)}") from None
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(output, Tensor):
        raise UserError(
            f"model's output is a {type(output).__name__}, the data has {num_classes} classes; return scores."
        )
    if not output.is_floating_point():
        raise UserError(f"model's output is {output.dtype}; return a score for each class as floating-point numbers.")
    if output.shape != (2, num_classes):
        found = "×".join(map(str, output.shape))
        raise UserError(f"model's output is {found} for two images, the data has {num_classes} classes.")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
