"""How often an audit says `leaks` where nothing leaks, and how often where a known share leaks.

    python benchmarks/calibration.py run --data digits chest --batch 1 8 --attacks closed --seeds 1000:1012
    python benchmarks/calibration.py write

`run` does the parts that are not stored yet: one part per data, batch size, group of attacks and seed. In each, four defenses
send updates that hold nothing of the victims: noise, the update of strangers that no pool of the audit holds, the update of
another class, and a constant. A part is one run over many victims, which attacks take together. It is then read as several
audits of some victims each, all with the strangers of the run: what an attack answers for one victim does not depend on the
others. Then its answers are used again: victims and strangers are drawn anew from the private images many times, and
tested. In others of these draws exact images are planted among the answers. `write` puts all stored parts into
docs/results/calibration.md.
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
from numpy.typing import NDArray
from stored_parts import command_line
from torch import nn
from torch.nn.functional import avg_pool2d

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.auditing.verdict import Likenesses
from gradveil.core.randomness import seeded
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet, load
from gradveil.defenses.base import Defense, Step
from gradveil.metrics import batch_numbers, clopper_pearson, likeness_table
from gradveil.metrics.leak_test import Numbers, Slots, exchange_test, strangers_wanted
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder, StoredCell
from gradveil.summary import CONTROL

SIZE = 0.01  # of the entries of an update that holds nothing
PLANTED = {1: (3, 8, 16), 8: (1,)}  # exact images: 10%, 25% and 50% of 32; one of 64
ATTACKS = {"closed": ("linear",), "imprint": ("imprint",), "suite": ("standard",)}
VICTIMS = {(1, False): 32, (8, False): 8, (1, True): 4, (8, True): 1}  # of one audit, by batch size and for the suite or not
AUDITS = {(1, False): 10, (8, False): 5, (1, True): 10, (8, True): 8}  # of one run, as the private images allow
FEW = {(1, False): 3, (8, False): 2, (1, True): 10, (8, True): 8}  # of chest images, of which there are less
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


def halved(data: DataSet) -> DataSet:
    """Images of half the height and width, on which an audit takes a fourth of the time."""
    parts = {name: getattr(data, name) for name in ("private", "public", "test")}
    return replace(data, **{name: Batch(avg_pool2d(part.x, 2), part.y) for name, part in parts.items()})


@cache
def digits() -> DataSet:
    return load("mnist-5k")


@cache
def objects() -> DataSet:
    return load("cifar10")


@cache
def chest() -> DataSet:
    """The two kinds of chest images of MedNIST: X-rays and slices, at half size."""
    data = halved(load("mednist"))
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
        """Of one audit."""
        return VICTIMS[self.batch, self.attacks == "suite"]

    @property
    def audits(self) -> int:
        return (FEW if self.data == "chest" else AUDITS)[self.batch, self.attacks == "suite"]

    @property
    def file(self) -> str:
        return f"{self.data}-{self.batch}-{self.attacks}-{self.seed}.json"


def run_part(part: Part, data: DataSet | None = None, draws: int = 20) -> dict[str, object]:
    """The alarms among the audits and among the draws. `data` replaces the data of that name."""
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
                "victims": part.victims * part.audits,
                "batch_size": part.batch,
                "seed": part.seed,
            }
        )
    )
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        run = run_audit(case, Execution(out=Path(folder), workers=0))
        seconds = time.process_time() - begun
        cells = {d.spec.partition("@")[0]: compared(RunFolder(run.folder), d.spec) for d in run.summary.defenses}
        answers = {kind: stored_answers(RunFolder(run.folder), cells[kind]) for kind in cells if kind != CONTROL}
    audits = [audit_slots(case.slots, part.victims, number) for number in range(part.audits)]
    likenesses = {kind: Likenesses.of(case, ran) for kind, ran in cells.items()}
    alarms = {kind: sum(a.leaks(alike, part.seed) for a in audits) for kind, alike in likenesses.items()}
    tables = {kind: private_table(case, images) for kind, images in answers.items() if images}
    redrawn = {kind: redraw(case, table, likenesses[kind].nearest, audits, part.seed, draws) for kind, table in tables.items()}
    planted = {}
    if (table := tables.get("stranger")) is not None:
        counts = [n for n in PLANTED[part.batch] if n <= part.victims * part.batch // 2]
        planted = {str(n): redraw(case, table, likenesses["stranger"].nearest, audits, part.seed, draws, n) for n in counts}
    return {
        "hits": True,  # the second statistic of the test
        "audits": part.audits,
        "alarms": alarms,
        "draws": draws,
        "redrawn": redrawn,
        "planted": planted,
        "audit_seconds": seconds,
        "draw_seconds": time.process_time() - begun - seconds,
    }


@dataclass(frozen=True, eq=False)
class AuditSlots:
    """One audit of a run: its places in the table of the run (batches × images), and its slots."""

    batches: slice
    victims: NDArray[np.int64]
    table: tuple[NDArray[np.int64], ...]
    slots: Slots

    def leaks(self, alike: Likenesses, seed: int) -> bool:
        return exchange_test(alike.images[self.table], self.slots, seed, nearest=alike.nearest[self.victims]).leaks


def audit_slots(whole: Slots, victims: int, number: int) -> AuditSlots:
    """The audit of that number. Its strangers are those of the run whose class has a victim here."""
    rows = slice(number * victims, (number + 1) * victims)
    images = np.flatnonzero((whole.batch >= rows.start) & (whole.batch < rows.stop))
    strangers = np.flatnonzero(np.isin(whole.stranger_label, whole.label[images]))
    columns = np.concatenate([images, len(whole.label) + strangers])
    slots = Slots(whole.batch[images] - rows.start, whole.label[images], whole.stranger_label[strangers])
    return AuditSlots(rows, images, np.ix_(np.arange(rows.start, rows.stop), columns), slots)


def compared(folder: RunFolder, defense: str) -> list[StoredCell]:
    """The attacks that ran on this defense, and the direct look."""
    kinds = ("attack", "look")
    return [c for c in folder.cells.values() if c.kind in kinds and c.defense == defense and c.status == "ok"]


def stored_answers(folder: RunFolder, cells: Sequence[StoredCell]) -> list[torch.Tensor]:
    """Per attack its images: victims × batch × C × H × W."""
    return [folder.tensors(cell.key)["reconstruction"] for cell in cells if cell.kind == "attack"]


def private_table(case: Case, answers: Sequence[torch.Tensor]) -> Numbers:
    """Batches × all private images: the largest likeness to any answer of any attack."""
    tables = [likeness_table(a.flatten(0, 1), batch_numbers(list(a)), case.data.private.x) for a in answers]
    table: Numbers = torch.stack(tables).amax(0).numpy()
    return table


def redraw(
    case: Case, table: Numbers, nearest: Numbers, audits: Sequence[AuditSlots], seed: int, draws: int, planted: int = 0
) -> int:
    """How often the test says that there is a leak, for other victims and strangers of the same classes, audit by audit.

    `planted` exact images of victims are added to the answers of their batches; distractors are not compared with these.
    """
    rng, labels = np.random.default_rng([seed, planted]), case.private_labels.numpy()
    alarms = 0
    for draw in range(draws):
        audit = audits[draw % len(audits)]
        slots = audit.slots
        victims, strangers = np.zeros(len(slots.label), dtype=np.int64), []
        for label in np.unique(slots.label):
            images, places = rng.permutation(np.flatnonzero(labels == label)), np.flatnonzero(slots.label == label)
            victims[places] = images[: len(places)]
            strangers.append(images[len(places) : len(places) + strangers_wanted(len(places))])
        drawn = np.concatenate([victims, *strangers])
        likeness = table[audit.batches][:, drawn]
        for victim in rng.choice(len(victims), planted, replace=False):
            image = case.data.private.x[[victims[victim]]]
            row = likeness_table(image, torch.zeros(1, dtype=torch.long), case.data.private.x[drawn]).numpy()[0]
            likeness[slots.batch[victim]] = np.maximum(likeness[slots.batch[victim]], row)
        again = Slots(slots.batch, slots.label, labels[np.concatenate(strangers)])
        alarms += exchange_test(likeness, again, draw, nearest=nearest[audit.victims]).leaks
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
    yield f"Written by `benchmarks/calibration.py write` from {len(parts)} runs over four null defenses each."
    if before := sum("hits" not in part for part in parts):
        yield f"{before} of them were judged by the sum of the evidence alone, before hits were a second statistic of the test."
    yield "A run is read as several audits of different victims with common strangers: of 32 images at batch 1 and of 8 batches"
    yield "of 8; for the suite of 4 images and of one batch of 8, at half height and width. `draws`: other victims and"
    yield "strangers against the answers of these audits. Intervals are 95%."
    yield from ("", "## Nothing leaks", "")
    yield from (
        "| data | batch | attacks | updates | audits that said `leaks` | draws | 99.9% lower limit |",
        "|---|---|---|---|---|---|---|",
    )
    total, hits, drawn, alarms, worst = 0, 0, 0, 0, 0.0
    groups: dict[tuple[str, ...], list[dict]] = {}
    for part in parts:
        for kind in part["redrawn"]:
            groups.setdefault((part["data"], str(part["batch"]), part["attacks"], kind), []).append(part)
    for names, members in sorted(groups.items()):
        said, n = sum(m["alarms"][names[3]] for m in members), sum(m["audits"] for m in members)
        again, of = sum(m["redrawn"][names[3]] for m in members), sum(m["draws"] for m in members)
        low = clopper_pearson(said, n, 0.998)[0]
        worst, total, hits, drawn, alarms = max(worst, low), total + n, hits + said, drawn + of, alarms + again
        yield f"| {' | '.join(names)} | {rate_text(said, n)} | {rate_text(again, of)} | {100 * low:.1f}% |"
    yield from ("", f"Pooled: {rate_text(hits, total)} of audits, {rate_text(alarms, drawn)} of draws.", "")
    suite = [m for m in parts if m["attacks"] == "suite"]
    said = [sum(n for kind, n in m["alarms"].items() if kind != CONTROL) for m in suite]
    yield f"Of the suite: {rate_text(sum(said), sum(m['audits'] * (len(m['alarms']) - 1) for m in suite))}." if suite else ""
    yield ""
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
        yield f"| {' | '.join(names)} | {rate_text(seen, sum(m['draws'] for m in members))} |"
    undefended = rate_text(sum(m["alarms"][CONTROL] for m in parts), sum(m["audits"] for m in parts))
    yield from ("", f"Without a defense: {undefended} audits said `leaks`.")
    each = [f"{sum(m[name] for m in parts) / len(parts):.1f} s for {what}" for name, what in TIMES.items()]
    yield from ("", f"Processor time per part: {', '.join(each)}.")


TIMES = {"audit_seconds": "the audits", "draw_seconds": "the draws"}


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    running.add_argument("--batch", nargs="+", type=int, choices=PLANTED, default=list(PLANTED))
    running.add_argument("--attacks", nargs="+", choices=ATTACKS, default=["closed", "imprint"])
    running.add_argument("--seeds", default="1000:1060", help="first:last, the last one excluded")
    running.add_argument("--draws", type=int, default=20, help="draws per part and kind of update")
    running.add_argument("--workers", type=int, default=os.cpu_count())


if __name__ == "__main__":
    command_line(__doc__, run, lambda parts: page(list(parts.values())), "calibration.md", add_options)
