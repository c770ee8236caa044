"""Networks: those of the papers, by name; or a model of the user, as a module or as a function that returns one."""

import inspect
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.core.gradients import refuse_script
from gradveil.core.randomness import seeded
from gradveil.core.settings import load_object
from gradveil.core.types import Shape
from gradveil.models.base import MODELS, Network
from gradveil.models.vision import SOURCES, vision_model

__all__ = ["MODELS", "Network", "build"]

_IMPORT = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")


def build(spec: str | nn.Module | Callable[..., object], *, input_shape: Shape, num_classes: int, seed: int = 0) -> nn.Module:
    """The module that `spec` means, after it has returned one score per class for two test images.

    Args:
        spec: a registered name with settings, `timm:NAME`, `pkg.mod:object`, a module, or a function that returns a module. A
            module is returned as it is.
        input_shape: (C, H, W) of the images.
        seed: the weights depend on it alone; the global random stream of torch is left unchanged.

    Example:
        >>> build("resnet20:width=8", input_shape=(3, 32, 32), num_classes=10)
    """
    with seeded(seed, "model"):
        if isinstance(spec, str):
            model = _from_text(spec.strip(), input_shape, num_classes)
        else:
            name = getattr(spec, "__name__", type(spec).__name__)
            model = _from_object(spec, name, input_shape, num_classes)
        _check(model, input_shape, num_classes)
    return model


def parameter_shapes(text: str, *, input_shape: Shape, num_classes: int) -> dict[str, Tensor] | None:
    """Trainable parameters without values, so that they take no memory; None where the model is a user's own code."""
    if _IMPORT.fullmatch(text.strip()):
        return None
    with torch.device("meta"):
        model = MODELS.parse(text).build(input_shape, num_classes)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _from_text(text: str, input_shape: Shape, num_classes: int) -> nn.Module:
    imported = _IMPORT.fullmatch(text)
    source, _, name = text.partition(":")
    if source in SOURCES:
        return vision_model(source, name, input_shape, num_classes)
    if imported and imported["path"] not in MODELS:
        return _from_object(load_object(text, kind="model"), text, input_shape, num_classes)
    return MODELS.parse(text).build(input_shape, num_classes)


def _from_object(source: object, name: str, input_shape: Shape, num_classes: int) -> nn.Module:
    """A module as it is. A function is called, with the image shape and the number of classes if it takes them."""
    if isinstance(source, nn.Module):
        return source
    if not callable(source):
        raise UserError(f"model '{name}' is a {type(source).__name__}; give a module, or a function that returns one.")
    try:
        model = source(**_accepted(source, {"input_shape": input_shape, "num_classes": num_classes}))
    except (Exception, SystemExit) as error:  # code of the user may raise anything; the text is passed on
        raise UserError(f"model '{name}' raised {type(error).__name__}: {one_line(error)}") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"model '{name}' returned a {type(model).__name__}; it must return a torch module.")
    return model


def _accepted(function: Callable[..., object], arguments: dict[str, object]) -> dict[str, object]:
    """Those of the arguments that the function takes by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in may have no signature
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    by_name = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {key: value for key, value in arguments.items() if key in by_name}


def _check(model: nn.Module, input_shape: Shape, num_classes: int) -> None:
    """Run two images through the model, which is left as it was."""
    refuse_script(model)
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise UserError("the model has no trainable parameters, so there is no update to protect or attack.")
    for name, p in model.named_parameters():
        if p.is_meta:
            raise UserError(f"parameter '{name}' of the model is on the device 'meta', where tensors have no values.")
        if p.is_complex():
            raise UserError(f"parameter '{name}' of the model is complex; only real numbers are supported.")
    modes = {module: module.training for module in model.modules()}
    try:
        images = torch.full((2, *input_shape), 0.5, device=parameter.device, dtype=parameter.dtype)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # a forward pass may change them
        with torch.no_grad():
            output = functional_call(model.eval(), buffers, (images,))
    except (Exception, SystemExit) as error:  # a forward pass of the user may raise anything; the text is passed on
        raise UserError(f"the model does not take images of {shape_text(input_shape)}: {one_line(error)}") from None
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(output, Tensor):
        raise UserError(f"model's output is a {type(output).__name__}, the data has {num_classes} classes; return scores.")
    if not output.is_floating_point():
        raise UserError(f"model's output is {output.dtype}; return one score per class as floating-point numbers.")
    if output.shape != (2, num_classes):
        shape = shape_text(output.shape)
        raise UserError(f"model's output is {shape} for two images, the data has {num_classes} classes.")
