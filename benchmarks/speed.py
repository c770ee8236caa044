"""Speed beside `breaching`, in one run: same weights, images and settings, one thread each, taking turns.

    GRADVEIL_DATA=… python benchmarks/speed.py            # the table in docs/results/speed.md
    python benchmarks/speed.py --quick --out speed.md     # one seed, a few steps; the embedded digits, as colour images

Both sides run Inverting Gradients (signed Adam, cosine, total variation, box, step decay) with the labels known. The
cost of an iteration is (CPU time of a run of k + 1 steps − that of one step) / k, so that set-up counts for neither.
The time to equal quality is that of `swift` up to the first stage at whose end its mean PSNR is the peer's final one
or better; the stage's answer is chosen by the residual, as the attack itself chooses. Its closed form is left out of
that race, which is one of matching; the last columns are `swift` as it is. Seconds are CPU time of the
process, which other load on the machine disturbs less than the clock. The peer gets its own environment in
`benchmarks/.peer`, made on first use.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peer_process import PEER, PeerProcess
from torch import Tensor

from gradveil import __version__
from gradveil.attacks.base import Target
from gradveil.attacks.matching import swift
from gradveil.attacks.matching.problem import residual
from gradveil.attacks.registry import parse
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Reconstruction, Sighting, observe
from gradveil.core.types import Batch
from gradveil.data import DataSet, load
from gradveil.defenses.base import Setup
from gradveil.defenses.registry import parse as parse_defense
from gradveil.metrics import psnr
from gradveil.models import build
from gradveil.storage.files import write_text

TV = 1e-2  # the weight at which signed Adam does best on this LeNet; the same on both sides


@dataclass(frozen=True)
class Net:
    """How one network is measured: victims on our side, images on the peer's, steps."""

    title: str
    spec: str
    victims: int
    images: int
    steps: int


NETS = (Net("LeNet", "lenet", 16, 4, 150), Net("ConvNet, width 64", "convnet", 2, 2, 10), Net("ResNet18", "resnet18", 2, 2, 10))


class Peer:
    """The other side, on the private images of a data set."""

    def __init__(self, data: DataSet, images: int, folder: Path):
        self.file, self.classes = folder / "images.npz", data.num_classes
        x, y = data.private.x[:images], data.private.y[:images]
        np.savez(self.file, x=x.numpy(), y=y.numpy(), mean=data.mean.numpy(), std=data.std.numpy())
        self.process = PeerProcess(folder)

    def __call__(self, spec: str, seed: int, images: int, steps: int) -> dict[str, Any]:
        """CPU seconds, PSNR and gradient norm of every image."""
        request = {"images": str(self.file), "count": images, "model": spec, "seed": seed, "steps": steps}
        return self.process.ask({**request, "classes": self.classes, "tv": TV})

    def close(self) -> None:
        self.process.close()


def coloured(data: DataSet) -> DataSet:
    """Grey images as colour ones: the peer's total variation wants three channels."""
    if data.input_shape[0] == 3:
        return data
    private, public, test = (Batch(b.x.repeat(1, 3, 1, 1), b.y) for b in (data.private, data.public, data.test))
    mean, std = data.mean.repeat(3), data.std.repeat(3)
    return replace(data, private=private, public=public, test=test, mean=mean, std=std)


def victims(data: DataSet, spec: str, seed: int, count: int) -> list[Observation]:
    """Undefended updates of one image each, with labels."""
    module = build(spec, input_shape=data.input_shape, num_classes=data.num_classes, seed=seed)
    model, defense = ModelFunction(module), parse_defense("none")
    state, task = model.state(), data.task(model)
    client = prepare_client(defense, LocalTraining(), Setup(task, state, data.private))
    seen = []
    for i in range(count):
        update, trace = client.round(state, data.private[i : i + 1], i)
        seen.append(observe(task, [Sighting(state, update)], level="paper", trace=trace))
    return seen


