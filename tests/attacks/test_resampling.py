"""An attacker who draws a random model's noise anew at every step, as the paper of PRECODE does, or keeps one draw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil import attacks, defenses
from gradveil.attacks.matching.rows import Rows
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Sighting, observe
from gradveil.core.task import Task
from gradveil.core.types import Batch
from gradveil.defenses.base import Setup


@pytest.mark.parametrize(
    ("text", "draws"),
    [
        ("ig:steps=6", 0),
        ("ig:steps=6,resample=true", 6),
        ("ig:paper=precode,steps=6", 6),
        ("ig:paper=precode,steps=6,resample=false", 0),
        ("cpl:optimizer=adam,steps=6,restarts=1", 6),
        ("cpl:steps=2,restarts=1", 0),
    ],
)
def test_who_draws_anew(text: str, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    real = Rows.redrawn

    def redrawn(rows: Rows, step: int) -> Rows:
        fresh = real(rows, step)
        drawn.update(tuple(noise.flatten().tolist()) for noise in fresh.noise.values())
        return fresh

    monkeypatch.setattr(Rows, "redrawn", redrawn)
    defense = defenses.parse("precode:k=4")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Sigmoid(), nn.Linear(8, 3))
    task = Task(ModelFunction(defense.model(plain, (1, 6, 6))), (1, 6, 6), 3, torch.zeros(1), torch.ones(1))
    batch, state = Batch(torch.rand(1, 1, 6, 6), torch.tensor([1])), task.model.state()
    update, trace = prepare_client(defense, LocalTraining(), Setup(task, state, batch)).round(state, batch, 0)
    (answer,) = attacks.parse(text)([observe(task, [Sighting(state, update)], level="paper", trace=trace)], seed=0)
    assert answer.images.isfinite().all() and len(drawn) == draws
