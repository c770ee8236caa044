"""How long a plan says that an audit takes, and how long it takes, in CPU seconds.

    python benchmarks/plan_accuracy.py run --audits default ig mlp
    python benchmarks/plan_accuracy.py write

`run` does the audits that are not stored yet, each in this process, and stores the expected and the used CPU seconds of every
cell. `write` puts all stored audits into docs/results/plan.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stored_parts import command_line, commands, table

from gradveil.auditing.case import Case
from gradveil.auditing.estimate import Estimate
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.presets import PRESETS
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

FACTOR = 1.5  # within which the plan is to be
SUITE: dict[str, dict[str, object]] = {
    "default": {},
    "closed": {"model": "smlp", "attacks": ["linear", "rgap"], "victims": 16, "defenses": ["prune:ratio=0.5"]},
    "mlp": {"model": "smlp", "victims": 4, "defenses": ["gaussian:std=0.1", "clip"]},
    "ig": {"attacks": ["ig"], "victims": 4, "defenses": ["prune:ratio=0.7"]},
    "batch": {"batch_size": 4, "victims": 4, "defenses": ["soteria"]},
    "cost": {"attacks": ["rgap"], "victims": 4, "defenses": ["gaussian:std=0.1"], "utility": {"rounds": 10}},
    "standard": {"budget": "standard", "victims": 2, "defenses": ["clip"]},
}
# One victim, as a whole audit of a preset takes an hour or more; on the ResNets even one search of the suite takes long.
SEARCHES = {name: ["ig:steps=100"] for name in ("medical-resnet", "chest-labels")}
AUDITS = {
    **SUITE,
    **{
        name: {"preset": name, "victims": 1, "defenses": ["clip"], "attacks": SEARCHES.get(name, ["standard"])}
        for name in PRESETS
    },
}


def run_one(settings: dict[str, object], seed: int) -> dict[str, Any]:
    case = Case(make_spec({**settings, "seed": seed}))
    plan, begun = make_plan(case), time.process_time()
    estimate = Estimate(case, plan)
    times = {cell.key: estimate.cell(cell) for cell in plan}
    planning = time.process_time() - begun
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        run = run_audit(case, Execution(out=Path(folder), workers=0))
        stored = {cell.key: RunFolder(run.folder).outcome(cell.key) for cell in plan}
    cells = {
        str(cell): {
            "expected": times[cell.key].seconds,
            "limit": times[cell.key].limit,
            "used": stored[cell.key].cpu_seconds or 0.0,
            "status": stored[cell.key].status,
        }
        for cell in plan
    }
    return {"command": case.spec.command(), "planning": planning, "cells": cells}


def run(options: argparse.Namespace) -> None:
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.audits:
        file = options.store / f"{name}.json"
        if not file.exists():
            part = run_one(AUDITS[name], options.seed)
            write_json(file, part)
            print(f"{name}: {total(part, 'expected'):.0f} s expected, {total(part, 'used'):.0f} s used", flush=True)


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    """The table, and the cells that are farthest from what was expected."""
    ratios = {name: total(part, "expected") / total(part, "used") for name, part in parts.items()}
    within = sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios.values())
    yield from ("# How long a plan says that an audit takes", "")
    yield f"Of {len(parts)} audits, the plan is within a factor of {FACTOR} of the CPU seconds used for {within}."
    yield "A plan also says how long an audit takes at most, where no search ends early."
    head = ("audit", "cells", "expected", "at most", "used", "expected / used", "to plan")
    yield from table(head, (row(name, part, ratios[name]) for name, part in parts.items()))
    yield from ("", "The cells that miss by most seconds:")
    cells = [(name, cell, times) for name, part in parts.items() for cell, times in part["cells"].items()]
    cells.sort(key=lambda c: -abs(c[2]["expected"] - c[2]["used"]))
    yield from table(
        ("audit", "cell", "expected", "used"),
        ((name, cell, f"{times['expected']:.1f} s", f"{times['used']:.1f} s") for name, cell, times in cells[:8]),
    )
    yield from commands("The commands:", (part["command"] for part in parts.values()))


def row(name: str, part: dict[str, Any], ratio: float) -> Iterable[object]:
    yield from (name, len(part["cells"]), *(f"{total(part, column):.0f} s" for column in ("expected", "limit", "used")))
    yield from (f"{ratio:.2f}", f"{part['planning']:.0f} s")


def total(part: dict[str, Any], column: str) -> float:
    return sum(cell[column] for cell in part["cells"].values())


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--audits", nargs="+", choices=AUDITS, default=list(AUDITS))
    running.add_argument("--seed", type=int, default=100)


if __name__ == "__main__":
    command_line(__doc__, run, page, "plan.md", add_options)
