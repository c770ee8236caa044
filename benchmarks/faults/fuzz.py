"""Bad input: every reader of the tool on thousands of damaged inputs, each with a time limit.

    python benchmarks/faults/fuzz.py --inputs 1500 --seed 0

An input must end in a result or in one clear line (`UserError`), within ten seconds of processor time and the memory
that the process may take (a real limit on its address space), and leave no unfinished file. Anything else is a fault,
printed with the number that reproduces it (`--only READER --first N --inputs 1`). The counts go to
docs/results/reliability.md. The inputs are made in the files fuzz_*.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import random
import resource
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
from fuzz_folders import finished_run, run_folder, special_file
from fuzz_models import attacked, audited
from fuzz_text import config, grammar
from fuzz_updates import DATA, checkpoint, update, victim
from record import record

import gradveil as gv
from gradveil.core.errors import UserError, one_line
from gradveil.core.text import plain
from gradveil.storage.files import LOCK
from gradveil.storage.run_folder import MARKER

SECONDS = 10  # of processor time until an input counts as a hang
SLOWER = 4  # readers of models run whole audits and get so many times fewer inputs
CLOCK = 60  # seconds of the clock, for an input that waits for ever
MEMORY = 2 * 2**30  # bytes of address space beyond what the process has when the campaign begins
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
    "run folders": run_folder,
    "special files": special_file,
}
if importlib.util.find_spec("flwr"):
    import fuzz_flower

    READERS |= {
        "replies to a captured strategy": fuzz_flower.capture,
        "messages to the mod": fuzz_flower.mod,
        "messages to the guard": fuzz_flower.guard,
    }


class Hang(BaseException):
    """The time limit is exceeded."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Interrupts after so much processor time, or so much time of the clock."""

    def interrupt(*_: object) -> None:
        raise Hang

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, CLOCK)}
    before = {number: signal.signal(number, interrupt) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def limit_memory() -> None:
    """From now on a larger allocation fails, whoever makes it."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def outcome(reader: str, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """How one input ends: `result`, `refused` or a fault, and its text."""
    rng = random.Random(f"{seed}/{reader}/{number}")
    job = READERS[reader](rng, folder)
    try:
        with time_limit(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job()
        kind, message = "result", ""
    except UserError as error:
        kind, message = "refused", plain(one_line(error))
        if not message.isprintable() or not message:
            kind = "unclear"
        elif isinstance(error.__context__, MemoryError) or ("memory" in message and "limit" not in message):
            kind = "memory"  # told in one line, but only after the memory was asked for
    except Hang:
        kind, message = "hang", f"more than {SECONDS} s of processor time or {CLOCK} s of the clock"
    except MemoryError:
        kind, message = "memory", traceback.format_exc()
    except BaseException:
        kind, message = "traceback", traceback.format_exc()
    left = [p.name for p in folder.rglob(".*") if not p.name.startswith((LOCK, MARKER, ".0", ".1", ".2"))]
    if kind in ("result", "refused") and left:
        kind, message = "half-written file", ", ".join(left)
    return kind, message


def campaign(readers: list[str], seed: int, first: int, inputs: int, verbose: bool) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for reader in readers:
        counts[reader], began = Counter(), time.perf_counter()
        for number in range(first, first + (inputs // SLOWER if reader.startswith("models") else inputs)):
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
    parser.add_argument("--inputs", type=int, default=1500, help="for each reader; a quarter of it for models")
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
    finished_run()
    limit_memory()
    began = time.perf_counter()
    readers = [options.only] if options.only else list(READERS)
    counts = campaign(readers, options.seed, options.first, options.inputs, options.verbose)
    faults = sum(n for c in counts.values() for kind, n in c.items() if kind not in ("result", "refused"))
    if not options.only:
        rows = [
            "| reader | inputs | results | refused in one line | tracebacks | hangs | too much memory | other faults |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for reader, c in counts.items():
            other = sum(n for kind, n in c.items() if kind not in ("result", "refused", "traceback", "hang", "memory"))
            numbers = (c.total(), c["result"], c["refused"], c["traceback"], c["hang"], c["memory"], other)
            rows.append(f"| {reader} | {' | '.join(map(str, numbers))} |")
        total = sum(c.total() for c in counts.values())
        about = (
            f"{total} inputs, {options.inputs} per reader of files or messages, seed {options.seed}, "
            f"numbered from {options.first} on; "
            f"a hang is more than {SECONDS} s of processor time, and the address space was limited to {MEMORY // 2**30} GiB "
            f"more than the process had at the start. {time.perf_counter() - began:.0f} s in all."
        )
        record("Bad input", "fuzz.py", [about, "", *rows])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
