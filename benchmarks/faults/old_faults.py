"""Faults that version 0.1.0 had, as commands: what happens there, and what happens now.

    python benchmarks/faults/old_faults.py --old OLD/src           # both versions, and the section in reliability.md
    python benchmarks/faults/old_faults.py --old OLD/src --only pipe    # cases whose name holds this text: their rows
    python benchmarks/faults/old_faults.py --only pipe                  # this version alone; nothing is recorded

`OLD` is a checkout of 0.1.0. A case runs the command line, or a few lines of Python, as a user would, in a folder of its
own, with limits on time and address space. It returns the fault that it saw, or nothing.
Two quick Ctrl-C hold in 0.1.0 too: this case does not repeat a traceback that was seen there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import old_files
import old_protection
import old_results
from old_case import CASES, CLOCK, Place
from record import record, recorded

HERE = Path(__file__).parents[2] / "src"
TITLE = "Faults of 0.1.0"
AT_ONCE = 4  # cases; some only wait
MODULES = (old_protection, old_files, old_results)  # imported for the cases that they register


def outcome(check: Callable[[Place], str | None], source: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="gradveil-case-") as folder:
        try:
            fault = check(Place(Path(folder), source.resolve()))
        except subprocess.TimeoutExpired:
            fault = f"no end within {CLOCK} s"
    return "holds" if fault is None else " ".join(fault.split()).replace("|", "/") or "no result"


def per_version(check: Callable[[Place], str | None], sources: Sequence[Path]) -> list[str]:
    """One version after the other: two that start a Ray at once disturb each other."""
    return [outcome(check, source) for source in sources]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, metavar="OLD/src", help="the src folder of a checkout of 0.1.0")
    parser.add_argument("--only", help="cases whose name holds this text")
    options = parser.parse_args()
    sources = [HERE] if options.old is None else [options.old, HERE]
    chosen = {name: check for name, check in CASES.items() if not options.only or options.only in name}
    rows = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {name: pool.submit(per_version, check, sources) for name, check in chosen.items()}
        for name, future in futures.items():
            rows.append((name, *future.result()))
            print(" | ".join(rows[-1]), flush=True)
    failed = sum(row[-1] != "holds" for row in rows)
    if options.old is not None:
        write_table({name: outcomes for name, *outcomes in rows})
    return 1 if failed else 0


def write_table(rows: dict[str, list[str]]) -> None:
    """Record the rows; those of cases that were not run stay as they are recorded."""
    lines = recorded(TITLE).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    outcomes = {name: others for name, *others in cells if name in CASES} | rows
    ordered = {name: outcomes[name] for name in CASES if name in outcomes}
    old, now = (sum(row[column] != "holds" for row in ordered.values()) for column in (0, 1))
    table = ["| case | 0.1.0 | now |", "|---|---|---|", *(f"| {' | '.join((n, *row))} |" for n, row in ordered.items())]
    record(TITLE, Path(__file__).name, [f"{len(ordered)} cases: {old} fail in 0.1.0, {now} fail now.", "", *table])


if __name__ == "__main__":
    sys.exit(main())
