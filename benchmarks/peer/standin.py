"""What `breaching` imports from torchvision at its top level, as empty names.

The comparison uses none of its data sets or networks, and torchvision's wheel does not load beside every CPU build of
torch. Whoever calls one of these names gets an AttributeError, never a silent answer.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch import nn

NAMES: dict[str, dict[str, object]] = {
    "torchvision": {},
    "torchvision.datasets": {},
    "torchvision.datasets.utils": {"download_and_extract_archive": None},
    "torchvision.models": {},
    "torchvision.models.densenet": {"_DenseLayer": nn.Module},  # a base class of breaching's DenseNet
    "torchvision.transforms": {},
    "torchvision.utils": {},
}


def install() -> None:
    """Make `import torchvision` find the names above."""
    for path, names in NAMES.items():
        module = ModuleType(path)
        vars(module).update(names)
        sys.modules[path] = module
        parent, _, child = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
