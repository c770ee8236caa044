"""The loss that clients train with: by name, or a user's own.

A loss is a function of (outputs, targets) that gives a single number. Targets are class numbers, or for losses such as
multi-label and regression ones one row of numbers per image.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.errors import UserError, one_line, shape_text, unknown
from gradveil.core.gradients import Loss, cross_entropy
from gradveil.core.hashing import short_hash, source_hash
from gradveil.core.settings import load_object

DEFAULT = "cross-entropy"


def multi_label(outputs: Tensor, targets: Tensor) -> Tensor:
    """Any number of labels per image: the mean binary cross entropy over labels."""
    return F.binary_cross_entropy_with_logits(outputs, targets)


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(outputs, targets)


NAMED: dict[str, Loss] = {DEFAULT: cross_entropy, "multi-label": multi_label, "regression": regression}


def find_loss(loss: str | Callable[..., Any]) -> Loss:
    """The loss that `loss` names (`pkg.mod:name` for a user's), is, or returns when it is called without arguments."""
    if not isinstance(loss, str):
        return _made(loss, getattr(loss, "__name__", type(loss).__name__))
    text = loss.strip()
    if text in NAMED:
        return NAMED[text]
    if ":" not in text:
        raise unknown("loss", text, NAMED, hint=f"There are: {', '.join(NAMED)}; your own is pkg.mod:factory.")
    return _made(load_object(text, kind="loss"), text)


def _made(candidate: Any, name: str) -> Loss:
    """`candidate` itself if it takes outputs and targets; what it returns if it needs no arguments (a class, a factory)."""
    if not callable(candidate):
        raise UserError(f"loss '{name}' is a {type(candidate).__name__}; give a function of (outputs, targets).")
    if not inspect.isclass(candidate) and _takes_any(candidate):
        return cast(Loss, candidate)
    try:
        made = candidate()
    except Exception as error:  # the user's own code: whatever it raises is the message
        raise UserError(f"loss '{name}' raised {type(error).__name__}: {one_line(error)}") from None
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


def loss_name(loss: str | Callable[..., Any]) -> str:
    """What stands for a loss in files: its text, or the name of the object and a hash of its source."""
    if isinstance(loss, str):
        return loss.strip()
    kind = loss if inspect.isroutine(loss) or inspect.isclass(loss) else type(loss)
    settings = "" if kind is loss else repr(loss)  # of a torch loss; a function's holds only its address
    return f"{kind.__name__}@{short_hash([source_hash(kind), settings])[:8]}"


def check_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not make one finite number of what the model and the data give it."""
    shapes = " and ".join(shape_text(t.shape) for t in (outputs, targets))
    try:
        value = loss(outputs, targets)
    except Exception as error:
        raise UserError(f"the loss does not take outputs and targets of {shapes}: {one_line(error)}") from None
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
