"""The site builds without a warning, fetches nothing from elsewhere, and the workflow to copy names what exists."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gradveil.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="needs the packages of the extra docs",
)
def test_the_site_builds_strictly_and_stands_alone(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = list(site.rglob("*.html"))
    sources = [p for p in (ROOT / "docs").rglob("*.md")]
    assert len(pages) >= len(sources)
    fetched = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*(?:stylesheet|preload|icon)[^>]*href=\"?(?:https?:)?//"
    )
    for page in pages:
        assert not fetched.search(page.read_text(encoding="utf-8")), page
    reference = (site / "reference" / "index.html").read_text(encoding="utf-8")
    assert "Play the curious server" in reference, "docstrings are in"
    assert (site / "images" / "report.png").stat().st_size > 20_000
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert "how-to/everything-leaks.html" in {entry["location"] for entry in index["docs"]}, "search finds every page"


def test_the_site_is_served_on_loopback_alone() -> None:
    target = re.search(r"^docs-serve: docs\n\t(.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert target and "http.server --bind 127.0.0.1 --directory site" in target[1]


def test_the_start_page_leads_the_three_readers_on() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    parts = page.split("\n### ")[1:]
    assert [part.split()[1] for part in parts] == ["engineer", "researcher", "privacy"]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "how-to").glob("*.md")]
    assert all(len(re.findall(r"\]\([\w/.-]+\.md", part)) >= 4 for part in parts)
    # Pages of others may be new; most are reached from here.
    assert sum(f"]({name}" in page for name in pages) >= 11


def test_the_workflow_is_yaml_and_its_audit_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "leakage.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["audit"]["steps"]
    (command,) = [step["run"] for step in steps if "gradveil audit" in step.get("run", "")]
    words = shlex.split(command.replace("\\\n", " "))
    monkeypatch.chdir(tmp_path)
    assert main([*words[1:], "--plan"]) == 0
    assert "swift under prune:ratio=0.9" in capfd.readouterr().out
    kept = next(step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", ""))
    assert "tensors" not in kept and "junit.xml" in kept
