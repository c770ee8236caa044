"""How often an audit raises a false alarm: an update that holds nothing of the victim must not be said to leak.

    python benchmarks/calibration.py --audits 60

Half of the null defenses send pure noise, half the update of another image of the same class. Every audit has another
seed, and so other victims and another model. Without a defense, every audit must say `leaks`. Writes
docs/results/calibration.md.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Setup, Step


class Noise(Defense):
    """Nothing but noise, as large as the update."""

    name = "noise-alone"
    random = True

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {n: t.std() * torch.randn(t.shape, generator=step.rng) if t.numel() > 1 else t for n, t in tensors.items()}


class Stranger(Defense):
    """The update of another image of the same class."""

    name = "stranger"
    random = True

    def prepare(self, setup: Setup) -> Batch:
        assert setup.public is not None
        return setup.public

    def batch(self, batch: Batch, step: Step) -> Batch:
        public: Batch = step.memory
        picks = []
        for label in batch.hard_labels:
            same_class = (public.hard_labels == label).nonzero().flatten()
            picks.append(same_class[torch.randint(len(same_class), (1,), generator=step.rng)])
        return Batch(public.x[torch.cat(picks)], batch.y)


NULLS = (Noise, Stranger)


def audit(seed: int, attacks: list[str], victims: int, data: str = "mnist-5k") -> dict[str, str | None]:
    """The verdict on no defense and on each null defense."""
    import gradveil as gv

    report = gv.audit(data, "lenet", [kind() for kind in NULLS], attacks, victims=victims, seed=seed, workers=0, quiet=True)
    return {d.spec: d.verdict for d in report.summary.defenses}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--audits", type=int, default=60, help="null audits, two of each seed")
    arguments.add_argument("--victims", type=int, default=8)
    arguments.add_argument("--attack", nargs="*", default=["rgap", "swift:restarts=0,cycles=0,adam_steps=0"])
    arguments.add_argument("--out", type=Path, default=Path("docs/results/calibration.md"))
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    seeds = range(1000, 1000 + options.audits // len(NULLS))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        verdicts = list(pool.map(audit, seeds, [options.attack] * len(seeds), [options.victims] * len(seeds)))
    lines = [
        "# Calibration of the verdict",
        "",
        f"Written by `benchmarks/calibration.py --audits {options.audits}`: LeNet on mnist-5k, "
        f"{options.victims} victims per audit, attacks {', '.join(f'`{a}`' for a in options.attack)}, "
        f"seeds {seeds.start} to {seeds.stop - 1}.",
        "",
        "| updates | audits | said `leaks` |",
        "|---|---|---|",
    ]
    for spec in verdicts[0]:
        alarms = sum(f[spec] == "leaks" for f in verdicts)
        lines.append(f"| `{spec}` | {len(verdicts)} | {alarms} ({100 * alarms / len(verdicts):.0f}%) |")
    nulls = [f[spec] == "leaks" for f in verdicts for spec in f if spec != "none"]
    # With none of n null audits alarmed, rates above 1 − 0.05^(1/n) are excluded at 95%.
    bound = f" Rates above {100 * (1 - 0.05 ** (1 / len(nulls))):.1f}% are excluded at 95%." if not any(nulls) else ""
    lines += ["", f"False alarms: {sum(nulls)} of {len(nulls)} null audits.{bound}"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
