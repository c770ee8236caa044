"""Data sets of torchvision, by their class name, where torchvision is installed. Nothing is downloaded."""

import inspect
from collections.abc import Callable
from pathlib import Path

from gradveil.core.errors import UserError, one_line, unknown
from gradveil.data.raw import Raw
from gradveil.data.readers.objects import read_object


def read_torchvision(name: str, root: Path) -> Raw:
    try:
        from torchvision import datasets
    except Exception as error:  # beside some builds of torch the import raises other errors than ImportError
        raise UserError(f"'torchvision:{name}' needs torchvision, which cannot be imported here ({one_line(error)}).") from None
    classes: dict[str, Callable[..., object]] = {n: v for n, v in vars(datasets).items() if inspect.isclass(v)}
    if name not in classes:
        raise unknown("torchvision data set", name, classes, hint="torchvision.datasets lists all.")
    parameters = inspect.signature(classes[name]).parameters
    parts: list[dict[str, bool | str]] = [{}]
    if "train" in parameters:
        parts = [{"train": True}, {"train": False}]
    elif "split" in parameters:
        parts = [{"split": "train"}, {"split": "test"}]
    try:
        sets = [classes[name](root=str(root), **part) for part in parts]
    except Exception as error:  # torchvision checks its files and parts itself
        raise UserError(f"'torchvision:{name}' in {root}: {one_line(error)}") from None
    raws = [read_object(part, f"torchvision:{name}") for part in sets]
    return Raw(raws[0].train, raws[1].train if len(raws) > 1 else None, raws[0].class_names)
