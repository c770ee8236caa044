"""Local epochs: the suite's attacks beside a plain unrolled attack, on the same weight differences.

    GRADVEIL_DATA=… python benchmarks/local_epochs.py run
    python benchmarks/local_epochs.py write

Clients pass twice over 16 images, in mini-batches of 4. The plain attack simulates all their steps by autograd: cosine, total
variation, signed Adam. It gets the CPU seconds that the quick budget allows a search.
`run` does the audits that are not stored yet. `write` puts all stored ones into docs/results/local_epochs.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from stored_parts import command_line, commands, table
from torch import Tensor

from gradveil.attacks import Answer, Attack, Target, attack
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

CLIENT: dict[str, object] = {"data": "cifar10", "model": "flower-cnn", "batch_size": 16, "victims": 2, "defenses": ["none"]}
CLIENT |= {"local_epochs": 2, "local_batch_size": 4}
MOMENTUM = "sgd:momentum=0.9"
AUDITS: dict[str, dict[str, object]] = {
    "momentum-0.01": {"local_optimizer": MOMENTUM, "local_lr": 0.01},
    "momentum-0.1": {"local_optimizer": MOMENTUM, "local_lr": 0.1},
    "adam-0.001": {"local_optimizer": "adam", "local_lr": 1e-3},
}
SUITE = {"momentum-0.01": ["features"], "momentum-0.1": ["features"], "adam-0.001": ["swift"]}  # the strongest of the suite


@attack("plain-unrolled")
class PlainUnrolled(Attack):
    """All local steps by autograd, in the order of the images; what a reader of the papers would write first.

    Args:
        seconds: CPU seconds per victim.
        lr: step size of signed Adam, in units of normalized pixels.
        smooth: weight of total variation.
    Example: gradveil audit --attack plain-unrolled:seconds=60
    """

    seconds: float = Field(default=60.0, gt=0)
    lr: float = Field(default=0.1, gt=0)
    smooth: float = Field(default=1e-2, ge=0)

    def run(self, target: Target) -> Answer:
        images, scores = zip(*(self._one(target, victim) for victim in range(target.shape[0])), strict=True)
        return Answer(torch.stack(images), torch.stack(scores))

    def _one(self, target: Target, victim: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(target.shape[1:], generator=torch.Generator().manual_seed(0))
        return self.search(target, victim, noise, target.labels[victim])

    def search(self, target: Target, victim: int, start: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The images that fit best on the way from these, and their cosine distance."""
        low, high = target.pixel_range
        x = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], self.lr)
        begun, best, kept = time.process_time(), torch.tensor(torch.inf), x.detach().clone()
        while (used := (time.process_time() - begun) / self.seconds) < 1:
            optimizer.param_groups[0]["lr"] = self.lr * 0.1 ** sum(used > part for part in (0.375, 0.625, 0.875))
            with torch.enable_grad():
                distance = cosine_distance(target, victim, x, labels)
                smooth = (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
                (slope,) = torch.autograd.grad(distance + self.smooth * smooth, x)
            if distance < best:
                best, kept = distance.detach(), x.detach().clone()
            x.grad = slope.sign()
            optimizer.step()
            with torch.no_grad():
                x.copy_(torch.minimum(torch.maximum(x, low), high))
        return kept, best


def cosine_distance(target: Target, victim: int, x: Tensor, labels: Tensor) -> Tensor:
    """Between the update of these images and the one that was sent."""
    ours = target.model.updates(target.state, x[None], labels[None], target.training).values()
    sent = [t[victim] for t in target.updates().values()]
    return 1 - F.cosine_similarity(torch.cat([o.flatten() for o in ours]), torch.cat([t.flatten() for t in sent]), dim=0)


def run_one(audit: str, seed: int, seconds: float) -> dict[str, Any]:
    """Ours and the plain one, in audits of their own: each has its verdict."""
    settings = {**CLIENT, **AUDITS[audit], "seed": seed}
    ours = Case(make_spec({**settings, "attacks": SUITE[audit]}))
    plain = Case(make_spec({**settings, "attacks": [f"plain-unrolled:seconds={seconds}"]}))
    return {"command": ours.spec.command(), "seed": seed, "attacks": results(ours) | results(plain)}


def results(case: Case) -> dict[str, Any]:
    """What every attack of an audit got."""
    with tempfile.TemporaryDirectory(prefix="gradveil-") as name:
        run = run_audit(case, Execution(out=Path(name) / "run", workers=0))
        (undefended,) = run.summary.defenses
        seconds = {row.spec: RunFolder(run.folder).outcome(row.cell).cpu_seconds for row in undefended.attacks}
    attacks, images = {}, case.spec.victims * case.spec.batch_size
    for row in undefended.attacks:
        assert row.ok and row.identified is not None and row.psnr is not None, row.error
        attacks[row.spec.split(":")[0]] = {
            "images": images,
            "identified": round(row.identified.rate * images),
            "psnr": row.psnr.mean,
            "seconds": seconds[row.spec],
            "verdict": undefended.verdict,
        }
    return attacks


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options.store.mkdir(parents=True, exist_ok=True)
    CLIENT["victims"] = options.victims
    for name in options.audits:
        for seed in options.seeds:
            file = options.store / f"{name}-{seed}.json"
            if not file.exists():
                write_json(file, {"audit": name, **run_one(name, seed, options.seconds)})
                print(file.read_text(encoding="utf-8"), flush=True)


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# Local epochs", "")
    yield "Two epochs of mini-batches of 4 over 16 images of CIFAR-10, Flower's network, realistic adversary, quick budget."
    yield "`plain-unrolled` simulates all local steps and is what a reader of the papers would write first. Every attack was"
    yield "audited by itself, on the same updates. Seconds are CPU seconds per batch, on one thread."
    yield from table(("audit", "attack", "seeds", "identified", "PSNR", "seconds per batch", "verdicts"), rows(parts))
    firsts = dict.fromkeys(part["command"] for part in parts.values() if part["seed"] == 100)
    yield from commands("The commands, for one seed each:", firsts)


def rows(parts: dict[str, dict[str, Any]]) -> Iterable[Iterable[object]]:
    """One per audit and attack, over all seeds."""
    for name in AUDITS:
        stored = [part for part in parts.values() if part["audit"] == name]
        for method in stored[0]["attacks"] if stored else ():
            cells = [part["attacks"][method] for part in stored]
            images = sum(c["images"] for c in cells)
            yield (
                name,
                f"`{method}`",
                ", ".join(str(part["seed"]) for part in stored),
                " + ".join(str(c["identified"]) for c in cells) + f" of {images}",
                f"{sum(c['psnr'] for c in cells) / len(cells):.1f} dB",
                f"{16 * sum(c['seconds'] for c in cells) / images:.1f}",
                ", ".join(sorted({c["verdict"] for c in cells})),
            )


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--audits", nargs="+", choices=AUDITS, default=list(AUDITS))
    running.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])
    running.add_argument("--victims", type=int, default=2)
    running.add_argument("--seconds", type=float, default=60.0, help="CPU seconds of the plain attack per batch")


if __name__ == "__main__":
    command_line(__doc__, run, page, "local_epochs.md", add_options)
