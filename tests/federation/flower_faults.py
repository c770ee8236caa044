"""A client that goes wrong in another way every time it is asked; in a file of its own, as Ray's actors import it."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense
from gradveil.defenses.base import Step


@settings
class Moody(Defense):
    """Spoils its updates, in the order in which `faults` names how. What it did is counted in `folder`."""

    folder: str
    faults: tuple[str, ...]

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        turn = len(list(Path(self.folder).iterdir()))
        (Path(self.folder) / str(turn)).touch()
        name, how = next(iter(tensors)), self.faults[turn]
        if how == "raise":
            raise RuntimeError("out of\nmemory")
        if how == "exit":
            os._exit(1)
        if how == "slow":
            for _ in range(30):
                time.sleep(0.1)
        spoilt = {"nan": tensors[name] * math.nan, "shape": tensors[name][..., :1], "huge": tensors[name] * 1e12}
        return {**tensors, name: spoilt.get(how, tensors[name])}
