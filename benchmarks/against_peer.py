"""What the quick suite identifies beside `breaching`: same updates, same labels, same CPU seconds, in one run.

    GRADVEIL_DATA=… python benchmarks/against_peer.py run --settings flower-cnn-1 --seeds 100 101 102
    python benchmarks/against_peer.py write

For each setting and seed the suite attacks undefended updates, and its CPU seconds are counted. The peer (Inverting Gradients
with its own settings) then gets the same number of CPU seconds per update, and the labels that our side inferred. Both are
scored by the same audit. `write` puts all stored parts into docs/results/peer.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_process import PEER, PeerProcess
from stored_parts import command_line, commands, table

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.settings import settings
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

# Evaluation mode, which the peer takes for a model with BatchNorm whose statistics are known.
SETTINGS: dict[str, dict[str, object]] = {
    "flower-cnn-1": {"model": "flower-cnn", "victims": 8, "batch_size": 1},
    "flower-cnn-8": {"model": "flower-cnn", "victims": 2, "batch_size": 8},
    "resnet18-1": {"model": "resnet18", "victims": 4, "batch_size": 1},
    "convnet-1": {"model": "convnet", "victims": 4, "batch_size": 1},
}


@settings
class Peer(Attack):
    """`breaching` on the same updates, for so many CPU seconds each."""

    seconds: float
    model: str

    def run(self, target: Target) -> Answer:
        images, spent = [], 0.0
        with tempfile.TemporaryDirectory(prefix="gradveil-") as name:
            folder = Path(name)
            process = PeerProcess(folder)
            for observation, labels in zip(target.observations, target.hard_labels, strict=True):
                arrays = {f"state.{n}": t.numpy() for n, t in observation.state.items()}
                arrays |= {f"gradient.{n}": t.numpy() for n, t in observation.update.tensors.items()}
                task = target.task
                mean, std = task.normalize(torch.zeros(task.input_shape)), task.normalize(torch.ones(task.input_shape))
                scale = 1 / (std - mean)[:, 0, 0]
                arrays |= {"labels": labels.numpy(), "mean": (-mean[:, 0, 0] * scale).numpy(), "std": scale.numpy()}
                np.savez(folder / "update.npz", **arrays)
                request = {"update": str(folder / "update.npz"), "out": str(folder / "out.npz"), "seconds": self.seconds}
                about = {"model": self.model, "shape": list(task.input_shape), "classes": task.num_outputs}
                spent += float(process.ask({**request, **about})["seconds"])
                with np.load(folder / "out.npz", allow_pickle=False) as file:
                    images.append(torch.from_numpy(file["images"]))
            process.close()
        self.spent.append(spent)
        return Answer(torch.stack(images), torch.zeros(len(images)))

    @property
    def spent(self) -> list[float]:
        return SPENT


SPENT: list[float] = []  # CPU seconds of the peer, of every run


def run_one(name: str, seed: int) -> dict[str, Any]:
    common = {"data": "cifar10", "defenses": ["none"], "mode": "eval", "line_up": 0, "seed": seed}
    values = {**SETTINGS[name], **common}
    case = Case(make_spec(values))
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        run = run_audit(case, Execution(out=Path(folder) / "ours", workers=0))
        cells = [RunFolder(run.folder).outcome(cell.key) for cell in make_plan(case) if cell.kind == "attack"]
        ours = run.summary.defenses[0]
        seconds = sum(cell.cpu_seconds or 0.0 for cell in cells)
        peer = Peer(seconds=seconds / case.spec.victims, model=str(case.spec.model))
        other = Case(make_spec({**values, "attacks": [peer]}))
        theirs = run_audit(other, Execution(out=Path(folder) / "peer", workers=0)).summary.defenses[0]
    images = case.spec.victims * case.spec.batch_size

    def facts(row: Any, seconds: float) -> dict[str, Any]:
        assert row.worst is not None and row.worst.identified is not None
        identified = round(row.worst.identified.rate * images)
        return {"identified": identified, "psnr": row.worst.psnr.mean, "seconds": seconds, "verdict": row.verdict}

    return {
        "setting": name,
        "seed": seed,
        "images": images,
        "command": case.spec.command(),
        "ours": facts(ours, seconds),
        "peer": facts(theirs, SPENT[-1]),
        "attacks": {cell.attack: [cell.status, cell.cpu_seconds] for cell in cells},
    }


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.settings:
        for seed in options.seeds:
            file = options.store / f"{name}-{seed}.json"
            if not file.exists():
                part = run_one(name, seed)
                write_json(file, part)
                print(name, seed, part["ours"], part["peer"], flush=True)


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# The quick suite beside a peer", "")
    yield f"The peer is `{PEER}`, Inverting Gradients with its own settings, on the same updates of an untrained model in"
    yield "evaluation mode, undefended, with the labels that the suite inferred, for the same number of CPU seconds."
    yield "Identified: the image is nearer to an answer than every other image of its class that was held back."
    head = ("setting", "seed", "images", "identified", "by the peer", "PSNR", "peer", "CPU seconds", "peer")
    yield from table(head, map(row, parts.values()))
    yield from commands("The commands of our side:", (part["command"] for part in parts.values()))


def row(part: dict[str, Any]) -> Iterable[object]:
    ours, peer = part["ours"], part["peer"]
    yield from (part["setting"], part["seed"], part["images"], ours["identified"], peer["identified"])
    yield from (f"{ours['psnr']:.1f}", f"{peer['psnr']:.1f}", f"{ours['seconds']:.0f}", f"{peer['seconds']:.0f}")


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    running.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])


if __name__ == "__main__":
    command_line(__doc__, run, page, "peer.md", add_options)
