"""How often an audit says `leaks` where nothing leaks, and how often where a known share leaks.

    python benchmarks/calibration.py run --store DIR --data digits chest --batch 1 8 --attacks closed --seeds 1000:1012
    python benchmarks/calibration.py write --store DIR

`run` does the parts that are not stored yet: one part per data, batch size, group of attacks and seed. In each, four defenses
send updates that hold nothing of the victims: noise, the update of strangers that no pool of the audit holds, the update of
another class, and a constant. Every part is a whole audit with four verdicts. Then its answers are used again: victims and
strangers are drawn anew from the private images many times, and tested. These draws cost next to nothing. In others of them
exact images are planted among the answers. `write` puts all stored parts into docs/results/calibration.md.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from stored_parts import command_line
from torch import nn
from torch.nn.functional import avg_pool2d

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.randomness import seeded
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet, load
from gradveil.defenses.base import Defense, Step
from gradveil.metrics import batch_numbers, clopper_pearson, likeness_table
from gradveil.metrics.leak_test import Numbers, Slots, exchange_test, strangers_wanted
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

SIZE = 0.01  # of the entries of an update that holds nothing
PLANTED = {1: (3, 8, 16), 8: (1,)}  # exact images: 10%, 25% and 50% of 32; one of 64
ATTACKS = {"closed": ("linear",), "imprint": ("imprint",), "suite": ("standard",)}
VICTIMS = {(1, False): 32, (8, False): 8, (1, True): 4, (8, True): 1}  # by batch size, and whether it is the suite
OUTSIDE = 5  # every fifth private image of a class is kept out of the audit


# -- updates that hold nothing of the victims --------------------------------------------------------------------------


class Noise(Defense):
    """Nothing but noise."""

    name = "noise-alone"
    random = True

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {name: SIZE * step.rng.normal(t.shape) for name, t in tensors.items()}


class Constant(Defense):
    """The same update for every batch."""

    name = "constant"

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {name: torch.full_like(t, SIZE) for name, t in tensors.items()}


class Stranger(Defense):
    """The update of other images of the same classes, which no part of the audited data holds."""

    name = "stranger"
    random = True
    shift = 0  # from a class to the class of which images are taken

    def __init__(self, outside: Batch):
        self.images, self.labels = outside.x, outside.hard_labels
        self.classes = int(self.labels.max()) + 1

    def batch(self, batch: Batch, step: Step) -> Batch:
        labels = (batch.hard_labels + self.shift) % self.classes
        picks = []
        for label in labels:
            candidates = (self.labels == label).nonzero().flatten()
            picks.append(candidates[int(step.rng.integers(0, len(candidates), (1,)))])
        return Batch(self.images[torch.stack(picks)], labels)


class OtherClass(Stranger):
    """The update of images of another class."""

    name = "other-class"
    shift = 1


def nulls(outside: Batch) -> list[Defense]:
    return [Noise(), Stranger(outside), OtherClass(outside), Constant()]


# -- data --------------------------------------------------------------------------------------------------------------


@cache
def digits() -> DataSet:
    return load("mnist-5k")


@cache
def objects() -> DataSet:
    return load("cifar10")


@cache
def chest() -> DataSet:
    """The two kinds of chest images of MedNIST: X-rays and slices."""
    data = load("mednist")
    labels = [data.class_names.index(name) for name in ("CXR", "ChestCT")]

    def part(images: Batch) -> Batch:
        kept = torch.isin(images.y, torch.tensor(labels))
        return Batch(images.x[kept], (images.y[kept] == labels[1]).long())

    parts = {name: part(getattr(data, name)) for name in ("private", "public", "test")}
    return replace(data, name="chest", **parts, num_classes=2, class_names=("CXR", "ChestCT"))


@cache
def dark() -> DataSet:
    """Digits of the three darkest of 256 levels: every SSIM is high."""
    data = digits()
    parts = {
        name: Batch((getattr(data, name).x * 2).round() / 255, getattr(data, name).y) for name in ("private", "public", "test")
    }
    return replace(data, name="dark", **parts)


def halved(data: DataSet) -> DataSet:
    """Images of half the height and width, on which the suite takes a fourth of the time."""
    parts = {name: getattr(data, name) for name in ("private", "public", "test")}
    return replace(data, **{name: Batch(avg_pool2d(part.x, 2), part.y) for name, part in parts.items()})


DATA = {made.__name__: made for made in (digits, objects, chest, dark)}


def apart(data: DataSet) -> tuple[DataSet, Batch]:
    """The data of the audit, and images that it does not hold."""
    labels = data.private.hard_labels
    outside = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        outside[(labels == label).nonzero().flatten()[::OUTSIDE]] = True
    return replace(data, private=data.private[~outside]), data.private[outside]


def small_network(data: DataSet) -> nn.Module:
    """A network whose updates take little time to store, as there are thousands of audits."""
    with seeded(0, "calibration"):
        pixels = math.prod(data.input_shape)
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 24), nn.ReLU(), nn.Linear(24, data.num_classes))


# -- one part ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One audit of all null defenses, and the draws from its answers."""

    data: str
    batch: int
    attacks: str
    seed: int

    @property
    def victims(self) -> int:
        return VICTIMS[self.batch, self.attacks == "suite"]

    @property
    def file(self) -> str:
        return f"{self.data}-{self.batch}-{self.attacks}-{self.seed}.json"


