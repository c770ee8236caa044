"""Data sets of torchvision, by their class name, where torchvision is at hand. Nothing is downloaded."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from gradveil.core.errors import UserError, unknown
from gradveil.data.raw import Raw, one_line
from gradveil.data.readers.objects import read_object


def read_torchvision(name: str, root: Path) -> Raw:
    try:
        from torchvision import datasets
    except Exception as error:  # beside some builds of torch its import fails with more than ImportError
        raise UserError(
            f"'torchvision:{name}' needs torchvision, which cannot be imported here ({one_line(error)})."
        ) from None
    cls = getattr(datasets, name, None)
    if not inspect.isclass(cls):
        known = [n for n, value in vars(datasets).items() if inspect.isclass(value)]
        raise unknown("torchvision data set", name, known, hint="torchvision.datasets lists all.")
    make: Any = cls
    parameters = inspect.signature(make).parameters
    if "train" in parameters:
        parts: list[dict[str, Any]] = [{"train": True}, {"train": False}]
    elif "split" in parameters:
        parts = [{"split": "train"}, {"split": "test"}]
    else:
        parts = [{}]
    try:
        made = [make(root=str(root), **part) for part in parts]
    except Exception as error:  # torchvision's own checks: a missing file, an unknown part
        raise UserError(f"'torchvision:{name}' in {root}: {one_line(error)}") from None
    raws = [read_object(part, f"torchvision:{name}") for part in made]
    return Raw(raws[0].train, raws[1].train if len(raws) > 1 else None, raws[0].class_names)
