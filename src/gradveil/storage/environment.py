"""Where, when and on what a run was made."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from pydantic import AwareDatetime

from gradveil import __version__
from gradveil.core.results import Record, StorableText

_PACKAGES = ("torch", "numpy", "scipy", "safetensors", "pydantic", "pytorch-msssim")


class Environment(Record):
    """Where and on what a run was made."""

    case: str  # a hash of all that the results rest on
    data_sha256: str
    model_sha256: str
    seed: int
    gradveil: str
    python: str
    packages: dict[str, str]
    platform: StorableText
    cpus: int | None
    seconds: float = 0.0
    finished: AwareDatetime | None = None  # when the finding last changed, UTC

    @classmethod
    def here(cls, *, case: str, data_sha256: str, model_sha256: str, seed: int) -> Environment:
        """Of a run on this machine."""
        return cls(
            case=case,
            data_sha256=data_sha256,
            model_sha256=model_sha256,
            seed=seed,
            gradveil=__version__,
            python=platform.python_version(),
            packages={name: version(name) for name in _PACKAGES},
            platform=platform.platform(),
            cpus=os.cpu_count(),
        )
