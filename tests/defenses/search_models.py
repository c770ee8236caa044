"""A model whose worker processes die at chosen candidates of a search, named in tests as `search_models:mortal`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from torch import nn

from gradveil.defenses.data.ats.defense import Policy, write_policy
from gradveil.defenses.data.ats.scores import Score
from gradveil.defenses.data.ats.search import Scorer
from gradveil.models import build


def mortal(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """`MORTAL` names a file with how each of these candidates ends its process; every death is noted beside it."""
    file = Path(os.environ["MORTAL"])
    ends = json.loads(file.read_text())
    score = Scorer.__call__

    def scored(self: Scorer, policy: Policy) -> Score:
        name = write_policy((policy,))
        deaths = file.with_name(f"{name}.deaths")
        before = deaths.read_text() if deaths.exists() else ""
        if name in ends and len(before.split()) < ends[name]["times"]:
            deaths.write_text(f"{before} {os.getpid()}")
            if ends[name]["how"] == "memory":
                raise MemoryError("no more")
            os.kill(os.getpid(), signal.SIGKILL)
        return score(self, policy)

    Scorer.__call__ = scored  # type: ignore[method-assign]
    return build("convnet:width=2", input_shape=input_shape, num_classes=num_classes)
