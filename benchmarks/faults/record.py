"""The page of what was injected and survived: each campaign writes its own section and leaves the others alone."""

from __future__ import annotations

import os
import platform
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "results" / "reliability.md"
HEAD = """# What it survives

Faults injected on purpose, and what became of them; where it was installed, and how soon it answers. Every section is written
by the script that it names.
"""
ORDER = ("Kills", "Bad input", "Defenses that misbehave", "Faults of 0.1.0", "Many machines", "Load", "Installation")
ORDER += ("Python versions", "Time to the first line")


def record(title: str, script: str, lines: list[str]) -> None:
    """Replace the section `title` of docs/results/reliability.md. `script` is in benchmarks/faults, or has its folder."""
    sections = _sections()
    path = script if "/" in script else f"benchmarks/faults/{script}"
    where = f"Python {platform.python_version()}, {os.cpu_count()} cores."
    sections[title] = "\n".join([f"Written by `{path}`. {where}", "", *lines]).rstrip() + "\n"
    titles = [t for t in ORDER if t in sections] + [t for t in sections if t not in ORDER]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(HEAD + "".join(f"\n## {t}\n\n{sections[t]}" for t in titles), encoding="utf-8")


def recorded(title: str) -> str:
    """The section as it is, or nothing."""
    return _sections().get(title, "")


def _sections() -> dict[str, str]:
    if not PAGE.exists():
        return {}
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    return {p.partition("\n")[0].strip(): p.partition("\n")[2].strip() + "\n" for p in parts}
