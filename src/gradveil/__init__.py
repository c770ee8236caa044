"""Gradveil: do the updates of federated training leak their images, and what stops it?

Names are imported when they are first used, so that `import gradveil` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradveil.attacks.base import Attack
    from gradveil.audit.api import audit
    from gradveil.captured import attack
    from gradveil.defenses.base import Defense
    from gradveil.defenses.registry import defense
    from gradveil.errors import UserError
    from gradveil.report.summary import Report
    from gradveil.shield import protect
    from gradveil.types import Batch, Knowledge, LocalTraining, Observation, Update

_HOME = {
    "Attack": "gradveil.attacks.base",
    "Batch": "gradveil.types",
    "Defense": "gradveil.defenses.base",
    "Knowledge": "gradveil.types",
    "LocalTraining": "gradveil.types",
    "Observation": "gradveil.types",
    "Report": "gradveil.report.summary",
    "Update": "gradveil.types",
    "UserError": "gradveil.errors",
    "attack": "gradveil.captured",
    "audit": "gradveil.audit.api",
    "defense": "gradveil.defenses.registry",
    "protect": "gradveil.shield",
}

__all__ = [
    "Attack",
    "Batch",
    "Defense",
    "Knowledge",
    "LocalTraining",
    "Observation",
    "Report",
    "Update",
    "UserError",
    "__version__",
    "attack",
    "audit",
    "defense",
    "protect",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gradveil' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
