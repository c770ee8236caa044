"""docs/first-session.md is what benchmarks/record_session.py records now, and reads well in 80 columns."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "record_session.py"


def test_the_page_holds_the_commands_of_the_script_and_fits() -> None:
    spec = importlib.util.spec_from_file_location("record_session", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    blocks = re.findall(r"^```text\n\$ (.*?)^```$", script.PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(script.STEPS)
    for block, command in zip(blocks, script.STEPS.values(), strict=True):
        assert block.startswith(f"{command}\n")
        printed = block.removeprefix(command).splitlines()
        # Commands to be copied and lines of a log are whole.
        assert all(len(line) <= script.WIDTH for line in printed if not line.startswith(("  gradveil ", "[")))


def test_the_cards_and_lists_on_the_page_are_those_of_today(monkeypatch, capfd) -> None:
    from gradveil.cli import main

    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "first-session.md").read_text(encoding="utf-8")
    for words in (["show", "prune"], ["list", "defenses"]):
        main(words)
        shown = capfd.readouterr().out.splitlines()[:14]
        assert "\n".join(shown) in page, "run `python benchmarks/record_session.py`"
