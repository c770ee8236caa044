"""The line-up: which of m candidates was in the batch, on growing batches, trained networks and local epochs.

    GRADVEIL_DATA=… python benchmarks/line_up.py run --audits mlp-8 mlp-64 --seeds 100
    python benchmarks/line_up.py write

`run` does the audits that are not stored yet. `write` puts all stored audits into docs/results/line_up.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from stored_parts import command_line, commands, table
from torch import nn

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import CONTROL, make_spec
from gradveil.certification.certificate import percent
from gradveil.core.randomness import torch_stream
from gradveil.core.types import Tensors
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import DefenseRow

VICTIMS, M = 32, 1001
NO_PICTURE = "april"  # does not apply to these networks: the line-up alone is measured


def mlp() -> nn.Module:
    """784-128-10 with ReLU."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


MLP: dict[str, object] = {"data": "mnist", "model": "line_up:mlp", "victims": VICTIMS, "attacks": [NO_PICTURE]}
ROUNDS, TRAINED = {"trained_rounds": 10}, {"trained_epochs": 1}  # to 85% and 95% on test images
DEFENSES = ["gaussian:std=0.1", "dpsgd", "prune:ratio=0.9", "precode", "dcs2"]
AUDITS: dict[str, dict[str, object]] = {
    **{f"mlp-{size}": {**MLP, "batch_size": size} for size in (8, 64)},
    **{f"mlp-{size}-rounds": {**MLP, **ROUNDS, "batch_size": size} for size in (8, 32, 64, 256)},
    **{f"mlp-{size}-trained": {**MLP, **TRAINED, "batch_size": size} for size in (8, 32, 64, 256)},
}
AUDITS |= {
    "flower-cnn-32": {
        **{"data": "cifar10", "model": "flower-cnn", "victims": VICTIMS, "attacks": [NO_PICTURE], "batch_size": 32},
        **{"local_batch_size": 8, "local_epochs": 3, "local_lr": 0.01},
    },
    "lenet": {"data": "mnist", "model": "lenet", "victims": 16, "attacks": ["standard"], "defenses": DEFENSES},
}


def run_one(settings: dict[str, object], seed: int) -> dict[str, Any]:
    case = Case(make_spec({"defenses": ["none"], **settings, "seed": seed, "line_up": M}))
    plan = make_plan(case)
    with tempfile.TemporaryDirectory(prefix="gradveil-") as name:
        run = run_audit(case, Execution(out=Path(name) / "run", workers=0))
        folder = RunFolder(run.folder)
        seconds = {cell.defense: folder.outcome(cell.key).cpu_seconds for cell in plan if cell.kind == "line-up"}
        trained = [folder.tensors(cell.key) for cell in plan if (cell.kind, cell.defense) == ("train", CONTROL)]
    rows = [about(row, seconds[row.spec]) for row in run.summary.defenses]
    part = {"command": case.spec.command(), "seed": seed, "defenses": rows}
    return part | {"accuracy": accuracy(case, trained[0])} if trained else part


def about(row: DefenseRow, seconds: float | None) -> dict[str, Any]:
    """What is kept of a defense."""
    assert row.line_up is not None
    risk, worst = row.line_up, row.worst
    return {
        "defense": row.spec,
        "m": risk.m,
        "victims": len(risk.ranks),
        "first": sum(rank == 1 for rank in risk.ranks),
        "median": sorted(risk.ranks)[len(risk.ranks) // 2],
        "upper": risk.certificate.upper if risk.certificate else None,
        "seconds": seconds,
        "verdict": row.verdict,
        "identified": worst.identified.rate if worst else None,
        "psnr": worst.psnr.mean if worst else None,
    }


def accuracy(case: Case, trained: Tensors) -> float:
    """Of the trained model, on test images."""
    task, state = case.task(case.defenses[CONTROL], None, trained)
    test = case.data.test
    assert test is not None
    with torch.no_grad():
        scores = task.model(state, task.normalize(test.x), task.model.draw_noise(len(test), torch_stream(0)))
    return float((scores.argmax(1) == test.hard_labels).double().mean())


def run(options: argparse.Namespace) -> None:
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.audits:
        for seed in options.seeds:
            file = options.store / f"{name}-{seed}.json"
            if not file.exists():
                part = {"audit": name, **run_one(AUDITS[name], seed)}
                write_json(file, part)
                print(name, seed, [(row["defense"], row["first"], row["m"]) for row in part["defenses"]], flush=True)


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# The line-up: was this image used?", "")
    yield "Someone has m images of one class and asks which of them was in the batch. Nothing is rebuilt: the update that each"
    yield "would cause is compared with what was sent, with labels inferred. First: victims that fit best of all m. Seconds are"
    yield "CPU seconds of all line-ups of an audit together, with all their candidates."
    plain = [part for part in parts.values() if len(part["defenses"]) == 1]
    head = ("audit", "seed", "test accuracy", "m", "first", "median rank", "seconds")
    yield from table(head, (undefended(part) for part in plain))
    yield from ("", "Two risks of six defenses, LeNet on MNIST. The limit is what the defense proves for a line-up of m.")
    head = ("defense", "picture", "identified by pictures", "PSNR", "first in the line-up", "m", "limit", "in words")
    rows = [row for part in parts.values() if len(part["defenses"]) > 1 for row in part["defenses"]]
    yield from table(head, map(defended, rows))
    yield from commands("The commands; `mlp` is in benchmarks/line_up.py:", (p["command"] for p in parts.values()))


def undefended(part: dict[str, Any]) -> Iterable[object]:
    (row,) = part["defenses"]
    yield from (part["audit"], part["seed"], f"{part['accuracy']:.0%}" if "accuracy" in part else "untrained", row["m"])
    yield from (f"{row['first']} of {row['victims']}", row["median"], f"{row['seconds']:.0f}")


def defended(row: dict[str, Any]) -> Iterable[object]:
    yield from (f"`{row['defense']}`", row["verdict"], "–" if row["identified"] is None else f"{row['identified']:.0%}")
    yield from ("–" if row["psnr"] is None else f"{row['psnr']:.1f} dB", f"{row['first']} of {row['victims']}", row["m"])
    yield "none" if row["upper"] is None else percent(row["upper"])
    yield in_words(row)


def in_words(row: dict[str, Any]) -> str:
    """What both risks say about a defense."""
    picture = {"leaks": "pictures are rebuilt", "no leak shown": "no picture was rebuilt"}.get(row["verdict"], row["verdict"])
    first = row["first"] / row["victims"]
    recognised = "nobody is recognised" if first == 0 else f"{first:.0%} are recognised by who has the picture"
    proved = "nothing is proved" if row["upper"] is None else f"at most {percent(row['upper'])} is proved, whatever is tried"
    return f"{picture}; {recognised}; {proved}"


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--audits", nargs="+", choices=AUDITS, default=list(AUDITS))
    running.add_argument("--seeds", nargs="+", type=int, default=[100])


if __name__ == "__main__":
    command_line(__doc__, run, page, "line_up.md", add_options)
