"""Write docs/first-session.md: what a first session looks like in a terminal of 80 columns, as the commands print it.

`python benchmarks/record_session.py` runs them in an empty folder; it takes half a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "first-session.md"
WIDTH = 80
AUDIT = (
    "gradveil audit --model smlp --attack linear --defense prune:ratio=0.9 \\\n"
    "    --defense gaussian:std=1 --victims 8 --line-up 0 --out runs/first"
)
STEPS = {
    "What is there? Nothing is computed, so the answer comes at once.": "gradveil list defenses | head -n 14",
    "What is a method, and how is it set?": "gradveil show prune",
    "What would an audit do, and how long does it take?": f"{AUDIT} --plan",
    "The audit itself. A closed form reads the image off the update of a fully connected network.": AUDIT,
    "The same again: what is stored is not computed again.": f"{AUDIT} | tail -n 1",
}


def main() -> None:
    lines = ["# A first session", ""]
    lines += ["Recorded by `benchmarks/record_session.py` in 80 columns. Lines that begin with `$` were typed.", ""]
    with tempfile.TemporaryDirectory() as folder:
        for text, command in STEPS.items():
            lines += [text, "", "```text", *f"$ {command}".splitlines(), *output(command, Path(folder)), "```", ""]
    lines += ["The page `runs/first/report.html` says more. The [tutorial](tutorial.md) goes on from here.", ""]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def output(command: str, folder: Path) -> list[str]:
    """What the command prints, progress included, without the spaces at the ends of lines."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1"}
    command = f"{{ {command}\n}} 2>&1"  # progress too
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return [line.rstrip() for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
