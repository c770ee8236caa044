"""Every example of CONTRIBUTING.md, added as a file to a copy of the source and to no other file, works there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS: dict[str, str] = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', TEXT, re.MULTILINE | re.DOTALL))
KINDS = {"A defense": "defenses", "An attack": "attacks", "A metric": "metrics", "A data reader": "data", "A model": "models"}
TESTS = [title for title in BLOCKS if title.startswith("tests/")]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with the files of the page in it."""
    root = tmp_path_factory.mktemp("contributed")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for title, text in BLOCKS.items():
        path = root / title
        assert not path.exists(), f"{title} is a file of the project already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def outcomes(copy: Path) -> dict[str, list[str]]:
    """By test file: what went wrong in each of its tests, empty where it passed."""
    names = sorted(TESTS)
    done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=results.xml", *names)
    assert (copy / "results.xml").is_file(), done.stdout + done.stderr
    results: dict[str, list[str]] = {name: [] for name in names}
    for case in ElementTree.parse(copy / "results.xml").iter("testcase"):
        name = case.get("classname", "").replace(".", "/") + ".py"
        results[name].append("".join(f"{part.get('message')}\n{part.text}" for part in case))
    return results


@pytest.mark.parametrize("title", TESTS)
def test_the_tests_of_an_example_pass_beside_it(outcomes: dict[str, list[str]], title: str) -> None:
    assert outcomes[title], "the file holds tests"
    assert not "".join(outcomes[title]), "".join(outcomes[title])


def test_the_examples_keep_the_style(copy: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", copy)
    done = run(copy, "-m", "ruff", "check", *BLOCKS)
    assert done.returncode == 0, done.stdout
    done = run(copy, "-m", "ruff", "format", "--check", *BLOCKS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("heading", KINDS)
def test_each_kind_is_shown_as_one_file_and_its_test(heading: str) -> None:
    section = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section
    titles = re.findall(r'^```python title="([^"]+)"', section[1], re.MULTILINE)
    assert [title.split("/")[0] for title in titles] == ["src", "tests"]
    assert titles[0].startswith(f"src/gradveil/{KINDS[heading]}/")
