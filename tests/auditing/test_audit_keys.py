"""A cell's key covers the code that the cell depends on: what has changed is measured again, and nothing else."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from gradveil.attacks.matching.ig import InvertingGradients
from gradveil.auditing import case as cases
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.auditing.workers import prepare_cells
from gradveil.core.errors import UserError
from gradveil.defenses.base import Defense
from gradveil.defenses.update.clip import Clip
from gradveil.metrics import registry as metrics

FILES = {
    "__init__.py": "",
    "numbers.py": "FACTOR = 0.5\n",
    "tools.py": "from .numbers import FACTOR\n\n\ndef shrink(tensor):\n    return tensor * FACTOR\n",
    "unrelated.py": "FACTOR = 7\n",
    "defense.py": "from gradveil import Defense\nfrom ward.tools import shrink\n\n\n"
    "class Shrink(Defense):\n    def update(self, tensors, step):\n        return {n: shrink(t) for n, t in tensors.items()}\n",
    "net.py": "from torch import nn\nfrom ward import tools\n\n\nclass Net(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(144, 3)\n"
    "    def forward(self, x):\n        return self.fc(tools.shrink(x.flatten(1)))\n",
    "loss.py": "import torch.nn.functional as F\nfrom ward import tools\n\n\n"
    "def loss(outputs, targets):\n    return tools.shrink(F.cross_entropy(outputs, targets))\n",
    "data.py": "import torch\nfrom ward import tools\n\n\ndef data():\n"
    "    x = torch.arange(90 * 64).view(90, 1, 8, 8) / (90 * 64)\n    return tools.shrink(x), torch.arange(90) % 3\n",
}


def forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "ward"]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def ward(tmp_path, monkeypatch):
    folder = tmp_path / "ward"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changed twice in a second would be taken from there
    forget()
    yield folder
    forget()


def make(digits, **values) -> Case:
    return Case(make_spec({"data": digits, "defenses": "none", "attacks": "linear", "victims": 2, **values}))


def stored(folder: Path) -> dict[str, tuple[str, int]]:
    cells = {p: json.loads(p.read_text()) for p in (folder / "cells").iterdir()}
    return {p.name: (content["defense"], p.stat().st_ino) for p, content in cells.items()}


def test_a_changed_helper_of_a_users_defense_is_measured_again_and_an_unrelated_file_is_not(digits, tmp_path, ward):
    def distance() -> float:
        forget()
        case = make(digits, defenses=["ward.defense:Shrink"])
        summary = run_audit(case, Execution(out=tmp_path / "run", workers=0)).summary
        return summary.defenses[1].gradient.noise_ratio

    assert distance() == pytest.approx(0.5, abs=1e-5)
    before = stored(tmp_path / "run")
    (ward / "unrelated.py").write_text("FACTOR = 8\n")
    assert distance() == pytest.approx(0.5, abs=1e-5)
    assert stored(tmp_path / "run") == before
    (ward / "numbers.py").write_text("FACTOR = 0.25\n")
    assert distance() == pytest.approx(0.75, abs=1e-5)
    after = stored(tmp_path / "run")
    assert before.items() <= after.items()
    assert {defense for name, (defense, _) in after.items() if name not in before} == {"ward.defense:Shrink"}


@pytest.mark.parametrize("part", [{"model": "ward.net:Net"}, {"loss": "ward.loss:loss"}, {"data": "ward.data:data"}])
def test_a_changed_helper_of_a_users_model_loss_or_data_makes_another_case(digits, ward, part):
    def key(**objects) -> str:
        forget()
        return make(digits, **{**part, **objects}).id

    first = key()
    (ward / "unrelated.py").write_text("FACTOR = 8\n")
    assert key() == first
    (ward / "numbers.py").write_text("FACTOR = 0.25\n")
    assert key() != first


def test_objects_are_covered_like_texts(digits, ward):
    def key() -> str:
        forget()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = importlib.import_module("ward.net").Net()
        return make(digits, model=net, loss=importlib.import_module("ward.loss").loss).id

    first = key()
    assert key() == first
    (ward / "numbers.py").write_text("FACTOR = 0.25\n")
    assert key() != first


def test_attributes_of_a_plain_class_count(digits):
    class Plain(Defense):
        def __init__(self, factor: float, noise: torch.Tensor):
            self.factor, self.noise = factor, noise

    def keys(factor: float, noise: torch.Tensor) -> set[str]:
        return {cell.key for cell in make_plan(make(digits, defenses=[Plain(factor, noise)]))}

    noise = torch.linspace(0, 1, 5000)
    changed = noise.clone()
    changed[2500] = 7
    assert keys(1.0, noise) == keys(1.0, noise.clone())
    assert len({frozenset(keys(1.0, noise)), frozenset(keys(2.0, noise)), frozenset(keys(1.0, changed))}) == 3


def test_a_raised_version_changes_the_keys_of_what_depends_on_it_alone(digits, monkeypatch):
    def plan() -> set[tuple[str, str, str, str]]:
        case = make(digits, defenses=["clip"], attacks=["ig", "linear"], utility={"rounds": 1})
        return {(c.kind, c.defense, c.attack, c.key) for c in make_plan(case)}

    def changed() -> set[tuple[str, str, str]]:
        return {cell[:3] for cell in plan() - before}

    before = plan()
    everything = {cell[:3] for cell in before}
    with monkeypatch.context() as patch:
        patch.setattr(InvertingGradients, "version", InvertingGradients.version + 1)
        assert changed() == {cell for cell in everything if cell[2] == "ig"}
    with monkeypatch.context() as patch:
        patch.setattr(Clip, "version", Clip.version + 1)
        assert changed() == {cell for cell in everything if cell[1] == "clip"}
    with monkeypatch.context() as patch:
        patch.setitem(metrics._METRICS, "mse", metrics.Metric("mse", metrics._METRICS["mse"].measure, 99))
        assert changed() == {cell for cell in everything if cell[0] in ("attack", "baseline")}
    with monkeypatch.context() as patch:
        patch.setattr(cases, "PROTOCOL", cases.PROTOCOL + 1)
        assert changed() == everything
    assert plan() == before


def test_a_worker_whose_code_differs_refuses(digits, tmp_path, ward):
    case = make(digits, defenses=["ward.defense:Shrink"])
    cells = [cell.plain() for cell in make_plan(case) if cell.kind == "observe"]
    (ward / "numbers.py").write_text("FACTOR = 0.25\n")
    forget()
    perform = prepare_cells((case.spec.plain(), str(tmp_path / "run"), None, "cpu"))
    perform(cells[0], False, lambda done, total: None)
    with pytest.raises(UserError, match="code has changed since the audit began"):
        perform(cells[1], False, lambda done, total: None)
