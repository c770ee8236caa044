"""The walks of docs/architecture.md are what really runs: each function is called, in the order of the page."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gradveil as gv
from gradveil.cli import main

ROOT = Path(gv.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
BEFORE = 18  # files that a reader of an audit had to open in 0.1.0
Step = tuple[str, str]  # file and function
RECIPE = """
title: A table
common: {data: mnist-5k, model: lenet, victims: 2, knowledge: paper}
audits: {a: {}}
names: {IG: {cpu: "ig:steps=2", paper: ig}}
cell: {audit: a, attack: IG}
rows: {none: {defense: none}, pruned: {defense: "prune:ratio=0.9"}}
columns: {PSNR: {metric: psnr}}
published: {none: [50.0], pruned: [10.0]}
claims: [{text: pruning hides the image, order: [pruned | PSNR, none | PSNR]}]
"""


def steps(title: str) -> list[Step]:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [(file, function) for file, function in re.findall(r"^\d+\. `([^`]+)` `(\w+)`: \S", section, re.MULTILINE)]


def calls(work: Callable[[], object]) -> list[Step]:
    """Every call of a function of the package while `work` runs."""
    made: list[Step] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            made.append((str(Path(path).relative_to(ROOT)), frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return made


def first_missing(walk: list[Step], made: list[Step]) -> Step | None:
    """The first step that is not called after the steps before it."""
    remaining = iter(made)
    return next((step for step in walk if step not in remaining), None)


@pytest.fixture
def case() -> tuple[tuple[torch.Tensor, torch.Tensor], nn.Module]:
    x, y = torch.rand(60, 1, 12, 12), torch.arange(60) % 3
    return (x, y), nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 3))


def test_an_audit(case: tuple) -> None:
    made = calls(lambda: gv.audit(*case, ["prune:ratio=0.7"], ["linear"], victims=2, quiet=True))
    assert first_missing(steps("One audit"), made) is None


def test_a_protected_loop(case: tuple) -> None:
    (x, y), model = case
    made = calls(lambda: gv.protect(model, "prune:ratio=0.7", data=(x, y)).backward(x[:4], y[:4]))
    assert first_missing(steps("One protected loop"), made) is None


def test_a_captured_update(case: tuple, tmp_path: Path) -> None:
    (x, y), model = case
    nn.functional.cross_entropy(model(x[:1]), y[:1]).backward()
    save_file({name: p.grad for name, p in model.named_parameters()}, file := tmp_path / "update.safetensors")
    made = calls(lambda: gv.attack_update(file, model, (1, 12, 12), ["linear"]))
    assert first_missing(steps("One captured update"), made) is None


def test_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    words = ["reproduce", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "out"), "--workers", "0"]
    made = calls(lambda: main(words))
    assert first_missing(steps("One recipe"), made) is None


def test_every_walk_is_shorter_than_before() -> None:
    titles = [title for title in re.findall(r"^## (One .+)$", PAGE, re.MULTILINE)]
    assert titles == ["One audit", "One protected loop", "One captured update", "One recipe"]
    for title in titles:
        files = [file for file, _ in steps(title)]
        assert 4 < len(files) < BEFORE and len(files) == len(set(files))
        assert all((ROOT / file).is_file() for file in files)


def test_a_walk_in_another_order_is_noticed() -> None:
    made = [("a.py", "f"), ("b.py", "g"), ("c.py", "h")]
    assert first_missing([("a.py", "f"), ("c.py", "h")], made) is None
    assert first_missing([("c.py", "h"), ("a.py", "f")], made) == ("a.py", "f")
    assert first_missing([("a.py", "f"), ("b.py", "other")], made) == ("b.py", "other")
