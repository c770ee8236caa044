"""Audits: plan (cells) → run (workers) → store (a folder) → verdict (summary.json).

`gradveil.audit` is both this package and the function: importing any file in here binds the package to that name,
so the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from gradveil.audit.api import audit

        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
