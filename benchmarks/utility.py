"""Write docs/results/utility.md: what each defense costs in accuracy and time, in a federation of ten clients.

    python benchmarks/utility.py mnist-5k --seeds 3
    python benchmarks/utility.py cifar10 --images-per-client 500 --rounds 15

Every run is kept in `--work` and taken up again where it stopped. PDM is the loss of test accuracy against the
undefended run with the same seed, in points. Crafting defenses, whose every step costs seconds, defend one client of
ten; they and LODA, which obscures all images first, are run with one seed. Times are CPU seconds of a single step, taken
apart from the trainings, so that they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

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


def _name(defense: str) -> str:
    return defense.partition(":")[0]


def one(job: dict[str, Any]) -> dict[str, Any]:
    """One federation, or what it left behind the last time."""
    import torch

    from gradveil import models
    from gradveil.data import load
    from gradveil.federation import FederationPlan, train

    torch.set_num_threads(1)
    data = load(job["data"], seed=job["seed"])
    module = models.build(job["model"], input_shape=data.input_shape, num_classes=data.num_classes, seed=job["seed"])
    folder = Path(job["work"]) / "-".join(
        str(job[k]).replace(":", "_") for k in ("data", "model", "defense", "rounds", "seed", "images", "defended")
    )
    history = train(
        module,
        data,
        job["defense"],
        FederationPlan(
            rounds=job["rounds"],
            images_per_client=job["images"],
            lr=job["lr"],
            defended=job["defended"],
            seed=job["seed"],
            evaluate_every=5,
            cosine_every=job["rounds"] - 1 if job["defense"] != "none" else 0,
        ),
        cache=Path(job["work"]) / "cache",
        folder=folder,
    )
    print(f"{job['defense']:>18} seed {job['seed']}: {100 * (history.acc_test[-1] or 0):.1f}%", flush=True)
    return {**job, **history.to_json(), "step": step_seconds(job, module, data)}


def step_seconds(job: dict[str, Any], module: Any, data: Any) -> float:
    """CPU seconds in which a client makes one update of 64 images, the least of three, or of one where it is slow."""
    from gradveil.client import prepare_client
    from gradveil.core.gradients import ModelFunction
    from gradveil.core.types import LocalTraining
    from gradveil.defenses import Setup, parse
    from gradveil.storage.files import write_json

    name = "-".join(str(job[k]).replace(":", "_") for k in ("data", "model", "defense"))
    kept = Path(job["work"]) / f"{name}-step.json"
    if not kept.exists():
        defense, batch = parse(job["defense"]), data.private[:64]
        function = ModelFunction(defense.model(module, data.input_shape))
        public = data.public if len(data.public) else None
        setup = Setup(data.task(function), function.state(), batch, public)
        client = prepare_client(defense, LocalTraining(), setup)
        protected, _ = client.protect(function.state(), batch)  # what is done once is done now
        spent: list[float] = []
        while len(spent) < 3 and sum(spent) < 2:
            begun = time.process_time()
            client.round(function.state(), batch, len(spent), protected=protected)
            spent.append(time.process_time() - begun)
        write_json(kept, {"seconds": min(spent)})
    return float(json.loads(kept.read_text())["seconds"])


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
    given = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    jobs = [
        {
            **{"data": given.data, "model": given.model, "defense": defense, "rounds": given.rounds, "lr": given.lr},
            **{"images": given.images_per_client, "seed": seed, "work": str(given.work)},
            "defended": 1 if _name(defense) in given.single else "all",
        }
        for defense in dict.fromkeys(["none", *given.only])
        for seed in range(1 if _name(defense) in COSTLY else given.seeds)
    ]
    given.work.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.workers) as pool:
        rows = list(pool.map(one, sorted(jobs, key=lambda j: j["defended"] == "all")))
    write(rows, given)


def write(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """The table of this data set, beside those of the others that are already in the page."""
    known = given.work / "tables.json"
    tables = json.loads(known.read_text()) if known.exists() else {}
    tables[given.data] = table(rows, given)
    known.write_text(json.dumps(tables))
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
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join([*head, *(line for t in tables.values() for line in ("", *t))]) + "\n")
    print(f"written: {given.out}")


def table(rows: list[dict[str, Any]], given: argparse.Namespace) -> list[str]:
    base = {r["seed"]: r for r in rows if r["defense"] == "none"}
    lines = [
        f"## {given.data}, `{given.model}`",
        "",
        f"{given.images_per_client} images a client, {given.rounds} rounds, one local epoch, batches of 64, "
        f"learning rate {given.lr}.",
        "",
        "| defense | defended | seeds | test | train | PDM | goal | cosine, first → last round | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for defense in dict.fromkeys(r["defense"] for r in sorted(rows, key=lambda r: r["defense"] != "none")):
        mine = [r for r in rows if r["defense"] == defense]
        loss = [100 * (base[r["seed"]]["acc_test"][-1] - r["acc_test"][-1]) for r in mine]
        cosines = [[c for c in r["gradient_cosine"] if c is not None] for r in mine]
        seen = [c for c in cosines if c]
        goal, slower = GOALS.get(_name(defense)), mine[0]["step"] / base[0]["step"]
        lines.append(
            f"| `{defense}` | {'1 of 10' if mine[0]['defended'] == 1 else 'all'} | {len(mine)} "
            f"| {spread([100 * r['acc_test'][-1] for r in mine])} | {spread([100 * r['acc_train'][-1] for r in mine])} "
            f"| {spread(loss)} | {f'≤ {goal:.0f}: ' + ('met' if mean(loss) <= goal else 'missed') if goal else ''} "
            f"| {f'{mean(c[0] for c in seen):.2f} → {mean(c[-1] for c in seen):.2f}' if seen else ''} | {slower:.1f}× |"
        )
    return lines


def spread(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
