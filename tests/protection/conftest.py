"""A client that trains as any PyTorch user would, its audit, and what was exported from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import plain_loop
import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil.auditing.case import Case
from gradveil.auditing.spec import make_spec
from gradveil.core.randomness import generator
from gradveil.core.results import GradientChange
from gradveil.core.types import Tensors
from gradveil.storage.run_folder import RunFolder

DEFENSES = ("clip:norm=0.05", "gaussian:std=0.0002", "mixup")
LOCAL = {"local_epochs": 2, "local_batch_size": 4, "local_lr": 0.01, "batch_size": 8}


@dataclass(frozen=True)
class AuditedClient:
    """A finished audit and the client that it speaks of."""

    case: Case
    folder: Path
    report: gv.Report

    def export(self, defense: str) -> gv.Protection:
        return self.report.export(defense, accept_leak=True)

    def changes(self, defense: str) -> tuple[GradientChange | None, ...]:
        """What the defense did in the audit, per victim."""
        cells = RunFolder(self.folder).cells.values()
        return next(c.changes for c in cells if (c.kind, c.defense) == ("observe", defense))

    def model(self) -> nn.Module:
        return copy.deepcopy(self.case.server)

    def trained(self, victim: int) -> Tensors:
        """All of the model after a round of a plain PyTorch loop on the images of a victim, in the audit's order."""
        batch, training = self.case.batch(victim), self.case.training
        steps = training.steps(len(batch), generator(self.case.spec.seed, "order", victim, 0))
        parts = [torch.arange(8)[part] for step in steps for part in step]
        orders = [torch.cat(parts[i : i + 2]) for i in (0, 2)]
        x = (batch.x - self.case.data.mean.view(-1, 1, 1)) / self.case.data.std.view(-1, 1, 1)
        return plain_loop.trained(self.case.server, x, batch.y, training, orders).state_dict()


def network() -> nn.Module:
    """With BatchNorm, and entries enough for noise to have nearly the same length in each draw."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        features = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*features, nn.Linear(800, 400), nn.ReLU(), nn.Linear(400, 4))


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AuditedClient]:
    """`audited(**settings)`: the audit of a client; each one is run once."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(120, 1, 12, 12, generator=random), torch.arange(120) % 4
    clients: dict[str, AuditedClient] = {}

    def run(**settings: object) -> AuditedClient:
        if (key := repr(sorted(settings.items()))) not in clients:
            values = {"data": (x, y), "model": network(), "defenses": DEFENSES, "attacks": "linear", "victims": 2, **settings}
            folder = tmp_path_factory.mktemp("audits") / "run"
            report = gv.audit(**values, out=folder, quiet=True)  # type: ignore[arg-type]
            clients[key] = AuditedClient(Case(make_spec(values)), folder, report)
        return clients[key]

    return run


@pytest.fixture(scope="session")
def local(audited: Callable[..., AuditedClient]) -> AuditedClient:
    """The audit of a client that sends weight differences after four local steps."""
    return audited(**LOCAL)


@pytest.fixture(scope="session")
def single(audited: Callable[..., AuditedClient]) -> AuditedClient:
    """The audit of a client that sends one gradient."""
    return audited(batch_size=8)
