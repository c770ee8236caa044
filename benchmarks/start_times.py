"""How soon the command line answers: processor seconds of what needs no torch, and seconds until an audit's first line.

    python benchmarks/start_times.py --old OLD/src     # OLD is a checkout of 0.1.0

Each command runs in a process of its own, as `python -m gradveil`; the smallest of several runs counts, because other work on
the machine only adds to it. Output goes to pipes. Writes a section of docs/results/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "faults"))
from record import record

HERE = Path(__file__).parents[1] / "src"
RUNS = 5
COMMANDS = {
    "gradveil --version": ["--version"],
    "gradveil --help": ["--help"],
    "gradveil audit --help": ["audit", "--help"],
    "gradveil list defenses": ["list", "defenses"],
    "gradveil list": ["list"],
    "gradveil show prune": ["show", "prune"],
    "gradveil reproduce --list": ["reproduce", "--list"],
}
COMPLETED = "gradveil audit --defense pr"
AUDIT = ["audit", "--model", "smlp", "--attack", "linear", "--defense", "none", "--victims", "2", "--out", "run"]


def environment(source: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1", "COLUMNS": "80", **more}


def processor_seconds(words: list[str], values: dict[str, str]) -> float | None:
    """Of the process and its children; None where the command fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "gradveil", *words], env=values, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or not done.stdout:
        return None
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def smallest(words: list[str], values: dict[str, str]) -> str:
    times = [processor_seconds(words, values) for _ in range(RUNS)]
    measured = [seconds for seconds in times if seconds is not None]
    return f"{min(measured):.2f} s" if measured else "none"


def first_line(source: Path) -> str:
    """Wall seconds until a piped audit says its first word; it is ended then."""
    times = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            command = [sys.executable, "-m", "gradveil", *AUDIT]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            with subprocess.Popen(command, cwd=folder, env=environment(source), text=True, **streams) as process:
                assert process.stdout is not None
                process.stdout.readline()
                times.append(time.monotonic() - begun)
                process.terminate()
                process.stdout.read()
    return f"{min(times):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", type=Path, required=True, metavar="OLD/src", help="the src folder of a checkout of 0.1.0")
    sources = [parser.parse_args().old, HERE]
    rows = {f"`{title}`": [smallest(words, environment(source)) for source in sources] for title, words in COMMANDS.items()}
    asked = {"_GRADVEIL_COMPLETE": "complete_bash", "COMP_WORDS": COMPLETED, "COMP_CWORD": str(COMPLETED.count(" "))}
    rows[f"completion of `{COMPLETED}`"] = [smallest([], environment(source, **asked)) for source in sources]
    rows["first line of a piped audit, wall time"] = [first_line(source) for source in sources]
    lines = [
        f"Processor seconds, the smallest of {RUNS} runs; output goes to a pipe. *None*: no such answer in that version.",
        "",
    ]
    lines += ["| command | 0.1.0 | now |", "|---|---|---|"]
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()]
    print("\n".join(lines))
    record("Time to the first line", "benchmarks/start_times.py", lines)


if __name__ == "__main__":
    main()
