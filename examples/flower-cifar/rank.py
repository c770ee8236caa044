"""Which defense to put into the one line: what each leaves to a curious server, and what it costs.

    python rank.py [--victims 8] [--out runs/flower-cifar-rank]

Privacy is an audit of the app's network on single images: the standard suite, the counters of each defense included.
Cost is the app's own training (ten clients, ten rounds) without Flower around it. The best defense is the one that gives
away least among those that cost at most three points of test accuracy. If all of them leak, larger batches and more local
steps are tried without a defense, to see where the leak stops. Every part is kept in OUT and taken up where it stopped.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from flower_cifar.task import choose_data, dataset, network
from local import HERE

import gradveil as gv
from gradveil.federation import FederationPlan, train
from gradveil.summary import DefenseRow

CANDIDATES = ("gaussian:std=0.003", "gaussian:std=0.01", "prune:ratio=0.9", "prune:ratio=0.99")
MOST = 3.0  # points of test accuracy
WIDER = ({"batch_size": 4}, {"batch_size": 16}, {"local_steps": 5}, {"batch_size": 16, "local_steps": 5})
CONFIG = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def accuracy(line: str, rounds: int, out: Path) -> float:
    history = train(
        network(),
        dataset(),
        line,
        FederationPlan(
            rounds=rounds,
            images_per_client=min(CONFIG["images"], len(dataset().private) // 10),
            local_epochs=CONFIG["local-epochs"],
            batch_size=CONFIG["batch-size"],
            lr=CONFIG["lr"],
            evaluate_every=rounds,
        ),
        folder=out / "training" / line.replace(":", "-"),
    )
    return 100 * (history.acc_test[-1] or 0.0)


def audit(lines: list[str], victims: int, out: Path, **how: Any) -> dict[str, DefenseRow]:
    report = gv.audit(
        data=dataset(), model=network(), defenses=lines, attacks="standard", victims=victims, seed=100, out=out, **how
    )
    return {row.spec: row for row in report.summary.defenses}


def measured(row: DefenseRow) -> dict[str, Any]:
    if row.worst is None or row.worst.psnr is None:
        raise SystemExit(f"no attack ran on {row.spec}")
    return {"identified": row.worst.identified.model_dump(), "psnr": row.worst.psnr.mean, "verdict": row.verdict}


def told(row: DefenseRow) -> str:
    numbers = measured(row)
    return f"identified {numbers['identified']['rate']:.0%}, PSNR {numbers['psnr']:.1f} dB: {numbers['verdict']}"


def rank(victims: int, rounds: int, out: Path) -> None:
    lines = ["none", *CANDIDATES]
    points = {line: accuracy(line, rounds, out) for line in lines}
    audited = audit(lines, victims, out / "audit", local_lr=CONFIG["lr"])
    rows: list[dict[str, Any]] = []
    for line in lines:
        row = audited[line]
        rows.append(
            {"line": line, "accuracy": round(points[line], 1), "loss": round(points["none"] - points[line], 1), **measured(row)}
        )
        print(f"{line:>20}: {points[line]:.1f}% accuracy, {told(row)}", flush=True)
    fit = [row for row in rows[1:] if row["loss"] <= MOST]
    best = min(fit, key=lambda row: (row["identified"]["rate"], row["psnr"]), default=None)
    result: dict[str, Any] = {"data": dataset().name, "rows": rows, "best": best and best["line"]}
    if best and best["verdict"] != "leaks":
        print(f"best at a loss of at most {MOST:g} points: {best['line']}, {best['verdict']}")
    else:
        outcome = f"best at a loss of at most {MOST:g} points is {best['line']}, and it leaks" if best else "none is cheap"
        print(f"{outcome}; without a defense, with larger batches and more steps:")
        result["wider"] = []
        for how in WIDER:
            name = "-".join(f"{key}-{value}" for key, value in how.items())
            row = audit(["none"], victims, out / name, local_lr=CONFIG["lr"], **how)["none"]
            result["wider"].append({**how, **measured(row)})
            print(f"  {name}: {told(row)}", flush=True)
    (out / "rank.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="of the training")
    parser.add_argument("--out", type=Path, default=Path("runs/flower-cifar-rank"))
    parser.add_argument("--data", help="in place of CIFAR-10, such as mnist-5k, which is embedded")
    options = parser.parse_args()
    choose_data(options.data)
    rank(options.victims, options.rounds, options.out.resolve())
