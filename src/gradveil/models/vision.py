"""Networks of timm and torchvision by their names, where these packages are installed: `timm:vit_tiny_patch16_224`.

Weights are random; `--weights FILE` loads trained ones. Nothing is downloaded.
"""

import importlib
from collections.abc import Callable
from typing import cast

from torch import nn

from gradveil.core.errors import UserError, one_line
from gradveil.core.types import Shape

SOURCES = ("timm", "torchvision")


def vision_model(source: str, name: str, input_shape: Shape, num_classes: int) -> nn.Module:
    """The network of this name for images of the shape, which timm adapts to; torchvision's take three channels."""
    text = f"{source}:{name}"
    try:
        package = importlib.import_module("timm" if source == "timm" else "torchvision.models")
    except Exception as error:  # beside some builds of torch the import raises other errors than ImportError
        reason = one_line(error)
        raise UserError(
            f"model '{text}' needs {source} (the extra gradveil[vision]), which cannot be imported here ({reason})."
        ) from None
    try:
        if source == "timm":
            return cast(nn.Module, package.create_model(name, num_classes=num_classes, in_chans=input_shape[0]))
        build = cast(Callable[..., nn.Module], package.get_model)
        return build(name, weights=None, num_classes=num_classes)
    except Exception as error:  # both check names and settings themselves
        raise UserError(f"model '{text}': {one_line(error)}") from None
