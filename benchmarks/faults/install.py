"""Wheel and source distribution in empty environments, run away from the source tree.

    python benchmarks/faults/install.py [python3.10 python3.12 …]

For every Python that is given (this one, if none) and for both distributions: a new environment, an installation, and
`gradveil audit` in an empty folder. constraints.txt is for this Python; others get the newest of what they can have.
Writes docs/results/reliability.md.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

ROOT = Path(__file__).parents[2]
AUDIT = ["audit", "--attack", "linear", "--defense", "none", "--victims", "2", "--out", "run", "--quiet"]


def run(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [str(w) for w in words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800, **more)  # type: ignore[call-overload,no-any-return]


def checked(*words: object, **more: object) -> str:
    done = run(*words, **more)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def tried(python: str, version: str, distribution: Path, folder: Path) -> str:
    """`works`, or the last line of what went wrong."""
    same = version.split(".")[:2] == platform.python_version().split(".")[:2]
    pip = [folder / "env" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    pip += ["-c", ROOT / "constraints.txt"] if same else []
    checked(python, "-m", "venv", folder / "env")
    for words in ([*pip, "torch==2.13.0"], [*pip, distribution]):
        done = run(*words)
        if done.returncode:
            return "cannot be installed: " + (done.stderr.strip().splitlines() or ["?"])[-1]
    (folder / "empty").mkdir()
    done = run(folder / "env" / "bin" / "gradveil", *AUDIT, cwd=folder / "empty")
    if done.returncode or not (folder / "empty" / "run" / "report.html").is_file():
        return f"exit code {done.returncode}: " + (done.stderr.strip().splitlines() or ["?"])[-1]
    return "works"


def main() -> int:
    pythons = sys.argv[1:] or [sys.executable]
    rows = ["| Python | distribution | `gradveil audit` |", "|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="gradveil-install-") as name:
        root = Path(name)
        checked(sys.executable, "-m", "venv", root / "build")
        build = root / "build" / "bin" / "python"
        checked(build, "-m", "pip", "install", "--quiet", "build")
        checked(build, "-m", "build", "--outdir", root / "dist", ROOT)
        for python in pythons:
            version = checked(python, "-c", "import platform; print(platform.python_version())").strip()
            for distribution in sorted((root / "dist").iterdir()):
                folder = root / f"{version}-{distribution.suffix[1:]}"
                folder.mkdir()
                rows.append(f"| {version} | {distribution.name} | {tried(python, version, distribution, folder)} |")
                print(rows[-1], flush=True)
                shutil.rmtree(folder)  # an environment has gigabytes
    record("Installation", "install.py", rows)
    return 0 if all("works" in row for row in rows[2:]) else 1


if __name__ == "__main__":
    sys.exit(main())
