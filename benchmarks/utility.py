"""What each defense costs in accuracy and time, in federations of ten clients, each defense at a learning rate of its own.

    GRADVEIL_DATA=… python benchmarks/utility.py run --federations mnist-2000 --defenses dpsgd --runs FOLDER
    python benchmarks/utility.py write

`run` measures what is not stored yet, as audits with `--utility` do: paired seeds, the mean of the last evaluations, the
learning rate chosen on images that are held back. What was interrupted goes on from its folder in `--runs`. Defenses that
craft images defend one client of ten. `write` puts all that is stored into docs/results/utility.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from stored_parts import command_line, commands, table

import gradveil as gv
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.certification.certificate import CERTAIN
from gradveil.core.errors import UserError
from gradveil.storage.files import write_json

ROUNDS = 15


class Federation(NamedTuple):
    """Ten clients. Under Poisson sampling nobody can guess a mini-batch, which a proof may count."""

    data: str
    images: int  # per client
    mini_batch: int = 64
    lr: float = 0.05
    poisson: bool = False
    lr_grid: str = "0.25,1,4"
    defenses: tuple[str, ...] = ()  # empty: all


PROVED = "dpsgd:noise=1.09"  # 5% at most
FEDERATIONS = {
    "mnist-200": Federation("mnist-5k", 200),
    "mnist-2000": Federation("mnist:private=20000", 2000),
    "mnist-5000": Federation("mnist:private=50000", 5000, 512, 0.1, True, "0.25,1,4,16", (PROVED, f"{PROVED},gain=30")),
    "cifar10-500": Federation("cifar10:private=5000", 500),
}
DEFENSES = (
    *("dpsgd", "prune:ratio=0.9", "gaussian:std=0.1", "laplace:scale=0.1", "clip", "quantize", "graddefense", "soteria"),
    *("mixup:k=4", "instahide:k=4", "precode", "ats", "loda"),
)
CRAFTING = ("refiner", "dcs2")  # a step of theirs costs as much as a hundred others: one client of ten
EVERY = (*DEFENSES, *CRAFTING)
GOALS = {"dcs2": 3.0, "refiner": 5.0, "precode": 5.0}  # points
INTRODUCTION = """Written by `benchmarks/utility.py`. Ten clients train `cnn`; accuracies are of test images, means over seeds
and the last evaluations. The loss is that against the training of the same seed without a defense, in percent of its
accuracy, with its 95% interval over seeds. Every defense has a learning rate of its own: a factor on the server's, chosen on
images of the clients that were held back. The cosine is that of an untrained client's update to its undefended one. Time is
that of a round beside an undefended one, the median round. Line-up: the highest success that the noise leaves to anyone who
picks an image of the training out of 1,001, if there is a proof (`gradveil certify`). The clients' own rate is that of the
scope for all defenses, as what they send is audited at it; `gain` gives DP-SGD longer local steps, chosen on seed 0."""


def run(options: argparse.Namespace) -> None:
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.federations:
        for defense in options.defenses or FEDERATIONS[name].defenses or EVERY:
            file = options.store / f"{name}-{defense.replace(':', '_')}.json"
            if not file.exists():
                write_json(file, part := measured(name, defense, options))
                print(name, defense, part["rows"][-1], flush=True)


def measured(name: str, defense: str, options: argparse.Namespace) -> dict[str, Any]:
    """An audit without attacks of what one defense costs, and of no defense."""
    at = FEDERATIONS[name]
    settings = {"data": at.data, "model": "cnn", "defenses": ["none", defense], "attacks": ["linear"], "victims": 1}
    client = {"batch_size": at.images, "local_epochs": 1, "local_batch_size": at.mini_batch, "local_lr": at.lr}
    training = {"rounds": ROUNDS, "clients": 10, "defended": 1 if defense in CRAFTING else "all", "lr_grid": at.lr_grid}
    if at.poisson:
        training["sampling"] = "poisson"
    optimizer = {"local_optimizer": "sgd:momentum=0.9"}
    spec = make_spec({**settings, **client, **optimizer, "utility": training, "seed": options.seed})
    folder = options.runs / f"{name}{'-one' * (defense in CRAFTING)}"
    summary = run_audit(Case(spec), Execution(out=folder, workers=options.workers)).summary
    rows = [
        {
            "defense": row.spec,
            "cosine": row.gradient.cosine if row.gradient else None,
            **measure.model_dump(include={"acc_test", "acc_train", "pdm", "low", "high", "overhead", "lr", "server_lr"}),
        }
        for row in summary.defenses
        if (measure := row.utility) is not None
    ]
    scope = next(row.utility.scope for row in summary.defenses if row.utility)
    return {"federation": name, "scope": scope, "command": summary.command, "rows": rows, "line_up": proved(defense, at)}


def proved(defense: str, at: Federation) -> float | None:
    """The highest success of a line-up that the noise leaves after all rounds; None where nothing is proved."""
    try:
        sampling = {"sampling": "poisson", "batch_size": at.mini_batch, "images": at.images} if at.poisson else {}
        return gv.certify(defense, rounds=ROUNDS, **sampling).upper
    except UserError:
        return None


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# What a defense costs", "")
    yield from INTRODUCTION.splitlines()
    shown = []
    for name, at in FEDERATIONS.items():
        mine = [part for part in parts.values() if part["federation"] == name]
        if mine:
            shown.append(mine[0]["command"])
            yield from ("", f"## {at.data}, {at.images:,} images per client", "", f"{mine[0]['scope']}.")
            head = ("defense", "defended", "accuracy", "train", "loss, %", "goal", "server's rate", "cosine", "time", "line-up")
            yield from table(head, rows_of(mine))
            done = {part["rows"][-1]["defense"] for part in mine}
            missing = [f"`{defense}`" for defense in at.defenses or EVERY if defense not in done]
            yield from ("", f"Not measured yet: {', '.join(missing)}.") if missing else ()
    yield from commands("The first command of each table; the others differ in the defense:", shown)


def rows_of(parts: list[dict[str, Any]]) -> Iterable[Iterable[object]]:
    undefended = parts[0]["rows"][0]
    yield (
        "`none`",
        "",
        f"{undefended['acc_test']:.1%}",
        f"{undefended['acc_train']:.1%}",
        "",
        "",
        rate(undefended),
        "",
        "",
        "",
    )
    for part in parts:
        row = part["rows"][-1]
        interval = "" if row["low"] is None else f" ({row['low']:.1f} to {row['high']:.1f})"
        goal = GOALS.get(row["defense"])
        points = row["pdm"] * undefended["acc_test"]
        met = "" if goal is None else f"≤ {goal:.0f} points: {'met' if points <= goal else 'missed'}"
        who = "1 of 10" if row["defense"] in CRAFTING else "all"
        yield (
            *(f"`{row['defense']}`", who, f"{row['acc_test']:.1%}", f"{row['acc_train']:.1%}"),
            *(f"{row['pdm']:.1f}{interval}", met, rate(row), f"{row['cosine']:.2f}", f"{row['overhead']:.1f}×"),
            f"≤ {part['line_up']:.1%}" if (part.get("line_up") or 1.0) <= CERTAIN else "",
        )


def rate(row: dict[str, Any]) -> str:
    return f"{row['server_lr']:g}"


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--federations", nargs="+", choices=FEDERATIONS, default=list(FEDERATIONS))
    running.add_argument("--defenses", nargs="+", help="those of each federation, unless given")
    running.add_argument("--runs", type=Path, default=Path("runs/utility"), help="folders of audits that were interrupted")
    running.add_argument("--workers", type=int, default=1)
    running.add_argument("--seed", type=int, default=100)


if __name__ == "__main__":
    command_line(__doc__, run, page, "utility.md", add_options)
