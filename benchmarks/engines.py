"""Write docs/results/flower.md: the same federated training by both engines, round by round.

    python benchmarks/engines.py [--work runs/engines] [--only prune:ratio=0.7]

Every run is `gradveil train` as a user types it. It is kept in `--work` and resumed where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from gradveil.federation import History

CASES = {  # the options of the training beside data, model and engine
    "prune:ratio=0.7": "--rounds 10 --local-epochs 2",
    "precode": "--rounds 3 --local-epochs 2",
    "dcs2:steps=100": "--rounds 2 --defended 1",  # with the 1,000 steps of the paper a round takes minutes
}
ENGINES = ("inline", "flower")


def run(defense: str, engine: str, work: Path) -> History:
    folder = work / f"{defense.replace(':', '-')}-{engine}"
    options = ["--data", "mnist-5k", "--model", "cnn", "--defense", defense, "--clients", "10", *CASES[defense].split()]
    command = [sys.executable, "-m", "gradveil", "train", *options, "--engine", engine, "--out", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return History.from_json(json.loads((folder / "history.json").read_text()), {})


def section(defense: str, histories: dict[str, History]) -> list[str]:
    inline, flower = (histories[engine] for engine in ENGINES)
    gaps = [100 * abs((a or 0) - (b or 0)) for a, b in zip(inline.acc_test, flower.acc_test, strict=True)]
    lines = [
        f"## `{defense}`",
        "",
        f"`gradveil train --data mnist-5k --model cnn --defense {defense} --clients 10 {CASES[defense]} --engine …`",
        "",
        "| round | " + " | ".join(str(i + 1) for i in range(inline.rounds)) + " | seconds: prepare + rounds |",
        "|---" * (inline.rounds + 2) + "|",
    ]
    for engine in ENGINES:
        history = histories[engine]
        curve = " | ".join(f"{100 * (a or 0):.1f}" for a in history.acc_test)
        lines.append(f"| {engine} | {curve} | {history.seconds_prepare:.1f} + {sum(history.seconds_per_round):.1f} |")
    events = sum(len(history.events) for history in histories.values())
    return [*lines, "", f"Largest difference in a round: {max(gaps):.2f} points. Events: {events}.", ""]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    arguments.add_argument("--work", type=Path, default=Path("runs/engines"))
    arguments.add_argument("--out", type=Path, default=Path("docs/results/flower.md"))
    options = arguments.parse_args()
    lines = [
        "# Two engines, one round",
        "",
        "Written by `benchmarks/engines.py`. Test accuracy in percent after every round, 10 clients, seed 0, one thread each.",
        "The engines share the definition of a round. All randomness is drawn from (seed, client, round), so the curves are",
        "equal, not only near. Flower's preparation is the start of Ray and of its actors. Seconds are those of a machine",
        "that did other work besides: an order of magnitude, no comparison.",
        "",
        f"Python {platform.python_version()}, flwr {version('flwr')}, ray {version('ray')}, {os.cpu_count()} processors.",
        "",
    ]
    for defense in options.only:
        lines += section(defense, {engine: run(defense, engine, options.work) for engine in ENGINES})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines).rstrip() + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
