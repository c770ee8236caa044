"""Does the same audit say the same on other numbers of threads and processes, and with less memory?

    python benchmarks/stability.py run --store DIR
    python benchmarks/stability.py write --store DIR

`run` does the parts that are not stored yet: one part per defense, seed and variant of the execution, each a whole audit in
a process that was started for the variant. The settings of the defenses are near the threshold of the verdict. `write`
puts all stored parts into docs/results/stability.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypedDict

import torch
from stored_parts import command_line

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

SETTINGS: Mapping[str, object] = {"data": "mnist-5k", "model": "lenet", "budget": "quick", "victims": 4}
SEARCH = "swift:restarts=0,cycles=0,adam_steps=100"  # long enough to spread differences of rounding
DEFENSES = ("gaussian:std=0.7", "prune:ratio=0.998")
SEEDS = range(100, 110)


@dataclass(frozen=True)
class Variant:
    """How an audit is computed."""

    threads: int = 1
    workers: int = 0
    memory: str | None = None  # most of the machine's


VARIANTS = {
    "1 thread": Variant(),
    "2 threads": Variant(threads=2),
    "2 processes": Variant(workers=2),
    "little memory": Variant(memory="2M"),  # three rows of victims and restarts at a time in place of all
}


class Part(TypedDict):
    """What one audit said."""

    defense: str
    seed: int
    variant: str
    verdict: str
    p: float | None
    likeness: list[float]  # of every victim to its reconstruction
    seconds: float


def audit(defense: str, seed: int, variant: str, settings: Mapping[str, object] = SETTINGS) -> Part:
    """One audit, computed as the variant says."""
    chosen, begun = VARIANTS[variant], time.perf_counter()
    torch.set_num_threads(chosen.threads)
    case = Case(make_spec({**settings, "defenses": [defense], "attacks": [SEARCH], "seed": seed}))
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        run = run_audit(case, Execution(out=Path(folder), workers=chosen.workers, memory=chosen.memory))
        row = next(d for d in run.summary.defenses if not d.control)
        cell = RunFolder(run.folder).outcome(row.attacks[0].cell)
    return {
        "defense": defense,
        "seed": seed,
        "variant": variant,
        "verdict": row.verdict,
        "p": row.test.p if row.test else None,
        "likeness": [image.likeness or 0.0 for image in cell.victims],
        "seconds": time.perf_counter() - begun,
    }


# -- all parts ---------------------------------------------------------------------------------------------------------


def file_of(defense: str, seed: int, variant: str) -> str:
    return f"{defense.partition(':')[0]}-{seed}-{variant.replace(' ', '-')}.json"


def do(defense: str, seed: int, variant: str, store: Path) -> str:
    part = audit(defense, seed, variant)
    write_json(store / file_of(defense, seed, variant), part)
    return f"{defense} {seed} {variant}: {part['verdict']}, p {part['p']}, {part['seconds']:.0f} s"


def run(options: argparse.Namespace) -> None:
    options.store.mkdir(parents=True, exist_ok=True)
    for variant in options.variants:
        grid = product(DEFENSES, SEEDS)
        missing = [pair for pair in grid if not (options.store / file_of(*pair, variant)).exists()]
        os.environ["OMP_NUM_THREADS"] = str(VARIANTS[variant].threads)  # of the process that is started next
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            for done in [pool.submit(do, *pair, variant, options.store) for pair in missing]:
                print(done.result(), flush=True)


# -- the page ----------------------------------------------------------------------------------------------------------


def largest_difference(parts: Sequence[Part]) -> float:
    """Of the likeness of any victim between any two of these audits."""
    columns = zip(*(part["likeness"] for part in parts), strict=True)
    return max(max(column) - min(column) for column in columns)


def page(parts: Sequence[Part]) -> Iterable[str]:
    """The lines of the page."""
    groups: dict[tuple[str, int], dict[str, Part]] = {}
    for part in parts:
        groups.setdefault((part["defense"], part["seed"]), {})[part["variant"]] = part
    complete = {key: group for key, group in sorted(groups.items()) if group.keys() == VARIANTS.keys()}
    verdicts = [key for key, group in complete.items() if len({part["verdict"] for part in group.values()}) > 1]
    numbers = [key for key, group in complete.items() if len({part["p"] for part in group.values()}) > 1]
    yield from ("# Stability of the verdict", "")
    yield f"Written by `benchmarks/stability.py write` from {len(complete)} audits, each computed in {len(VARIANTS)} ways:"
    yield f"{', '.join(VARIANTS)}. Attack `{SEARCH}`, {', '.join(f'{name} {value}' for name, value in SETTINGS.items())}."
    yield ""
    yield f"Audits whose verdict differs between the ways: **{len(verdicts)}** of {len(complete)}."
    yield f"Audits whose p differs: {len(numbers)}."
    yield ""
    yield "The last column is the largest difference of the likeness of a victim to its reconstruction between two of the ways."
    heads = ("defense", "seed", *VARIANTS, "likeness differs by")
    yield from ("", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for (defense, seed), group in complete.items():
        said = [f"{group[v]['verdict']}, {group[v]['p']:.3f}" for v in VARIANTS]
        yield f"| {defense} | {seed} | {' | '.join(said)} | {largest_difference(list(group.values())):.2g} |"


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))


if __name__ == "__main__":
    command_line(__doc__, run, lambda parts: page(list(parts.values())), "stability.md", add_options)
