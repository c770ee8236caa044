"""Does the same audit say the same on other numbers of threads and processes, and with less memory?

    python benchmarks/stability.py run
    python benchmarks/stability.py write

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
from contextlib import ExitStack
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
    "512 MB": Variant(memory="512M"),
}
# Three rows of victims and restarts at a time in place of all: less than what every computation takes by default.
STRESS = {"2 MB": Variant(memory="2M")}


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
    chosen, begun = (VARIANTS | STRESS)[variant], time.perf_counter()
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
    with ExitStack() as stack:
        pools = {variant: stack.enter_context(started_pool(variant)) for variant in options.variants}
        for defense, seed, variant in product(options.defenses, SEEDS, options.variants):
            if not (options.store / file_of(defense, seed, variant)).exists():
                print(pools[variant].submit(do, defense, seed, variant, options.store).result(), flush=True)


def started_pool(variant: str) -> ProcessPoolExecutor:
    """One process that was started with the number of threads of the variant."""
    os.environ["OMP_NUM_THREADS"] = str((VARIANTS | STRESS)[variant].threads)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    pool.submit(os.getpid).result()
    return pool


# -- the page ----------------------------------------------------------------------------------------------------------


def largest_difference(parts: Sequence[Part]) -> float:
    """Of the likeness of any victim between any two of these audits."""
    columns = zip(*(part["likeness"] for part in parts), strict=True)
    return max(max(column) - min(column) for column in columns)


def differing(groups: Iterable[Mapping[str, Part]], variants: Iterable[str]) -> tuple[int, int]:
    """How many audits have more than one verdict, and more than one p, over these variants."""
    chosen = [[group[variant] for variant in variants] for group in groups]
    verdicts = sum(len({part["verdict"] for part in parts}) > 1 for parts in chosen)
    return verdicts, sum(len({part["p"] for part in parts}) > 1 for parts in chosen)


def page(parts: Sequence[Part]) -> Iterable[str]:
    """The lines of the page."""
    every = [*VARIANTS, *STRESS]
    audits: dict[tuple[str, int], dict[str, Part]] = {}
    for part in parts:
        audits.setdefault((part["defense"], part["seed"]), {})[part["variant"]] = part
    usual = {key: group for key, group in sorted(audits.items()) if VARIANTS.keys() <= group.keys()}
    stressed = [group for group in usual.values() if STRESS.keys() <= group.keys()]
    verdicts, numbers = differing(usual.values(), VARIANTS)
    yield from ("# Stability of the verdict", "")
    yield f"Written by `benchmarks/stability.py write` from {len(usual)} audits, each computed in several ways:"
    yield f"{', '.join(every)}."
    yield f"Attack `{SEARCH}`, {', '.join(f'{name} {value}' for name, value in SETTINGS.items())}."
    yield ""
    yield f"- {', '.join(VARIANTS)}: the verdict differs in **{verdicts}** of {len(usual)} audits, p in {numbers}."
    verdicts, numbers = differing(stressed, every)
    yield f"- with {', '.join(STRESS)} too: the verdict differs in **{verdicts}** of {len(stressed)} audits, p in {numbers}."
    yield ""
    yield "A cell is computed by one thread, and with the same number of rows at once wherever a process may take 256 MB,"
    yield "so that all sums are rounded alike. A smaller `--memory` changes the rounding. The search then ends elsewhere, and"
    yield "verdicts near the threshold may change: another draw, with the same error rate."
    yield ""
    yield "The last column is the largest difference of the likeness of a victim to its reconstruction between two of the ways."
    heads = ("defense", "seed", *every, "likeness differs by")
    yield from ("", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for (defense, seed), group in usual.items():
        said = [f"{group[v]['verdict']}, {group[v]['p']:.3f}" if v in group else "" for v in every]
        yield f"| {defense} | {seed} | {' | '.join(said)} | {largest_difference(list(group.values())):.2g} |"


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--defenses", nargs="+", choices=DEFENSES, default=DEFENSES)
    running.add_argument("--variants", nargs="+", choices=VARIANTS | STRESS, default=list(VARIANTS | STRESS))


if __name__ == "__main__":
    command_line(__doc__, run, lambda parts: page(list(parts.values())), "stability.md", add_options)
