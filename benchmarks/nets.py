"""The standard suite on four networks: batches of 1 and 8, untrained and trained, six defenses.

    GRADVEIL_DATA=… python benchmarks/nets.py run --audits flower-cnn-8 flower-cnn-8-trained --runs FOLDER
    python benchmarks/nets.py write

`run` does the audits that are not stored yet; one that was interrupted goes on from its folder in `--runs`. Audits of hours
also keep their finished searches beside the stored audits, so that another machine can go on. `write` puts all stored audits
into docs/results/nets.md.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stored_parts import command_line, commands, table

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import identity_of, run_audit
from gradveil.auditing.spec import make_spec
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import Summary

NETS = {"lenet": "mnist-5k", "cnn": "cifar10", "flower-cnn": "cifar10", "resnet18": "cifar10"}
DEFENSES = ["clip", "gaussian:std=0.1", "prune:ratio=0.9", "soteria", "precode", "dcs2"]
IMAGES, LEAST = 16, 4  # images of an audit, and batches
AUDITS: dict[str, dict[str, object]] = {
    f"{net}-{size}{'-trained' * trained}": {
        "data": data,
        "model": net,
        "batch_size": size,
        "victims": max(LEAST, IMAGES // size),
        "defenses": DEFENSES,
        # By SGD at the default rate LeNet with PRECODE learns nothing.
        **({"trained_epochs": 8, "trained_under": "none", "trained_by": "adam:lr=0.001"} if trained else {}),
        # Hours of one core: line-ups would take 14 minutes per defense, and a search 23. Searches without pictures are
        # small files.
        **({"line_up": 0, "until_leak": True, "pictures": "none"} if net == "resnet18" else {}),
    }
    for net, data in NETS.items()
    for size in (1, 8)
    for trained in (False, True)
}


def facts(summary: Summary) -> list[dict[str, Any]]:
    """What is kept of every defense."""
    rows = []
    for row in summary.defenses:
        worst = row.worst
        rate = worst.identified if worst else None
        rows.append(
            {
                "defense": row.spec,
                "verdict": row.verdict,
                "p": row.test.p if row.test else None,
                "attack": row.best.spec if row.best else None,
                "psnr": worst.psnr.mean if worst else None,
                "identified": rate.rate if rate else None,
                "seconds": sum(attack.seconds or 0.0 for attack in row.attacks if attack.ok),
                "failed": [attack.spec for attack in row.attacks if attack.status == "failed"],
            }
        )
    return rows


def accuracies(case: Case, folder: RunFolder) -> dict[str, float]:
    """Of the attacked models that were trained, on the test part."""
    trainings = [folder.outcome(cell.key) for cell in make_plan(case) if cell.kind == "train"]
    return {stored.defense: stored.history["acc_test"][-1] for stored in trainings}


def run(options: argparse.Namespace) -> None:
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.audits:
        file = options.store / f"{name}.json"
        if not file.exists():
            case = Case(make_spec({**AUDITS[name], "seed": options.seed}))
            folder, searches = options.runs / f"{name}-{options.seed}", options.store / "searches" / f"{name}-{options.seed}"
            with kept_searches(case, folder, searches):
                run = run_audit(case, Execution(out=folder, workers=options.workers))
            part: dict[str, Any] = {"suite": run.summary.suite, "scope": run.summary.scope, "command": run.summary.command}
            part["accuracy"] = accuracies(case, RunFolder(run.folder))
            write_json(file, {**part, "images": case.spec.victims * case.spec.batch_size, "defenses": facts(run.summary)})
            shutil.rmtree(searches, ignore_errors=True)
            for row in facts(run.summary):
                print(name, row, flush=True)


@contextmanager
def kept_searches(case: Case, folder: Path, kept: Path) -> Iterator[None]:
    """Begin with the searches in `kept`, and put all finished ones there at the end, however it comes."""
    if case.spec.pictures != "none":
        yield
        return
    with RunFolder(folder).opened(identity_of(case)):
        _copy(kept, folder / "cells")
    try:
        yield
    finally:
        run = RunFolder(folder)
        searches = [key for key, cell in run.cells.items() if cell.kind == "attack" and cell.status == "ok"]
        _copy(folder / "cells", kept, searches)


def _copy(source: Path, target: Path, keys: Iterable[str] | None = None) -> None:
    """The files of cells that the target lacks; without `keys`, all."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("*.json")) if keys is None else [source / f"{key}.json" for key in keys]:
        if not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    suites = sorted({part["suite"] for part in parts.values()})
    yield from ("# The suite on four networks", "")
    yield f"{', '.join(suites)}, quick budget, realistic adversary, one gradient per update in training mode. Each cell:"
    yield "the verdict, identified images of all, and PSNR of the strongest attack, its counters included. Trained: eight"
    yield "epochs without a defense, which is taken up after them; PRECODE has layers of its own and is trained with them. On"
    yield "ResNet18 a defense is attacked only until it leaks: all attacks together may get more of it there."
    audits = [name for name in AUDITS if name in parts]
    yield f"{len(audits)} of {len(AUDITS)} audits are done."
    yield from table(("defense", *audits), (row(defense, audits, parts) for defense in ("none", *DEFENSES)))
    for name in audits:
        for defense, accuracy in parts[name].get("accuracy", {}).items():
            yield from ("", f"- `{name}`, trained under `{defense}`: {accuracy:.1%} of test images right.")
    yield from commands("The commands:", (parts[name]["command"] for name in audits))


def row(defense: str, audits: list[str], parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield f"`{defense}`"
    yield from (cell(r, parts[n]["images"]) for n in audits for r in parts[n]["defenses"] if r["defense"] == defense)


def cell(row: dict[str, Any], images: int) -> str:
    if row["identified"] is None:
        return str(row["verdict"])
    return f"{row['verdict']}, {round(row['identified'] * images)} of {images}, {row['psnr']:.1f} dB by `{row['attack']}`"


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--audits", nargs="+", choices=AUDITS, default=list(AUDITS))
    running.add_argument("--seed", type=int, default=100)
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--runs", type=Path, required=True, help="folder of the runs, to go on after an interruption")


if __name__ == "__main__":
    command_line(__doc__, run, page, "nets.md", add_options)
