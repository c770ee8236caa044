"""Hashes of tensors and of users' code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from gradveil.attacks.matching.ig import InvertingGradients
from gradveil.core.hashing import digest, short_hash, source_hash

FILES = {
    "clinic/__init__.py": "",
    "clinic/defense.py": "from . import tools\nfrom clinic.deep.steps import step\nimport numpy\n\n\n"
    "class Mine:\n    def run(self):\n        import clinic_late\n        return tools, step, clinic_late\n",
    "clinic/tools.py": "def scale():\n    return 2\n",
    "clinic/deep/__init__.py": "",
    "clinic/deep/steps.py": "from ..constants import FACTOR\n\n\ndef step():\n    return FACTOR\n",
    "clinic/constants.py": "FACTOR = 3\n",
    "clinic_late.py": "import json\n",
    "clinic/unrelated.py": "print('never imported')\n",
}


@pytest.fixture
def clinic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.startswith("clinic")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_users_code_covers_all_that_it_imports_and_nothing_else(clinic, name):
    module = importlib.import_module("clinic.defense")
    things = [module.Mine, module.Mine(), module.Mine.run, module.Mine().run, module, "clinic.defense:Mine"]
    before = [source_hash(thing) for thing in things]
    assert all(before)
    (clinic / name).write_text(FILES[name] + "EXTRA = 1\n")
    after = [source_hash(thing) for thing in things]
    assert [a != b for a, b in zip(after, before, strict=True)] == [name != "clinic/unrelated.py"] * len(things)
    assert "clinic_late" not in sys.modules, "looking for a file must not import it"


def test_a_copy_of_the_project_in_another_folder_is_the_same_code(clinic, tmp_path_factory, monkeypatch):
    first = source_hash(importlib.import_module("clinic.defense").Mine)
    elsewhere = tmp_path_factory.mktemp("copy")
    for name, text in FILES.items():
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text(text)
    monkeypatch.syspath_prepend(str(elsewhere))
    for name in [n for n in sys.modules if n.startswith("clinic")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("clinic.defense")
    assert Path(module.__file__).is_relative_to(elsewhere)
    assert source_hash(module.Mine) == first


def test_code_of_gradveil_and_torch_has_versions_instead():
    assert source_hash(InvertingGradients, InvertingGradients(), nn.Linear, nn.CrossEntropyLoss(), torch.relu, 3, None) == ""


def test_a_file_that_is_being_edited_counts_by_its_text(clinic):
    module = importlib.import_module("clinic.defense")
    before = source_hash(module.Mine)
    (clinic / "clinic/tools.py").write_text("def scale(:\n")
    assert source_hash(module.Mine) != before


SCRIPT = """
import gradveil as gv
from clinic import tools
SIZE = 3
def enlarge(x):
    return x * SIZE
class Net:
    def forward(self, images):
        return enlarge(tools.scale() * images)
def main():
    report = gv.audit(model=Net(), defenses=["clip"])
main()
"""


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (("SIZE = 3", "SIZE = 4"), True),
        (("x * SIZE", "x + SIZE"), True),
        (("tools.scale() * images", "images"), True),
        (('["clip"]', '["clip", "prune"]'), False),
        (("import gradveil as gv", "import gradveil as gv  # the tool"), False),
    ],
)
def test_of_a_script_only_what_the_model_uses_counts(clinic, monkeypatch, change, counts):
    main, net = ModuleType("__main__"), type("Net", (), {"__module__": "__main__"})
    main.__file__ = str(clinic / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    (clinic / "script.py").write_text(SCRIPT)
    before = source_hash(net)
    assert change[0] in SCRIPT
    (clinic / "script.py").write_text(SCRIPT.replace(*change))
    assert (source_hash(net) != before) == counts
    (clinic / "script.py").write_text(SCRIPT)
    (clinic / "clinic/tools.py").write_text("def scale():\n    return 5\n")
    assert source_hash(net) != before


def test_code_without_a_file_is_known_by_its_text_or_by_nothing_that_lasts(monkeypatch):
    def typed(text: str, filename: str) -> type:
        import linecache

        if filename != "<stdin>":
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        names: dict[str, object] = {"__name__": "no_such_module"}
        exec(compile(text, filename, "exec"), names)
        return names["Net"]

    text = "class Net:\n    def forward(self, x):\n        return x\n"
    cells = [typed(text, "<cell 1>"), typed(text, "<cell 2>"), typed(text.replace("x\n", "-x\n"), "<cell 3>")]
    one, same, other = map(source_hash, cells)
    assert one == same != other
    console = source_hash(typed(text, "<stdin>"))
    monkeypatch.setattr("gradveil.core.hashing._SESSION", "of another session")
    assert source_hash(typed(text, "<stdin>")) != console


def test_tensors_are_known_by_name_shape_type_and_values():
    x = torch.arange(6)
    hashes = [
        digest("", {"x": x}),
        digest("", {"y": x}),
        digest("", {"x": x.view(2, 3)}),
        digest("", {"x": x.int()}),
        digest("", {"x": x.flip(0)}),
        digest("a fact", {"x": x}),
        digest("", {"x": x, "y": torch.zeros(0)}),
        digest("", {"x": torch.tensor(0)}),
    ]
    assert len(set(hashes)) == len(hashes) and all(len(h) == 64 for h in hashes)
    assert digest("", {"x": x, "y": x}) == digest("", {"y": x, "x": x.clone()})
    strided = torch.arange(3).expand(2, 3)
    assert digest("", {"y": strided}) == digest("", {"y": strided.contiguous()})
    assert digest("", {"y": torch.zeros(1).long().expand(0)}) == digest("", {"y": torch.zeros(0).long()})
    assert short_hash({"b": 1, "a": [2]}) == short_hash({"a": [2], "b": 1}) != short_hash({"a": [2], "b": 2})
