"""The Flower example says which data it uses, and takes no other in its place."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOWER = EXAMPLES / "flower-cifar"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The module `flower_cifar.task` where CIFAR-10 is not at hand."""
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    monkeypatch.setenv("FLOWER_CIFAR_DATA", "")
    monkeypatch.syspath_prepend(str(FLOWER))
    names = ("flower_cifar", "flower_cifar.task")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("flower_cifar.task")
    yield module
    for name in names:
        sys.modules.pop(name, None)


def test_without_cifar_it_stops_and_says_what_to_do(task) -> None:
    with pytest.raises(SystemExit) as ended:
        task.choose_data(None)
    line = str(ended.value)
    assert "CIFAR-10" in line and "GRADVEIL_DATA" in line and "--data mnist-5k" in line and "\n" not in line


def test_digits_are_used_only_on_request_and_named(task, capsys: pytest.CaptureFixture[str]) -> None:
    task.choose_data("mnist-5k")
    assert capsys.readouterr().out == f"data: mnist-5k, {len(task.dataset().private):,} private images\n"
    assert os.environ["FLOWER_CIFAR_DATA"] == "mnist-5k", "for the processes of the federation"
    assert task.network().conv1.in_channels == 1


@pytest.mark.parametrize("script", ["demo.py", "rank.py", "deploy.py"])
def test_every_script_stops_before_it_starts_anything(script: str, tmp_path: Path) -> None:
    if script == "deploy.py":
        pytest.importorskip("cryptography")
    environment = {name: value for name, value in os.environ.items() if name not in ("GRADVEIL_DATA", "FLOWER_CIFAR_DATA")}
    command = [sys.executable, str(FLOWER / script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("this example uses CIFAR-10") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_workflow_to_copy_names_its_data() -> None:
    text = (EXAMPLES / "ci" / "leakage.yml").read_text(encoding="utf-8")
    assert "--data mnist-5k" in text and "put your own data" in text
    assert yaml.safe_load(text)["jobs"]["audit"]
