"""What crafting images costs under DCS2, Refiner and LODA: two settings of each, in one run.

    python benchmarks/crafting.py run [--victims 16] [--only dcs2 refiner loda protection]
    python benchmarks/crafting.py write

Costs are CPU time of this process: of a step on a batch of 64 MNIST digits against a plain step of the same network, the
sides taking turns; for LODA per image. `protection` audits both settings of DCS2 and of Refiner against the same attacks.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from stored_parts import Parts, command_line, table

import gradveil as gv
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
from gradveil.data import DataSet, load
from gradveil.defenses import Setup, Step, parse
from gradveil.defenses.batch.refiner.defense import Utility
from gradveil.defenses.data.loda.defense import Loda
from gradveil.federation import central_plan, train_central
from gradveil.models import build
from gradveil.storage.files import write_json

BATCH = 64
SETTINGS = {  # before, after
    "dcs2": ("dcs2:steps=1000,lr=0.1,enough=1", "dcs2"),
    "refiner": ("refiner:scaled=false", "refiner:steps=50,beta1=0.5,beta2=0.9"),
    "loda": ("loda:steps=500,lr=0.1,fall=false", "loda"),
}
ALPHAS = (0.1, 0.5, 0.9)
DEFAULT = "refiner"  # with steps in units of alpha²
ATTACKS = {"dcs2": ["lbfgs-l2:tv=0,steps=400,restarts=2", "dcs2-joint"], "refiner": ["lbfgs-cosine:tv=1e-3,steps=150"]}
GOALS = {"dcs2": 150, "refiner": 100}  # plain steps


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def step_cost(name: str) -> dict[str, object]:
    """Plain and defended steps in turn."""
    data = load("mnist-5k", seed=100)
    module = build("lenet", input_shape=data.input_shape, num_classes=data.num_classes, seed=100)
    task = data.task(ModelFunction(module, mode="eval"))
    state, batch = task.model.state(), data.private[:BATCH]
    clients = [
        prepare_client(parse(text), LocalTraining(), Setup(task, state, data.private[:500], data.public))
        for text in ("none", *SETTINGS[name])
    ]
    plain, before, after = clients
    times = []
    for turn in range(3):
        plains = [seconds(lambda: plain.round(state, batch, 0)) for _ in range(5)]
        ours = seconds(lambda turn=turn: after.round(state, batch, 0, turn))
        times.append((statistics.median(plains), ours))
    once = seconds(lambda: before.round(state, batch, 0))
    unit = statistics.median(p for p, _ in times)
    return {"plain": unit, "before": once / unit, "after": statistics.median(o for _, o in times) / unit}


def refined(data: DataSet, model: str, epochs: int) -> Iterator[dict[str, object]]:
    """UM and PM of what Refiner sends, by alpha."""
    module = build(model, input_shape=data.input_shape, num_classes=data.num_classes, seed=100)
    task = data.task(ModelFunction(module, mode="eval"))
    state = train_central(module, data, "none", central_plan("sgd", epochs, 0)) if epochs else task.model.state()
    batch = data.private[:16]
    evaluator = parse("refiner").prepare(Setup(task, state, data.private[:1000]))
    for text in (SETTINGS["refiner"][0], DEFAULT, SETTINGS["refiner"][1]):
        for alpha in ALPHAS:
            step = Step(task, state, batch, generator(1, "start"), memory=evaluator)  # type: ignore[arg-type]
            method = parse(f"{text}{',' if ':' in text else ':'}alpha={alpha}")
            made: list[Batch] = []
            took = seconds(lambda method=method, step=step, made=made: made.append(method.batch(batch, step)))
            true, sent = step.gradient(batch, {}), step.gradient(made[0], {})
            utility = Utility(true, task.model.parameters(state), 0.95, "normalised")
            gap = sum(float((true[n] - sent[n]).square().sum()) for n in true) ** 0.5
            ratio = gap / sum(float(g.square().sum()) for g in true.values()) ** 0.5
            yield {
                "net": f"{model}, {epochs} epochs",
                "settings": text,
                "alpha": alpha,
                "um": float(utility(sent)),
                "pm": float(evaluator(made[0].x).mean()),
                "noise ratio": ratio,
                "seconds": took,
            }


def obscured() -> Iterator[dict[str, object]]:
    """Seconds per image, and how near features and how far pixels come."""
    data = load("cifar10:public=cifar100", seed=100)
    x = data.private.x[:16]
    for variant in ("loda1", "loda2", "loda3"):
        for text in SETTINGS["loda"]:
            method = parse(f"{text}{',' if ':' in text else ':'}variant={variant},c={0.03 if variant == 'loda3' else 0.1}")
            assert isinstance(method, Loda)
            memory = method.equip(data.public, data.input_shape)
            start, made = memory.starts(x.shape, generator(1, "start")), list[torch.Tensor]()
            took = seconds(lambda m=method, s=start, e=memory, made=made: made.append(m.obscure(x, s, e)))
            pairs = zip(memory.features(made[0]), memory.features(x), strict=True)
            features = sum(float((a - b).square().sum()) for a, b in pairs) / len(x)
            pixels = float((made[0] - x).square().sum()) / len(x)
            yield {
                "variant": variant,
                "settings": text,
                "seconds": took / len(x),
                "features": features,
                "pixels": pixels,
                "objective": features - memory.c * pixels,
            }


def protection(name: str, victims: int) -> list[dict[str, object]]:
    report = gv.audit(
        "mnist-5k",
        "lenet",
        list(SETTINGS[name]),
        ATTACKS[name],
        victims=victims,
        knowledge="paper",
        seed=100,
        mode="eval",
        quiet=True,
    )
    frame = report.to_frame()
    columns = ["defense", "attack", "psnr_mean", "psnr_std", "identified_rate", "identified_low", "identified_high"]
    return [{str(key): plain(value) for key, value in row.items()} for row in frame[columns].to_dict("records")]


def plain(value: object) -> object:
    """NaN, where an attack does not apply, as JSON has it."""
    return None if isinstance(value, float) and math.isnan(value) else value


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options.store.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], dict[str, object]]] = {
        "dcs2": lambda: step_cost("dcs2"),
        "refiner": lambda: step_cost("refiner"),
        "refined": lambda: {"rows": [*refined(load("cifar10", seed=100), "lenet", 0), *refined(load("mnist-5k"), "cnn", 1)]},
        "loda": lambda: {"rows": list(obscured())},
        "protection-dcs2": lambda: {"rows": protection("dcs2", options.victims), "victims": options.victims},
        "protection-refiner": lambda: {"rows": protection("refiner", options.victims), "victims": options.victims},
    }
    for name, measure in parts.items():
        file = options.store / f"{name}.json"
        if not file.exists() and (not options.only or name.partition("-")[0] in options.only or name in options.only):
            write_json(file, measure())
            print(name, file.read_text())


def number(value: object) -> object:
    return f"{value:.3g}" if isinstance(value, float) else value


def page(parts: Parts) -> Iterable[str]:
    yield from ("# What crafting costs", "", "Written by `python benchmarks/crafting.py write`.", "", (__doc__ or "").strip())
    costs = [
        (SETTINGS[n][0], f"{p['before']:.0f}", SETTINGS[n][1], f"{p['after']:.0f}", GOALS[n])
        for n, p in parts.items()
        if n in GOALS
    ]
    yield from table(("before", "plain steps", "after", "plain steps", "goal"), costs)
    for name in ("loda", "refined", "protection-dcs2", "protection-refiner"):
        if rows := parts.get(name, {}).get("rows"):
            yield from ("", f"## {name}")
            yield from table(rows[0], [map(number, row.values()) for row in rows])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--victims", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=[])


if __name__ == "__main__":
    command_line(__doc__, run, page, "crafting.md", add_options)