def run_part(part: Part, data: DataSet | None = None, draws: int = 100, victims: int | None = None) -> dict[str, object]:
    """The verdicts of the audit, and the alarms among the draws. `data` replaces the data of that name."""
    torch.set_num_threads(1)
    begun = time.process_time()
    data = data or DATA[part.data]()
    audited, outside = apart(halved(data) if part.attacks == "suite" else data)
    case = Case(
        make_spec(
            {
                "data": audited,
                "model": small_network(audited),
                "defenses": nulls(outside),
                "attacks": list(ATTACKS[part.attacks]),
                "victims": victims or part.victims,
                "batch_size": part.batch,
                "seed": part.seed,
            }
        )
    )
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        run = run_audit(case, Execution(out=Path(folder), workers=0))
        seconds = time.process_time() - begun
        verdicts = {d.spec.partition("@")[0]: d.verdict for d in run.summary.defenses}
        p_values = {d.spec.partition("@")[0]: d.test.p if d.test else None for d in run.summary.defenses}
        answers = {d.spec: stored_answers(RunFolder(run.folder), d.spec) for d in run.summary.defenses if not d.control}
    tables = {spec.partition("@")[0]: private_table(case, images) for spec, images in answers.items() if images}
    redrawn = {spec: redraw(case, table, part.seed, draws) for spec, table in tables.items()}
    planted = {}
    if (table := tables.get("stranger")) is not None:
        images = case.spec.victims * part.batch
        planted = {str(n): redraw(case, table, part.seed, draws // 2, n) for n in PLANTED[part.batch] if n <= images // 2}
    return {
        "verdicts": verdicts,
        "p": p_values,
        "draws": draws,
        "alarms": redrawn,
        "planted_draws": draws // 2,
        "planted": planted,
        "audit_seconds": seconds,
        "draw_seconds": time.process_time() - begun - seconds,
    }


def stored_answers(folder: RunFolder, defense: str) -> list[torch.Tensor]:
    """Per attack that ran, its images: victims × batch × C × H × W."""
    cells = [c for c in folder.cells.values() if c.kind == "attack" and c.defense == defense and c.status == "ok"]
    return [folder.tensors(cell.key)["reconstruction"] for cell in cells]


def private_table(case: Case, answers: Sequence[torch.Tensor]) -> Numbers:
    """Batches × all private images: the largest likeness to any answer of any attack."""
    tables = [likeness_table(a.flatten(0, 1), batch_numbers(list(a)), case.data.private.x) for a in answers]
    table: Numbers = torch.stack(tables).amax(0).numpy()
    return table


def redraw(case: Case, table: Numbers, seed: int, draws: int, planted: int = 0) -> int:
    """How often the test says that there is a leak, for other victims and strangers of the same classes.

    `planted` exact images of victims are added to the answers of their batches.
    """
    rng, labels, slots = np.random.default_rng([seed, planted]), case.private_labels.numpy(), case.slots
    alarms = 0
    for draw in range(draws):
        victims, strangers = np.zeros(len(slots.label), dtype=np.int64), []
        for label in np.unique(slots.label):
            images, places = rng.permutation(np.flatnonzero(labels == label)), np.flatnonzero(slots.label == label)
            victims[places] = images[: len(places)]
            strangers.append(images[len(places) : len(places) + strangers_wanted(len(places))])
        drawn = np.concatenate([victims, *strangers])
        likeness = table[:, drawn]
        for victim in rng.choice(len(victims), planted, replace=False):
            image = case.data.private.x[[victims[victim]]]
            row = likeness_table(image, torch.zeros(1, dtype=torch.long), case.data.private.x[drawn]).numpy()[0]
            likeness[slots.batch[victim]] = np.maximum(likeness[slots.batch[victim]], row)
        again = Slots(slots.batch, slots.label, labels[np.concatenate(strangers)])
        alarms += exchange_test(likeness, again, draw).leaks
    return alarms


# -- all parts ---------------------------------------------------------------------------------------------------------


def do(part: Part, store: Path, draws: int) -> str:
    write_json(store / part.file, {**vars(part), "victims": part.victims, **run_part(part, draws=draws)})
    return part.file


def run(options: argparse.Namespace) -> None:
    first, last = map(int, options.seeds.split(":"))
    grid = [Part(*names, seed) for seed, *names in product(range(first, last), options.data, options.batch, options.attacks)]
    missing = [part for part in grid if not (options.store / part.file).exists()]
    print(f"{len(missing)} parts to do", flush=True)
    options.store.mkdir(parents=True, exist_ok=True)
    os.environ["GRADVEIL_CACHE"] = str(options.store / "cache")  # what attacks learn from public images holds for all seeds
    with ProcessPoolExecutor(options.workers) as pool:
        for done in [pool.submit(do, part, options.store, options.draws) for part in missing]:
            print(done.result(), flush=True)


def rate_text(hits: int, n: int, confidence: float = 0.95) -> str:
    low, high = clopper_pearson(hits, n, confidence)
    return f"{hits} of {n} ({100 * hits / max(1, n):.1f}%, {100 * low:.1f}–{100 * high:.1f}%)"


def page(parts: Sequence[dict[str, object]]) -> Iterable[str]:
    """The lines of the page."""
    yield from ("# Calibration of the verdict", "")
    yield f"Written by `benchmarks/calibration.py write` from {len(parts)} audits of four null defenses each."
    yield "`audits`: whole audits. `draws`: other victims and strangers against the answers of these audits. Intervals are 95%."
    yield "For the suite all images have half their height and width."
    yield from ("", "## Nothing leaks", "")
    yield from (
        "| data | batch | attacks | updates | audits that said `leaks` | draws | 99.9% lower limit |",
        "|---|---|---|---|---|---|---|",
    )
    total, hits, drawn, alarms, worst = 0, 0, 0, 0, 0.0
    groups: dict[tuple[str, ...], list[dict]] = {}
    for part in parts:
        for kind in part["alarms"]:
            groups.setdefault((part["data"], str(part["batch"]), part["attacks"], kind), []).append(part)
    for names, members in sorted(groups.items()):
        said, n = sum(m["verdicts"][names[3]] == "leaks" for m in members), len(members)
        again, of = sum(m["alarms"][names[3]] for m in members), sum(m["draws"] for m in members)
        low = clopper_pearson(said, n, 0.998)[0]
        worst, total, hits, drawn, alarms = max(worst, low), total + n, hits + said, drawn + of, alarms + again
        yield f"| {' | '.join(names)} | {rate_text(said, n)} | {rate_text(again, of)} | {100 * low:.1f}% |"
    yield from ("", f"Pooled: {rate_text(hits, total)} of whole audits, {rate_text(alarms, drawn)} of draws.", "")
    yield f"The largest 99.9% lower limit of a cell is {100 * worst:.1f}%."
    yield from ("", "## A known share leaks", "", "Exact images among answers that hold strangers, in draws.", "")
    yield from ("| data | batch | attacks | exact images | seen |", "|---|---|---|---|---|")
    leaks: dict[tuple[str, ...], list[dict]] = {}
    for part in parts:
        for count in part["planted"]:
            images = f"{count} of {part['victims'] * part['batch']}"
            leaks.setdefault((part["data"], str(part["batch"]), part["attacks"], images), []).append(part)
    for names, members in sorted(leaks.items()):
        seen = sum(m["planted"][names[3].partition(" ")[0]] for m in members)
        yield f"| {' | '.join(names)} | {rate_text(seen, sum(m['planted_draws'] for m in members))} |"
    undefended = [m["verdicts"]["none"] == "leaks" for m in parts]
    yield from ("", f"Without a defense: {rate_text(sum(undefended), len(undefended))} audits said `leaks`.")
    each = [f"{sum(m[name] for m in parts) / len(parts):.1f} s for {what}" for name, what in TIMES.items()]
    yield from ("", f"Processor time per part: {', '.join(each)}.")


TIMES = {"audit_seconds": "the audits", "draw_seconds": "the draws"}


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    running.add_argument("--batch", nargs="+", type=int, choices=PLANTED, default=list(PLANTED))
    running.add_argument("--attacks", nargs="+", choices=ATTACKS, default=["closed", "imprint"])
    running.add_argument("--seeds", default="1000:1060", help="first:last, the last one excluded")
    running.add_argument("--draws", type=int, default=100, help="draws per part and kind of update")
    running.add_argument("--workers", type=int, default=os.cpu_count())


if __name__ == "__main__":
    command_line(__doc__, run, lambda parts: page(list(parts.values())), "calibration.md", add_options)
