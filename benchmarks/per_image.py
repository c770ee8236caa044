"""Write docs/results/per_image.md: what a step of DP-SGD costs beside plain training and beside Opacus, in one run.

    python benchmarks/per_image.py [--steps 15] [--only cnn vit]

A step is the gradient of a batch, clipped image by image, with noise; plain training computes the gradient alone. All sides
take turns on the same weights and images, one thread each. Before anything is timed, the clipped sums of both tools without
noise are compared. Seconds are CPU time of the process, medians over the steps. Memory is the peak of a fresh process beyond
what it holds before its first step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradveil import __version__
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.defenses import Setup, parse
from gradveil.models import build
from gradveil.storage.files import write_text

MODELS = ("cnn", "resnet18:width=16,norm=group", "vit")
SHAPE, CLASSES = (3, 32, 32), 10
GOAL = 1.7  # of plain training
SIDES = ("plain", "gradveil", "opacus hooks", "opacus ghost")
Step = Callable[[], Tensors]


def images(batch: int) -> Batch:
    rng = torch.Generator().manual_seed(0)
    return Batch(torch.rand(batch, *SHAPE, generator=rng), torch.randint(CLASSES, (batch,), generator=rng))


def network(spec: str, *, fixed: bool = False) -> nn.Module:
    """`fixed`: as Opacus can take it, with attention of its own."""
    module = build(spec, input_shape=SHAPE, num_classes=CLASSES, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ModuleValidator.fix(module) if fixed else module


def gradients(module: nn.Module) -> Tensors:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def plain(spec: str, batch: Batch, _: float) -> Step:
    module = network(spec)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def step() -> Tensors:
        optimizer.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        optimizer.step()
        return gradients(module)

    return step


def gradveil(spec: str, batch: Batch, noise: float, *, fixed: bool = False) -> Step:
    function = ModelFunction(network(spec, fixed=fixed), mode="train")
    task = Task(function, SHAPE, CLASSES, torch.zeros(3), torch.ones(3))
    state, training = function.state(), LocalTraining(mode="train")
    client = prepare_client(parse(f"dpsgd:noise={noise}"), training, Setup(task, state, batch))
    return lambda: client.round(state, batch, 0, protected=batch)[0].tensors


def opacus(mode: str) -> Callable[[str, Batch, float], Step]:
    def side(spec: str, batch: Batch, noise: float) -> Step:
        module = network(spec, fixed=True)
        loader = DataLoader(TensorDataset(batch.x, batch.y), batch_size=len(batch))
        parts = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        private, optimizer = parts[0], parts[1]
        criterion = parts[2] if mode == "ghost" else nn.CrossEntropyLoss()

        def step() -> Tensors:
            optimizer.zero_grad()
            criterion(private(batch.x), batch.y).backward()
            optimizer.step()
            return gradients(module)

        return step

    return side


MAKERS = {"plain": plain, "gradveil": gradveil, "opacus hooks": opacus("hooks"), "opacus ghost": opacus("ghost")}


def length(gradient: Tensors) -> Tensor:
    return torch.stack([g.norm() for g in gradient.values()]).norm()


def sides(spec: str, batch: Batch) -> tuple[dict[str, Step], dict[str, str]]:
    """The steps of all sides that take this network, and why the others do not; clipped sums are compared without noise."""
    steps, reasons = {"plain": plain(spec, batch, 0)}, dict[str, str]()
    steps["gradveil"] = gradveil(spec, batch, 1.0)
    steps["gradveil"]()  # the first one probes
    ours = gradveil(spec, batch, 0.0, fixed=True)()
    for side in SIDES[2:]:
        try:
            theirs = MAKERS[side](spec, batch, 0.0)()
            steps[side] = MAKERS[side](spec, batch, 1.0)
            steps[side]()
        except Exception as error:  # of the other tool: whatever it raises is the reason
            reasons[side] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            steps.pop(side, None)
            continue
        if length({name: ours[name] - g for name, g in theirs.items()}) > 1e-4 * length(ours):
            sys.exit(f"{spec}: the clipped sums of gradveil and {side} differ.")
    return steps, reasons


def times(steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """CPU milliseconds of each step, the sides in turn."""
    taken: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(count):
        for side, step in steps.items():
            began = time.process_time()
            step()
            taken[side].append(1e3 * (time.process_time() - began))
    return taken


def peak(spec: str, side: str, batch: int) -> float:
    """Megabytes that the steps of one side need, in a process of their own."""
    command = [sys.executable, __file__, "--memory", spec, side, "--batch", str(batch)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def memory(spec: str, side: str, batch: Batch) -> float:
    step = MAKERS[side](spec, batch, 1.0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(3):
        step()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """Kilobytes that Linux counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def table(spec: str, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    batch = images(options.batch)
    steps, reasons = sides(spec, batch)
    taken = times(steps, options.steps)
    base = statistics.median(taken["plain"])
    rows = []
    for side in SIDES:
        if side in reasons:
            rows.append(f"| `{spec}` | {side} | refuses | | |")
            continue
        middle = statistics.median(taken[side])
        pairs = sorted(a / b for a, b in zip(taken[side], taken["plain"], strict=True))
        spread = f" [{pairs[len(pairs) // 4]:.2f}, {pairs[-1 - len(pairs) // 4]:.2f}]" if side != "plain" else ""
        megabytes = peak(spec, side, options.batch)
        rows.append(f"| `{spec}` | {side} | {middle:.1f} | {middle / base:.2f}×{spread} | {megabytes:.0f} |")
        print(rows[-1], flush=True)
    return rows, [f"`{spec}`, {side}: {reason}" for side, reason in reasons.items()]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="*", default=MODELS)
    arguments.add_argument("--steps", type=int, default=15)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--memory", nargs=2, metavar=("MODEL", "SIDE"), help="print the peak of one side, and end")
    arguments.add_argument("--out", type=Path, default=Path("docs/results/per_image.md"))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"opacus|torch")
    if options.memory:
        print(memory(*options.memory, images(options.batch)))
        return
    tables = [table(spec, options) for spec in options.only]
    refusals = [line for _, lines in tables for line in lines]
    lines = [
        "# What DP-SGD costs",
        "",
        f"Written by `benchmarks/per_image.py` on {date.today()}: gradveil {__version__}, Opacus {version('opacus')}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, one thread. A step on "
        f"{options.batch} random images of 3×32×32: CPU milliseconds, medians of {options.steps} steps that all sides take in "
        "turn; the ratio to plain training, with its middle half; and the memory that a fresh process needs beyond what it "
        f"holds before. Load average at the end {os.getloadavg()[0]:.1f}.",
        "",
        "`gradveil` is a round of a client under `dpsgd`, with its checks, normalization and noise; `plain` is a bare training "
        "step in PyTorch. The clipped sums of all sides were compared before, on the network as Opacus can take it.",
        "",
        "| network | side | ms | ratio | memory, MB |",
        "|---|---|---|---|---|",
        *(row for rows, _ in tables for row in rows),
        "",
        f"Goal: at most {GOAL}× plain training, and not slower than Opacus.",
        *(("", "Opacus refuses:", "", *(f"- {line}" for line in refusals)) if refusals else ()),
    ]
    write_text(options.out, "\n".join(lines) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
