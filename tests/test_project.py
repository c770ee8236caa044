"""The files around the source agree with each other: versions, the tested Python, and the commands of every check."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import gradveil

ROOT = Path(__file__).parents[1]
HOME = "https://github.com/gradveil/gradveil"
PYTHON = "3.11"  # the oldest


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project() -> dict[str, dict]:
    return tomllib.loads(text("pyproject.toml"))


def test_the_version_is_the_same_everywhere(project: dict) -> None:
    assert project["project"]["version"] == gradveil.__version__
    assert yaml.safe_load(text("CITATION.cff"))["version"] == gradveil.__version__
    newest = re.search(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert newest and newest[1] == gradveil.__version__


def test_the_python_that_is_required_is_the_one_that_is_tested(project: dict) -> None:
    assert project["project"]["requires-python"] == f">={PYTHON}"
    assert project["tool"]["mypy"]["python_version"] == PYTHON
    assert project["tool"]["ruff"]["target-version"] == "py" + PYTHON.replace(".", "")
    for workflow in (".github/workflows/ci.yml", "examples/ci/leakage.yml"):
        (job,) = yaml.safe_load(text(workflow))["jobs"].values()
        assert [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")] == [PYTHON]


def test_the_versions_of_python_that_are_named_were_tested(project: dict) -> None:
    """Those of the project's classifiers, of README and of the tutorial; each has a row in which every step went well."""
    section = text("docs/results/reliability.md").partition("## Python versions\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \|(.*)$", section, re.MULTILINE)
    passed = {version for version, steps in rows if "passed" in steps and "fail" not in steps and "not tried" not in steps}
    classifiers = " ".join(project["project"]["classifiers"])
    assert PYTHON in passed
    assert set(re.findall(r"Python :: (3\.\d+)", classifiers)) == passed
    for page in ("README.md", "docs/tutorial.md"):
        named = re.search(r"Python (3\.\d+(?:(?:, | or )3\.\d+)*)", text(page))
        assert named and set(re.findall(r"3\.\d+", named[1])) == passed, page


def test_mypy_is_strict_and_no_module_is_left_out(project: dict) -> None:
    mypy = project["tool"]["mypy"]
    assert mypy["strict"] is True and mypy["files"] == ["src"]
    weaker = {"warn_unused_ignores", "warn_return_any", "disallow_untyped_defs", "disallow_any_generics", "ignore_errors"}
    for table in (mypy, *mypy["overrides"]):
        assert not weaker & set(table)
    assert not [m for table in mypy["overrides"] for m in table["module"] if m.startswith("gradveil")]


def test_the_hosted_workflow_and_the_local_check_run_the_same_commands() -> None:
    (job,) = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"].values()
    hosted = [step["run"] for step in job["steps"] if "run" in step]
    local = re.findall(r"^make \w+", text(".ci/run"), re.MULTILINE)
    assert hosted == local == ["make lint", "make test"]


def test_commits_are_checked_by_the_tools_of_make_lint(project: dict) -> None:
    (repo,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert repo["repo"] == "local", "hooks from elsewhere would be downloaded"
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}
    hooks = [hook["entry"].removeprefix(".venv/bin/").split(" --")[0] for hook in repo["hooks"]]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", text("Makefile"), re.MULTILINE)
    assert lint and hooks == re.findall(r"\$\(BIN\)/([a-z ]+?)(?: --check)?(?: \.)?$", lint[1], re.MULTILINE)
    development = {re.split(r"[<>=\[]", name)[0] for name in project["project"]["optional-dependencies"]["dev"]}
    assert {hook.split()[0] for hook in hooks} <= development


def test_the_project_has_one_home(project: dict) -> None:
    assert project["project"]["urls"]["Homepage"] == HOME
    assert all(url.startswith(HOME) for url in project["project"]["urls"].values())
    assert yaml.safe_load(text("CITATION.cff"))["repository-code"] == HOME


def test_a_source_distribution_holds_what_its_tests_read(project: dict) -> None:
    included = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert {name.split("/")[0] for name in re.findall(r'text\("([^"]+)"\)', text("tests/test_project.py"))} <= {
        *included,
        "pyproject.toml",  # always in
    }
