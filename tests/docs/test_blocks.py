"""Every block of commands or Python in the README and the documentation is run, page by page, in an empty folder.

A block with a title is a file: it is written there, and a later block uses it. A comment before a block says what is
special about it, and is read here: `<!-- test: skip because … -->`, `<!-- test: needs MODULE -->`, `<!-- test: exit 1 -->`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradveil.cli import main

ROOT = Path(__file__).parents[2]
GENERATED = ("methods", "results")  # written by scripts, which run what they show
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.relative_to(ROOT / "docs").parts[0] not in GENERATED),
]
MOST_SKIPPED = 4
FENCE = re.compile(
    r"(?:^<!-- test: (?P<mark>.+?) -->\n+)?^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    where: str
    language: str
    text: str
    title: str = ""
    mark: str = ""

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "sh", "python")

    @property
    def skipped(self) -> bool:
        return self.mark.startswith("skip because ")

    @property
    def lacks(self) -> str | None:
        needed = self.mark.removeprefix("needs ") if self.mark.startswith("needs ") else None
        return needed if needed and importlib.util.find_spec(needed) is None else None

    @property
    def exit_code(self) -> int:
        return int(self.mark.removeprefix("exit ")) if self.mark.startswith("exit ") else 0


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text[: match.start("text")].count("\n")
        where = f"{page.relative_to(ROOT)}:{line}"
        yield Block(where, match["language"], match["text"], match["title"] or "", match["mark"] or "")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in; modules that the page writes there are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # Workers of their own would cost an import of torch each.
    monkeypatch.setattr(importlib.import_module("gradveil.auditing.run"), "cores", lambda: 0)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_all_blocks_of_a_page_run_in_their_order(page: Path, empty: Path) -> None:
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        if block.title:
            (empty / block.title).write_text(block.text, encoding="utf-8")
        elif not block.runs or block.skipped or block.lacks:
            continue
        elif block.language == "python":
            exec(compile(block.text, block.where, "exec"), names)
        else:
            for line in commands(block.text):
                assert run(line) == block.exit_code, f"{block.where}: {line}"


def commands(text: str) -> list[str]:
    lines = (re.sub(r"\s+#.*$", "", line).strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def run(line: str) -> int:
    """Our own command in this process, since importing torch again each time would take a minute; others by the shell."""
    words = shlex.split(line)
    if words[0] == "gradveil":
        return main(words[1:])
    python = f"{shlex.quote(sys.executable)}{line.removeprefix('python')}" if words[0] == "python" else line
    return subprocess.run(["bash", "-c", python], timeout=120, check=False).returncode


def test_few_blocks_are_left_out_and_each_with_its_reason() -> None:
    marked = [b for page in PAGES for b in blocks(page) if b.mark]
    assert not [b for b in marked if not (b.skipped or b.mark.startswith(("needs ", "exit ")))]
    skipped = [b.where for b in marked if b.skipped]
    assert len(skipped) <= MOST_SKIPPED, skipped
    ran = [b for page in PAGES for b in blocks(page) if b.runs and not b.skipped]
    assert len(ran) >= 25, "the blocks are found at all"


def test_no_fence_escapes_the_reader() -> None:
    for page in PAGES:
        fences = len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert fences == 2 * len(list(blocks(page))), page