def cpu(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def per_iteration(net: Net, data: DataSet, seed: int, peer: Peer) -> tuple[float, float]:
    """CPU milliseconds of one iteration on one image: the peer's, ours."""
    observations = victims(data, net.spec, seed, net.victims)

    def ours(steps: int) -> float:
        attack = parse(f"ig:paper=geiping,steps={steps},tv={TV}")
        return cpu(lambda: attack(observations, seed=seed)) / net.victims

    def theirs(steps: int) -> float:
        answer = peer(net.spec, seed, net.images, steps)
        ours = torch.stack([t.norm() for t in observations[0].update.tensors.values()]).norm()
        if not np.isclose(answer["norms"][0], float(ours), rtol=1e-3):
            sys.exit(f"{net.title}: the two sides do not attack the same gradient.")
        return float(statistics.mean(answer["seconds"]))

    ours(1), theirs(1)  # first calls load and probe
    short = theirs(1), ours(1)
    long = theirs(net.steps + 1), ours(net.steps + 1)
    return 1e3 * (long[0] - short[0]) / net.steps, 1e3 * (long[1] - short[1]) / net.steps


@dataclass
class Race:
    """One seed's race to what the peer has after so many iterations; seconds are of one image."""

    seed: int
    iterations: int
    peer_seconds: float
    peer_psnr: float
    seconds: float | None  # of swift's matching until it is as good; None if it never is
    whole: float  # of swift to its own end, closed form and all
    psnr: float  # at its end

    @property
    def ratio(self) -> float:
        return 0.0 if self.seconds is None else self.peer_seconds / self.seconds


def race(data: DataSet, seed: int, peer: Peer, *, count: int, images: int, lengths: list[int]) -> list[Race]:
    theirs = {steps: peer("lenet", seed, images, steps) for steps in lengths}
    observations = victims(data, "lenet", seed, count)
    parse("ig:steps=2")(observations[:2])  # the first call loads and probes
    stages: list[tuple[float, Tensor]] = []
    targets: list[Target] = []
    descend = swift._descend

    def watched(target: Target, *rest: Any) -> tuple[Tensor, int]:
        answer = descend(target, *rest)
        if len(target.observations) == count:  # later ones go on with some of the victims only
            stages.append((time.process_time() - began, answer[0].clone()))
            targets.append(target)
        return answer

    began = time.process_time()
    with patch.object(swift, "_descend", watched):
        answers = parse("swift:closed=false")(observations, seed=seed)
    matched = time.process_time() - began

    def quality(rebuilt: list[Reconstruction]) -> float:
        return float(psnr(truth, torch.cat([a.images for a in rebuilt[:images]])).mean())

    truth = data.private.x[:images]
    reached = [(seconds, float(psnr(truth, chosen(targets[0], x)[:images]).mean())) for seconds, x in stages]
    reached.append((matched, quality(answers)))
    began = time.process_time()
    final = quality(parse("swift")(observations, seed=seed))
    whole = time.process_time() - began
    races = []
    for steps, answer in theirs.items():
        goal = statistics.mean(answer["psnr"])
        needed = next((seconds / count for seconds, level in reached if level >= goal), None)
        took = statistics.mean(answer["seconds"])
        races.append(Race(seed, steps, took, goal, needed, whole / count, final))
    return races


def chosen(target: Target, x: Tensor) -> Tensor:
    """Of a victim's rows the one with the lowest residual, as pixels."""
    each = len(x) // target.shape[0]
    pick = residual(target, x).unflatten(0, (-1, each)).argmin(1) + torch.arange(len(x))[::each]
    return target.denormalize(x[pick, 0]).clamp(0, 1)


def report(costs: dict[Net, list[tuple[float, float]]], races: list[Race], data: DataSet, args: argparse.Namespace) -> str:
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    named = "GRADVEIL_DATA=… " if args.data == "cifar10" else ""
    command = f"{named}python benchmarks/speed.py" + (" --quick" if args.quick else "")
    lines = [
        f"# Speed beside `{PEER.partition('=')[0]}`",
        "",
        f"Written by `{command}` on {date.today()}: gradveil {__version__}, {PEER.replace('==', ' ')}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"one thread per side, taking turns. Data: {data.name} ({'×'.join(map(str, data.input_shape))}), batch size 1, "
        f"labels known on both sides; model seeds {', '.join(map(str, sorted({r.seed for r in races})))}. "
        f"Load average at the end {load_average:.1f}"
        + (", so other work was running; " if load_average > 1.5 else "; ")
        + "seconds are CPU time of the process.",
        "",
        f"Both sides: signed Adam (0.1), cosine, total variation {TV:g}, box, step decay at 3/8, 5/8 and 7/8. The peer's "
        "total variation also counts the image's border against zero; everything else is the same.",
        "",
        "## One iteration on one image",
        "",
        "Median over the model seeds; in brackets the least and the most.",
        "",
        "| network | victims at once (ours) | peer, ms | ours, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for net, pairs in costs.items():
        ratios = [theirs / ours for theirs, ours in pairs]
        middle = [statistics.median(column) for column in zip(*pairs, strict=True)]
        spread = f"{statistics.median(ratios):.2f}× [{min(ratios):.2f}, {max(ratios):.2f}]"
        lines.append(f"| {net.title} | {net.victims} | {middle[0]:.2f} | {middle[1]:.2f} | {spread} |")
    lines += [
        "",
        "On LeNet the peer is bound by overhead, which victims in one batch share. The large nets are bound by the "
        "convolutions: an exact double backward, as the peer does it, is worth 7 forward passes; finite differences "
        "with frozen masks (`attacks/matching/frozen.py`) are worth 5. That route is checked against the exact one at the "
        "first step and every 500 steps, and left where it disagrees; the first check is set-up and not in these numbers.",
        "",
        "## LeNet: time to the peer's quality",
        "",
        f"Mean PSNR of the same {args.images} images; seconds of one image ({args.victims} victims at once on our side). "
        "The peer's learning rate decays over the iterations it is given, so a short run of it is a whole run.",
        "",
        "| peer's iterations | model seed | PSNR | peer, s | matching until as good, s | ratio | swift as it is, s | PSNR |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(races, key=lambda r: (r.iterations, r.seed)):
        until, ratio = ("never", "–") if r.seconds is None else (f"{r.seconds:.2f}", f"{r.ratio:.0f}×")
        theirs = f"| {r.iterations:,} | {r.seed} | {r.peer_psnr:.1f} | {r.peer_seconds:.1f} |"
        lines.append(f"{theirs} {until} | {ratio} | {r.whole:.2f} | {r.psnr:.1f} |")
    medians = {n: statistics.median(r.ratio for r in races if r.iterations == n) for n in args.iterations}
    said = ", ".join(f"{ratio:.0f}× against {n:,} iterations" for n, ratio in medians.items())
    lines += ["", f"Median ratio over the seeds: {said}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, LeNet and ConvNet, few steps")
    parser.add_argument("--seeds", type=int, default=3, help="model seeds")
    parser.add_argument("--iterations", type=int, nargs="+", default=[300, 2_400], help="of the peer in the race")
    parser.add_argument("--images", type=int, default=2, help="that the peer attacks in the race")
    parser.add_argument("--victims", type=int, default=16, help="that we attack at once in the race")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "results" / "speed.md")
    args = parser.parse_args()
    nets: tuple[Net, ...] = NETS
    if args.quick:
        args.seeds, args.iterations, args.images, nets = 1, [300], 2, NETS[:2]
        nets = tuple(Net(n.title, n.spec, n.victims, min(2, n.images), max(3, n.steps // 5)) for n in nets)
    torch.set_num_threads(1)
    args.data = "cifar10" if os.environ.get("GRADVEIL_DATA") else "mnist-5k"
    data = coloured(load(args.data))
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(data, max(args.images, *(n.images for n in nets)), Path(folder))
        costs: dict[Net, list[tuple[float, float]]] = {net: [] for net in nets}
        races: list[Race] = []
        for seed in range(args.seeds):
            for net in nets:
                costs[net].append(per_iteration(net, data, seed, peer))
                print(f"seed {seed}, {net.title}: peer {costs[net][-1][0]:.2f} ms, ours {costs[net][-1][1]:.2f} ms")
            races += race(data, seed, peer, count=args.victims, images=args.images, lengths=args.iterations)
            write_text(args.out, report(costs, races, data, args))  # after every seed: a killed run leaves what it has
            print(*races[-len(args.iterations) :], f"written: {args.out.name}", sep="\n", flush=True)
        peer.close()


if __name__ == "__main__":
    main()
