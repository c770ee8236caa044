"""Gradveil: do the updates of federated training leak their images, and what stops it?

Names are imported when they are first used, so that `import gradveil` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gradveil.api import audit, compare, tune
    from gradveil.attacks.base import Attack
    from gradveil.attacks.registry import attack
    from gradveil.auditing.captured import attack_update
    from gradveil.core.errors import UserError
    from gradveil.core.local_training import LocalTraining
    from gradveil.core.observation import Knowledge, Observation
    from gradveil.core.types import Batch, Update
    from gradveil.defenses.base import Defense
    from gradveil.defenses.registry import defense
    from gradveil.protection import flower
    from gradveil.protection.audited import Protection
    from gradveil.protection.loop import protect
    from gradveil.protection.promise import certify
    from gradveil.report.audit_report import Report
    from gradveil.report.tune_report import TuneReport

_HOME = {
    "Attack": "gradveil.attacks.base",
    "Batch": "gradveil.core.types",
    "Defense": "gradveil.defenses.base",
    "Knowledge": "gradveil.core.observation",
    "LocalTraining": "gradveil.core.local_training",
    "Observation": "gradveil.core.observation",
    "Protection": "gradveil.protection.audited",
    "Report": "gradveil.report.audit_report",
    "TuneReport": "gradveil.report.tune_report",
    "Update": "gradveil.core.types",
    "UserError": "gradveil.core.errors",
    "attack": "gradveil.attacks.registry",
    "attack_update": "gradveil.auditing.captured",
    "audit": "gradveil.api",
    "certify": "gradveil.protection.promise",
    "compare": "gradveil.api",
    "defense": "gradveil.defenses.registry",
    "flower": "gradveil.protection.flower",
    "protect": "gradveil.protection.loop",
    "tune": "gradveil.api",
}

__all__ = [
    "Attack",
    "Batch",
    "Defense",
    "Knowledge",
    "LocalTraining",
    "Observation",
    "Protection",
    "Report",
    "TuneReport",
    "Update",
    "UserError",
    "__version__",
    "attack",
    "attack_update",
    "audit",
    "certify",
    "compare",
    "defense",
    "flower",
    "protect",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gradveil' has no attribute '{name}'")
    module = importlib.import_module(_HOME[name])
    return module if name == "flower" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
