"""Networks with BatchNorm in training mode and with GroupNorm: what the suite gets of batches, and what stands in the way.

    GRADVEIL_DATA=… python benchmarks/norms.py run --runs FOLDER
    python benchmarks/norms.py write

Where the suite does not get the images, two numbers tell why. The distance: cosine distance of the best answer's update from
the one that was sent; that of the true images is 0. The basin: descents that begin at the true images under noise, which no
adversary has, tell how near a start must be. A distance near 0 at wrong images would say that the update does not fix them; a
large one, with descents that come nearer to the truth only from next to it, says that the search fails, not the information.
`run` does the audits that are not stored yet. `write` puts all stored ones into docs/results/norms.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from local_epochs import PlainUnrolled, cosine_distance
from stored_parts import command_line, commands, table
from torch import Tensor

from gradveil.attacks import Answer, Attack, Target, attack
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.types import Batch
from gradveil.metrics import psnr
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

BATCHES: dict[str, object] = {"data": "cifar10", "defenses": ["none"], "batch_size": 4, "victims": 4, "mode": "train"}
BATCHES |= {"pictures": "shown"}
SINGLE = {**BATCHES, "batch_size": 1, "victims": 16}
AUDITS: dict[str, dict[str, object]] = {
    "resnet20-4": {**BATCHES, "model": "resnet20:width=8"},
    "resnet20-4-statistics": {**BATCHES, "model": "resnet20:width=8", "sends_statistics": True},
    "resnet18-4": {**BATCHES, "model": "resnet18"},
    # Its line-up, which needs no statistics, is that of the audit above.
    "resnet18-4-statistics": {**BATCHES, "model": "resnet18", "sends_statistics": True, "line_up": 0},
    "groupnorm-gelu-1": {**SINGLE, "model": "networks:group_norm"},
    "groupnorm-gelu-4": {**BATCHES, "model": "networks:group_norm"},
}
READING = (
    "With BatchNorm in training mode and ReLU the update turns far within noise that nobody sees: at 40 dB, one hundredth of",
    "the range of pixels, its cosine distance is a third. Descents of 8 CPU seconds from there come no nearer to the images of",
    "the one batch that was tried, although the distance falls: it seems to be the search that stands in the way. Other images",
    "do not fit as well: at the answers the distance is far from 0. Statistics that are sent too raise the PSNR and identify",
    "nobody. The line-up needs no search and succeeds.",
    "",
    "Published boundaries: arXiv 2508.19819 finds clients in training mode safe from such attacks unless the network is",
    "shallow, wide and normalizes before activations. Here too nobody is identified on plain ResNets.",
    "Hatamizadeh et al. 2022 (arXiv 2202.06924) rebuild chest X-rays of 224 pixels where statistics are sent too; not so",
    "at this size here.",
    "",
    "With GroupNorm and GELU descents lead to the images from as far as 20 dB: a longer search has room. Of one batch of three",
    "the answers fit the update almost exactly (distance below .005) and show nobody: there it hardly fixes the images.",
)
STARTS = (60.0, 50.0, 40.0, 30.0, 20.0)  # PSNR of a start


TARGETS: list[Target] = []  # what `note-target` saw


@attack("note-target")
class NoteTarget(Attack):
    """Keeps what an attack is given, for descents outside of an audit. Finds nothing.

    Example: gradveil audit --attack note-target
    """

    def run(self, target: Target) -> Answer:
        TARGETS.append(target)
        return Answer(torch.zeros(target.shape), torch.zeros(target.shape[0]))


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.audits:
        for seed in options.seeds:
            file = options.store / f"{name}-{seed}.json"
            if not file.exists():
                write_json(file, {"audit": name, "seed": seed, **run_one(name, seed, options)})
                print(file.read_text(encoding="utf-8"), flush=True)


def run_one(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    case = Case(make_spec({**AUDITS[name], "seed": seed}))
    finished = run_audit(case, Execution(out=options.runs / f"{name}-{seed}", workers=options.workers))
    (row,) = finished.summary.defenses
    best, images = row.best, case.spec.victims * case.spec.batch_size
    assert best is not None and best.psnr is not None and best.identified is not None and row.worst is not None
    target = _target(name, seed)
    answer = RunFolder(finished.folder).tensors(best.cell)["reconstruction"][:1]
    found = cosine_distance(target, 0, target.normalize(answer[0]), target.labels[0])
    identified = row.worst.identified
    return {
        "command": case.spec.command(),
        "images": images,
        "verdict": row.verdict,
        "p": row.test.p if row.test else None,
        "identified": None if identified is None else round(identified.rate * images),
        "attack": best.spec,
        "psnr": best.psnr.mean,
        "line_up": None if row.line_up is None else {"ranks": list(row.line_up.ranks), "m": row.line_up.m},
        "distance": float(found),
        "basin": list(_basin(case.batch(0), target, options.seconds)) if seed == options.seeds[0] else [],
    }


def _target(name: str, seed: int) -> Target:
    """What an attack is given of the victims."""
    case = Case(make_spec({**AUDITS[name], "seed": seed, "attacks": ["note-target"], "line_up": 0}))
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        run_audit(case, Execution(out=Path(folder) / "run", workers=0))
    return TARGETS.pop()


def _basin(batch: Batch, target: Target, seconds: float) -> Iterable[dict[str, float]]:
    """Of the first victim: from how near the truth a plain descent ends where. Its first steps are shorter than the way."""
    noise = torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(0))
    for start in STARTS:
        away = 10 ** (-start / 20)
        near = (batch.x + away * noise).clamp(0, 1)
        before = cosine_distance(target, 0, target.normalize(near), batch.y)
        search = PlainUnrolled(seconds=seconds, lr=0.3 * away, smooth=0.0)
        end, after = search.search(target, 0, target.normalize(near), batch.y)
        ways = {"start": _psnr(near, batch.x), "end": _psnr(target.denormalize(end), batch.x)}
        yield {**ways, "before": float(before), "after": float(after)}


def _psnr(x: Tensor, truth: Tensor) -> float:
    return float(psnr(truth, x.clamp(0, 1)).mean())


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# Batches on networks with norms", "")
    yield "CIFAR-10, standard suite, quick budget, realistic adversary, one gradient in training mode per update, untrained"
    yield "networks. `statistics`: BatchNorm's running statistics are sent too. Line-up: batches whose image is the first of"
    yield "all candidates. The distance is the cosine distance of the best answer's update from the one that was sent; that of"
    yield "the true images is 0. The basin says where plain descents end that begin at the true images under noise, which no"
    yield "adversary has: PSNR at the start → at the end, and the distance likewise. Distances are of the first batch of each"
    yield "seed, the basin of that of the first seed."
    names = [name for name in AUDITS if any(part["audit"] == name for part in parts.values())]
    head = ("audit", "seeds", "identified", "p", "PSNR", "verdicts", "line-up", "distance", "basin")
    yield from table(head, (row([p for p in parts.values() if p["audit"] == name]) for name in names))
    yield from ("", *READING)
    yield from commands(
        "The commands, for one seed each:", dict.fromkeys(p["command"] for p in parts.values() if p["seed"] == 100)
    )


def row(stored: list[dict[str, Any]]) -> Iterable[str]:
    first, images = stored[0], sum(part["images"] for part in stored)
    yield f"`{first['audit']}`"
    yield ", ".join(str(part["seed"]) for part in stored)
    yield " + ".join(str(part["identified"]) for part in stored) + f" of {images}"
    yield ", ".join("" if part["p"] is None else f"{part['p']:.3f}" for part in stored)
    yield f"{sum(part['psnr'] for part in stored) / len(stored):.1f} dB"
    yield ", ".join(dict.fromkeys(part["verdict"] for part in stored))
    yield ", ".join(line_up(part["line_up"]) for part in stored)
    yield ", ".join(f"{part['distance']:.2f}" for part in stored)
    yield "; ".join(way(step) for part in stored for step in part["basin"])


def way(step: dict[str, float]) -> str:
    return f"{step['start']:.0f} → {step['end']:.0f} dB ({step['before']:.2f} → {step['after']:.2f})"


def line_up(risk: dict[str, Any] | None) -> str:
    return "" if risk is None else f"{sum(rank == 1 for rank in risk['ranks'])} of {len(risk['ranks'])}, m = {risk['m']}"


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--audits", nargs="+", choices=AUDITS, default=list(AUDITS))
    running.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])
    running.add_argument("--seconds", type=float, default=15.0, help="CPU seconds of a descent")
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--runs", type=Path, required=True, help="folder of the runs, to go on after an interruption")


if __name__ == "__main__":
    command_line(__doc__, run, page, "norms.md", add_options)
