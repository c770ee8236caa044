"""Batches read apart: undefended audits of fully connected, convolutional and transformer networks, several seeds each.

    GRADVEIL_DATA=… python benchmarks/batches.py run
    python benchmarks/batches.py write

`run` does the audits that are not stored yet. `write` puts all stored ones into docs/results/batches.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from stored_parts import command_line, commands, table
from torch import Tensor, nn

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

EXACT = 60.0  # dB from which an image counts as read exactly
AUDITS: dict[str, dict[str, object]] = {
    f"smlp-{data}-{size}": {"data": data, "model": "smlp", "batch_size": size, "victims": 4, "attacks": ["linear"]}
    for data in ("mnist-5k", "cifar10")
    for size in (4, 8, 12, 32)
}
AUDITS |= {
    f"softmax-{data}-{size}": {
        "data": data,
        "model": f"batches:softmax_{data[:5]}",
        "batch_size": size,
        "victims": 4,
        "attacks": ["linear"],
        "defenses": ["clip:norm=0.01"],
    }
    for data in ("mnist-5k", "cifar10")
    for size in (4, 8)
}
FLOWER: dict[str, object] = {"data": "cifar10", "model": "flower-cnn", "attacks": ["features"]}
AUDITS |= {
    "flower-cnn-1": {**FLOWER, "batch_size": 1, "victims": 16},
    "flower-cnn-8": {**FLOWER, "batch_size": 8, "victims": 2, "defenses": ["clip", "soteria"]},
    "flower-cnn-8-trained": {**FLOWER, **{"batch_size": 8, "victims": 2, "defenses": ["clip", "soteria"], "trained_epochs": 8}},
    # By Adam: after 8 epochs of SGD at the default rate some networks have learnt little, and few of their features are active.
    "flower-cnn-8-adam": {
        **{**FLOWER, "batch_size": 8, "victims": 2, "defenses": ["clip", "soteria"]},
        **{"trained_epochs": 8, "trained_by": "adam:lr=0.001", "trained_under": "none"},
    },
    "flower-quickstart": {"preset": "flower-quickstart", "victims": 4, "defenses": ["none"], "attacks": ["features"]},
}
AUDITS |= {
    "vit-1": {"data": "cifar10", "model": "vit", "victims": 16, "attacks": ["april"]},
    "vit-mean-1": {"data": "cifar10", "model": "vit:pool=mean", "victims": 16, "attacks": ["april"]},
    "own-vit-1": {"data": "cifar10", "model": "batches:own_vit", "victims": 16, "attacks": ["april"]},
    "vit-patch8-1": {"data": "cifar10", "model": "vit:patch=8", "victims": 16, "attacks": ["token-span"]},
    "vit-patch8-2": {
        "data": "cifar10",
        "model": "vit:patch=8",
        "batch_size": 2,
        "victims": 4,
        "attacks": ["patch-span", "swift"],
    },
    "vit-patch8-4": {
        "data": "cifar10",
        "model": "vit:patch=8",
        "batch_size": 4,
        "victims": 4,
        "attacks": ["patch-span", "swift"],
    },
}


def softmax_mnist() -> nn.Module:
    """Softmax regression on pixels: nothing but a classifier."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def softmax_cifar() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))


def own_vit() -> nn.Module:
    """A transformer that somebody wrote with PyTorch's encoder layer as it comes: norms last, ReLU, dropout."""
    return OwnViT()


class OwnViT(nn.Module):
    def __init__(self, width: int = 96, side: int = 4):
        super().__init__()
        self.patches, patches = nn.Unfold(side, stride=side), (32 // side) ** 2
        self.embed, self.position = nn.Linear(3 * side * side, width), nn.Parameter(0.02 * torch.randn(patches, width))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 192, batch_first=True), 2)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.encoder(self.embed(self.patches(x).mT) + self.position).mean(1))
        return scores


def run_one(settings: dict[str, object], seed: int) -> dict[str, Any]:
    case = Case(make_spec({"defenses": ["none"], **settings, "seed": seed}))
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        run = run_audit(case, Execution(out=Path(folder) / "run", workers=0))
        attacked = [cell for cell in make_plan(case) if cell.kind == "attack"]
        seconds = {(c.defense, c.attack): RunFolder(run.folder).outcome(c.key).cpu_seconds for c in attacked}
        summary = run.summary
    rows = {}
    for row in summary.defenses:
        assert row.worst is not None and row.best is not None
        quality: dict[int, list[float]] = {}
        for image in row.worst.by_victim:
            quality.setdefault(image.victim, []).append(image.psnr)
        images = sum(map(len, quality.values()))
        rows[row.spec] = {
            "images": images,
            "identified": round(row.worst.identified.rate * images),
            "psnr": row.worst.psnr.mean,
            "exact": sum(value >= EXACT for values in quality.values() for value in values),
            "exact_batches": sum(min(values) >= EXACT for values in quality.values()),
            "batches": len(quality),
            "verdict": row.verdict,
            "attack": row.best.spec,
            "seconds": seconds[row.spec, row.best.spec],
        }
    return {"command": case.spec.command(), "seed": seed, "defenses": rows}


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.audits:
        for seed in options.seeds:
            file = options.store / f"{name}-{seed}.json"
            if not file.exists():
                write_json(file, {"audit": name, **run_one(AUDITS[name], seed)})
                print(file.read_text(encoding="utf-8"), flush=True)


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# Batches read apart", "")
    yield "Closed forms (`linear`, `april`, `token-span`), inverted features (`features`) and searches in the span of patches"
    yield f"(`patch-span`), realistic adversary, quick budget. Exact: at least {EXACT:.0f} dB. Seconds are CPU seconds of the"
    yield "strongest attack per batch, on one thread."
    head = ("audit", "defense", "seeds", "exact images", "exact batches", "identified", "PSNR", "seconds per batch", "verdicts")
    yield from table(head, rows(parts))
    firsts = dict.fromkeys(part["command"] for part in parts.values() if part["seed"] == 100)
    yield from commands("The commands, for one seed each:", firsts)


def rows(parts: dict[str, dict[str, Any]]) -> Iterable[Iterable[object]]:
    """One per audit and defense, over all seeds."""
    for name in AUDITS:
        stored = [part for part in parts.values() if part["audit"] == name]
        for defense in stored[0]["defenses"] if stored else ():
            cells = [part["defenses"][defense] for part in stored]
            images, batches = (sum(c[column] for c in cells) for column in ("images", "batches"))
            yield (
                name,
                f"`{defense}`",
                ", ".join(str(part["seed"]) for part in stored),
                f"{sum(c['exact'] for c in cells)} of {images}",
                f"{sum(c['exact_batches'] for c in cells)} of {batches}",
                " + ".join(str(c["identified"]) for c in cells) + f" of {images}",
                f"{sum(c['psnr'] for c in cells) / len(cells):.1f} dB",
                f"{sum(c['seconds'] for c in cells) / batches:.1f}",
                ", ".join(sorted({c["verdict"] for c in cells})),
            )


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--audits", nargs="+", choices=AUDITS, default=list(AUDITS))
    running.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])


if __name__ == "__main__":
    command_line(__doc__, run, page, "batches.md", add_options)
