"""Bad input: every reader of the tool on thousands of damaged inputs, each with a time limit.

    python benchmarks/faults/fuzz.py --inputs 1500 --seed 0

An input must end in a result or in one clear line (`UserError`), within a few seconds, and leave no unfinished file.
Anything else is a fault, printed with the number that reproduces it (`--only READER --first N --inputs 1`). The counts
go to docs/results/reliability.md. The inputs are made in fuzz_text.py, fuzz_data.py, fuzz_updates.py and fuzz_models.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from damage import Job, Random
from fuzz_data import folder_of_pictures, idx, npz
from fuzz_models import attacked, audited
from fuzz_text import config, grammar
from fuzz_updates import DATA, checkpoint, update, victim
from record import record

import gradveil as gv
from gradveil.core.errors import UserError, one_line
from gradveil.core.text import plain
from gradveil.storage.files import LOCK

SECONDS = 60  # until an input counts as a hang
READERS: dict[str, Callable[[Random, Path], Job]] = {
    "method grammar": grammar,
    "YAML configs": config,
    "npz archives": npz,
    "image folders": folder_of_pictures,
    "idx files": idx,
    "safetensors updates": update,
    "checkpoints": checkpoint,
    "models": audited,
    "models under `gradveil attack`": attacked,
}


class Hang(BaseException):
    """The time limit is exceeded."""


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(reader: str, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """How one input ends: `result`, `refused` or a fault, and its text."""
    rng = random.Random(f"{seed}/{reader}/{number}")
    job = READERS[reader](rng, folder)
    try:
        with alarm(SECONDS), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job()
        kind, message = "result", ""
    except UserError as error:
        kind, message = "refused", plain(one_line(error))
        if not message.isprintable() or not message:
            kind = "unclear"
    except Hang:
        kind, message = "hang", f"more than {SECONDS} s"
    except BaseException:
        kind, message = "traceback", traceback.format_exc()
    left = [p.name for p in folder.rglob(".*") if not p.name.startswith((LOCK, ".0", ".1", ".2"))]
    if kind in ("result", "refused") and left:
        kind, message = "half-written file", ", ".join(left)
    return kind, message


def campaign(readers: list[str], seed: int, first: int, inputs: int, verbose: bool) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for reader in readers:
        counts[reader], began = Counter(), time.perf_counter()
        for number in range(first, first + inputs):
            with tempfile.TemporaryDirectory(prefix="gradveil-fuzz-") as folder:
                kind, message = outcome(reader, seed, number, Path(folder))
            counts[reader][kind] += 1
            if kind not in ("result", "refused"):
                print(f"--- {reader} {number}: {kind}\n{message}", file=sys.stderr, flush=True)
            elif verbose:
                print(f"{reader} {number}: {kind} {message}")
        print(f"{reader}: {dict(counts[reader])} in {time.perf_counter() - began:.0f} s", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1500, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", choices=sorted(READERS), help="one reader alone; nothing is recorded")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gv.audit(
        DATA, victim(), "none", "ig:steps=1", victims=1, quiet=True
    )  # imports everything, so that no import is interrupted
    os.environ.setdefault("COLUMNS", "200")
    began = time.perf_counter()
    readers = [options.only] if options.only else list(READERS)
    counts = campaign(readers, options.seed, options.first, options.inputs, options.verbose)
    faults = sum(n for c in counts.values() for kind, n in c.items() if kind not in ("result", "refused"))
    if not options.only:
        rows = [
            "| reader | inputs | results | refused in one line | tracebacks | hangs | other faults |",
            "|---|---|---|---|---|---|---|",
        ]
        for reader, c in counts.items():
            other = sum(n for kind, n in c.items() if kind not in ("result", "refused", "traceback", "hang"))
            rows.append(
                f"| {reader} | {c.total()} | {c['result']} | {c['refused']} | {c['traceback']} | {c['hang']} | {other} |"
            )
        total = sum(c.total() for c in counts.values())
        about = (
            f"{total} inputs, {options.inputs} per reader, seed {options.seed}, numbered from {options.first} on; "
            f"a hang is more than {SECONDS} s. {time.perf_counter() - began:.0f} s in all."
        )
        record("Bad input", "fuzz.py", [about, "", *rows])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
