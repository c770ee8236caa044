"""The loss that clients train with: by name, or a user's own.

A loss is a function of (outputs, targets) that gives a single number. Targets are class numbers, or for losses such as
multi-label and regression ones a row of numbers an image.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.errors import UserError, unknown
from gradveil.core.gradients import Loss, cross_entropy
from gradveil.core.settings import load_object

DEFAULT = "cross-entropy"


def multi_label(outputs: Tensor, targets: Tensor) -> Tensor:
    """Any number of labels an image: the mean binary cross entropy over labels."""
    return F.binary_cross_entropy_with_logits(outputs, targets)


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(outputs, targets)


NAMED: dict[str, Loss] = {DEFAULT: cross_entropy, "multi-label": multi_label, "regression": regression}


def find_loss(given: str | Callable[..., Any]) -> Loss:
    """The loss that `given` names (`pkg.mod:name` for one's own), is, or makes when it is called with nothing."""
    if not isinstance(given, str):
        return _made(given, getattr(given, "__name__", type(given).__name__))
    text = given.strip()
    if text in NAMED:
        return NAMED[text]
    if ":" not in text:
        raise unknown("loss", text, NAMED, hint=f"There are: {', '.join(NAMED)}; your own is pkg.mod:factory.")
    return _made(load_object(text, kind="loss"), text)


def _made(found: Any, name: str) -> Loss:
    """`found` itself if it takes outputs and targets; what it returns if it needs no arguments (a class, a factory)."""
    if not callable(found):
        raise UserError(f"loss '{name}' is a {type(found).__name__}; give a function of (outputs, targets).")
    if not inspect.isclass(found) and _takes_any(found):
        return cast(Loss, found)
    try:
        made = found()
    except Exception as error:  # the user's own code: whatever it raises is the message
        raise UserError(f"loss '{name}' raised {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not callable(made):
        raise UserError(f"loss '{name}' returned a {type(made).__name__}; give a function of (outputs, targets).")
    return cast(Loss, made)


def _takes_any(function: Callable[..., Any]) -> bool:
    """Whether it can be given arguments; a torch module says that it takes whatever comes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-ins have no signature to look at
        return True
    return any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters)


def loss_name(given: str | Callable[..., Any]) -> str:
    """What stands for a loss in files: its text, or the name of the object and a hash of its source."""
    if isinstance(given, str):
        return given.strip()
    kind = given if inspect.isroutine(given) or inspect.isclass(given) else type(given)
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # typed into a console: there is no file to read
        source = kind.__qualname__
    settings = "" if kind is given else repr(given)  # of a torch loss; a function's holds only its address
    return f"{kind.__name__}@{hashlib.sha256((source + settings).encode()).hexdigest()[:8]}"


def check_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not make one finite number of what the model and the data give it."""
    shapes = " and ".join("×".join(map(str, t.shape)) for t in (outputs, targets))
    try:
        value = loss(outputs, targets)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the loss does not take outputs and targets of {shapes}: {reason}") from None
    if not isinstance(value, Tensor) or value.numel() != 1 or not bool(torch.isfinite(value).all()):
        raise UserError(f"the loss does not make one finite number of outputs and targets of {shapes}.")


def takes_classes(loss: Loss, outputs: int) -> bool:
    """Whether the loss takes class numbers, of a model with so many outputs."""
    if outputs < 2:
        return False
    rows = outputs + 1  # so that class numbers do not fit the outputs by accident
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shapes that do not fit, which is what is asked here
            value = loss(torch.zeros(rows, outputs), torch.arange(rows) % outputs)
    except Exception:
        return False
    return isinstance(value, Tensor) and value.numel() == 1
