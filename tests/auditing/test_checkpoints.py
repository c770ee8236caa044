"""A search that was stopped goes on where it was, and comes to the same result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradveil.attacks import budget
from gradveil.attacks.matching import frozen
from gradveil.auditing.case import Case
from gradveil.auditing.cells import run_cell
from gradveil.auditing.limits import Limits
from gradveil.auditing.plan import Cell, make_plan
from gradveil.auditing.run import identity_of
from gradveil.auditing.spec import make_spec
from gradveil.storage import resumable
from gradveil.storage.run_folder import RunFolder

ATTACKS = (
    "ig:steps=60",
    "sgd-cosine:steps=60",
    "idlg:steps=60",
    "dlg:steps=40,restarts=2",
    "gradinversion:steps=60",
    "swift:adam_steps=60",
    "expectation:steps=60",
    "ggl:steps=200",
)


def small(attack: str, **settings: object) -> Case:
    torch.manual_seed(0)
    x, y = torch.rand(60, 1, 8, 8), torch.arange(60) % 3
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 8), nn.Sigmoid(), nn.Linear(8, 3)
    )
    defenses = {"defenses": ["gaussian:std=0.05"], "attacks": [attack]}
    return Case(make_spec({"data": (x, y), "model": model, "victims": 2, **defenses, **settings}))


class Halt:
    """Stops the search, as Ctrl-C does, at a share of all its reports."""

    def __init__(self, after: int):
        self.after, self.count = after, 0

    def __call__(self, done: int, total: int) -> None:
        self.count += 1
        if self.count == self.after:
            raise KeyboardInterrupt


def attack_cell(case: Case) -> list[Cell]:
    plan = make_plan(case)
    return [*plan.of("observe", "gaussian:std=0.05"), *plan.of("attack", "gaussian:std=0.05")]


def run(case: Case, path: Path, halts: list[Halt]) -> dict[str, torch.Tensor]:
    observe, attack = attack_cell(case)
    with RunFolder(path).opened(identity_of(case)) as folder:
        run_cell(observe, case, folder, lambda done, total: None)
        for halt in halts[:-1]:
            with pytest.raises(KeyboardInterrupt):
                run_cell(attack, case, folder, halt)
            assert case.spec.pictures == "none" or folder.checkpoint(attack.key).exists()
        stored = run_cell(attack, case, folder, halts[-1])
        assert stored.status == "ok", stored.error
        assert not folder.checkpoint(attack.key).exists()
        return folder.tensors(attack.key) | {"iterations": torch.tensor(stored.iterations or 0)}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_interrupted_search_ends_as_if_it_had_not_been(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, never = small(attack), Halt(-1)
    if attack.startswith("ggl"):  # its generator is trained once, with checkpoints of its own
        run(case, tmp_path / "first", [Halt(-1)])
    expected = run(case, tmp_path / "whole", [never])
    monkeypatch.setattr(resumable.Checkpoints.__init__, "__defaults__", (0.0,))  # after every step
    third = max(2, never.count // 3)
    halts = [Halt(third), Halt(third), Halt(-1)]
    resumed = run(case, tmp_path / "parts", halts)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert halts[-1].count < never.count  # it did not begin again


def test_the_route_of_large_nets_goes_on_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LARGE", 0.0)
    monkeypatch.setattr(frozen, "CHECK_EVERY", 7)
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    case, never = small("ig:steps=60,signed=true"), Halt(-1)
    expected = run(case, tmp_path / "whole", [never])
    monkeypatch.setattr(resumable.Checkpoints.__init__, "__defaults__", (0.0,))
    resumed = run(case, tmp_path / "parts", [Halt(20), Halt(-1)])
    assert torch.equal(expected["reconstruction"], resumed["reconstruction"])


def test_a_damaged_checkpoint_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small("ig:steps=30")
    expected = run(case, tmp_path / "whole", [Halt(-1)])
    monkeypatch.setattr(resumable.Checkpoints.__init__, "__defaults__", (0.0,))
    path = tmp_path / "parts"
    observe, attack = attack_cell(case)
    with RunFolder(path).opened(identity_of(case)) as folder:
        run_cell(observe, case, folder, lambda done, total: None)
        with pytest.raises(KeyboardInterrupt):
            run_cell(attack, case, folder, Halt(10))
        file = folder.checkpoint(attack.key)
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(bytes(content))
        run_cell(attack, case, folder, Halt(-1))
        assert torch.equal(folder.tensors(attack.key)["reconstruction"], expected["reconstruction"])


def test_without_pictures_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable.Checkpoints.__init__, "__defaults__", (0.0,))
    case = small("ig:steps=30", pictures="none")
    observe, attack = attack_cell(case)
    with RunFolder(tmp_path / "run").opened(identity_of(case)) as folder:
        run_cell(observe, case, folder, lambda done, total: None)
        with pytest.raises(KeyboardInterrupt):
            run_cell(attack, case, folder, Halt(10), Limits())
    assert not (tmp_path / "run" / "checkpoints").exists()
