"""Write docs/results/utility.md: what each defense costs in accuracy and time, in a federation of ten clients.

    python benchmarks/utility.py mnist-5k --seeds 3
    python benchmarks/utility.py cifar10 --images-per-client 500 --rounds 15

Every run is kept in `--work` and resumed where it stopped. PDM is the loss of test accuracy against the undefended run
with the same seed, in points. Crafting defenses, whose every step costs seconds, defend one client of ten; they and
LODA, which obscures all images first, are run with one seed. Times are CPU seconds of a single step, measured apart from
the trainings, so that they do not depend on other work of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

from gradveil import models
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.data import DataSet, load
from gradveil.defenses import Setup, parse
from gradveil.federation import FederationPlan, History, train
from gradveil.storage.files import write_json

SETTINGS = (
    "none",
    "prune:ratio=0.9",
    "gaussian:std=0.1",
    "laplace:scale=0.1",
    "clip",
    "quantize",
    "dpsgd",
    "graddefense",
    "soteria",
    "mixup:k=4",
    "instahide:k=4",
    "precode",
    "ats",
    "loda",
)
CRAFTING = ("refiner", "dcs2")  # every step costs seconds: one client of ten
COSTLY = (*CRAFTING, "loda")  # one seed
GOALS = {"dcs2": 3.0, "refiner": 5.0, "precode": 5.0}


@dataclass(frozen=True)
class Job:
    """One federation."""

    data: str
    model: str
    defense: str
    rounds: int
    seed: int
    images: int  # per client
    defended: str | int
    lr: float
    work: Path

    def file(self, *fields: str) -> Path:
        """A path in the work folder, named by these fields."""
        return self.work / "-".join(str(getattr(self, name)).replace(":", "_") for name in fields)


@dataclass(frozen=True)
class Run:
    """A finished federation, and the CPU seconds of one step of a defended client."""

    job: Job
    history: History
    step: float

    @property
    def accuracy(self) -> float:
        return 100 * (self.history.acc_test[-1] or 0)


def method(defense: str) -> str:
    return defense.partition(":")[0]


def train_once(job: Job) -> Run:
    """One federation, or the stored one of an earlier call."""
    torch.set_num_threads(1)
    data = load(job.data, seed=job.seed)
    module = models.build(job.model, input_shape=data.input_shape, num_classes=data.num_classes, seed=job.seed)
    plan = FederationPlan(
        rounds=job.rounds,
        images_per_client=job.images,
        lr=job.lr,
        defended=job.defended,
        seed=job.seed,
        evaluate_every=5,
        cosine_every=job.rounds - 1 if job.defense != "none" else 0,
    )
    folder = job.file("data", "model", "defense", "rounds", "seed", "images", "defended")
    history = train(module, data, job.defense, plan, cache=job.work / "cache", folder=folder)
    history.state = {}  # not sent to the parent process
    run = Run(job, history, step_seconds(job, module, data))
    print(f"{job.defense:>18} seed {job.seed}: {run.accuracy:.1f}%", flush=True)
    return run


def step_seconds(job: Job, module: nn.Module, data: DataSet) -> float:
    """CPU seconds in which a client makes one update of 64 images: the least of three, or one if that is slow."""
    path = job.file("data", "model", "defense")
    stored = path.with_name(f"{path.name}-step.json")
    if not stored.exists():
        defense, batch = parse(job.defense), data.private[:64]
        function = ModelFunction(defense.model(module, data.input_shape))
        setup = Setup(data.task(function), function.state(), batch, data.public or None)
        client = prepare_client(defense, LocalTraining(), setup)
        protected, _ = client.protect(function.state(), batch)  # done once, and so not timed
        seconds: list[float] = []
        while len(seconds) < 3 and sum(seconds) < 2:
            began = time.process_time()
            client.round(function.state(), batch, len(seconds), protected=protected)
            seconds.append(time.process_time() - began)
        write_json(stored, {"seconds": min(seconds)})
    return float(json.loads(stored.read_text())["seconds"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("data")
    arguments.add_argument("--model", default="cnn")
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--lr", type=float, default=0.05)
    arguments.add_argument("--images-per-client", type=int, default=200)
    arguments.add_argument("--seeds", type=int, default=1, help="so many for all but the costly defenses")
    arguments.add_argument("--single", nargs="*", default=CRAFTING, help="those that defend one client of ten")
    arguments.add_argument("--only", nargs="*", default=[*SETTINGS, *CRAFTING])
    arguments.add_argument("--workers", type=int, default=os.cpu_count())
    arguments.add_argument("--work", type=Path, default=Path("runs/utility"))
    arguments.add_argument("--out", type=Path, default=Path("docs/results/utility.md"))
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    jobs = [
        Job(
            data=options.data,
            model=options.model,
            defense=defense,
            rounds=options.rounds,
            seed=seed,
            images=options.images_per_client,
            defended=1 if method(defense) in options.single else "all",
            lr=options.lr,
            work=options.work,
        )
        for defense in dict.fromkeys(["none", *options.only])
        for seed in range(1 if method(defense) in COSTLY else options.seeds)
    ]
    options.work.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.workers) as pool:
        runs = list(pool.map(train_once, sorted(jobs, key=lambda job: job.defended == "all")))
    write(runs, options)


def write(runs: list[Run], options: argparse.Namespace) -> None:
    """The table of this data set, beside those of the others that are already in the page."""
    stored = options.work / "tables.json"
    tables = json.loads(stored.read_text()) if stored.exists() else {}
    tables[options.data] = table(runs, options)
    stored.write_text(json.dumps(tables))
    head = [
        "# What a defense costs",
        "",
        "Written by `benchmarks/utility.py`. Ten clients, FedAvg, in one process. PDM is the loss of test accuracy",
        "against no defense with the same seed, in points. The cosine is that of the first defended client's update to",
        "its undefended one, in the first round (untrained) and in the last (trained). Time is that of a defended",
        "client's step, 64 images, relative to none, in CPU seconds; what a defense does once, before the training, is",
        "not in it.",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores.",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join([*head, *(line for t in tables.values() for line in ("", *t))]) + "\n")
    print(f"written: {options.out}")


def table(runs: list[Run], options: argparse.Namespace) -> list[str]:
    undefended = {r.job.seed: r for r in runs if r.job.defense == "none"}
    lines = [
        f"## {options.data}, `{options.model}`",
        "",
        f"{options.images_per_client} images per client, {options.rounds} rounds, one local epoch, batches of 64, "
        f"learning rate {options.lr}.",
        "",
        "| defense | defended | seeds | test | train | PDM | goal | cosine, first → last round | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for defense in dict.fromkeys(r.job.defense for r in sorted(runs, key=lambda r: r.job.defense != "none")):
        seeds = [r for r in runs if r.job.defense == defense]
        loss = [undefended[r.job.seed].accuracy - r.accuracy for r in seeds]
        cosines = [c for r in seeds if (c := [value for value in r.history.gradient_cosine if value is not None])]
        goal, slower = GOALS.get(method(defense)), seeds[0].step / undefended[0].step
        verdict = f"≤ {goal:.0f}: {'met' if mean(loss) <= goal else 'missed'}" if goal else ""
        cosine = f"{mean(c[0] for c in cosines):.2f} → {mean(c[-1] for c in cosines):.2f}" if cosines else ""
        lines.append(
            f"| `{defense}` | {'1 of 10' if seeds[0].job.defended == 1 else 'all'} | {len(seeds)} "
            f"| {spread([r.accuracy for r in seeds])} | {spread([100 * (r.history.acc_train[-1] or 0) for r in seeds])} "
            f"| {spread(loss)} | {verdict} | {cosine} | {slower:.1f}× |"
        )
    return lines


def spread(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
