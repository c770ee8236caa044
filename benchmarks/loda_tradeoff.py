"""LODA's trade-off: how far obscured images are from their originals, and how well a network trained on them does.

    python benchmarks/loda_tradeoff.py --data mnist-5k --c 0.03 0.1 0.3 --out loda-mnist.json
    GRADVEIL_DATA=… python benchmarks/loda_tradeoff.py --data cifar10 --images 500

Every row obscures the same private images, trains a fresh network on them and tests it on clean images. Two controls
frame the rows: a network trained on the private images as they are, and one on the obscured images' public starts,
which know nothing of the private ones. `identified` and `correlation` are by |correlation|, so a negative counts as a
likeness; `sign` is the share of positive correlations minus that of negative ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from gradveil import __version__
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defenses.data.loda.defense import Loda
from gradveil.defenses.registry import parse
from gradveil.metrics import identify, psnr, ssim
from gradveil.recipes.measures import accuracy
from gradveil.storage.files import write_json


def likeness(original: Batch, shown: Tensor, pool: Batch) -> dict[str, float]:
    seen = identify(original.x, original.y, shown, pool)
    a, b = (x.flatten(1) - x.flatten(1).mean(dim=1, keepdim=True) for x in (original.x, shown))
    return {
        "psnr": float(psnr(original.x, shown).mean()),
        "psnr_max": float(psnr(original.x, shown).max()),
        "ssim": float(ssim(original.x, shown).mean()),
        "correlation": float(seen.likeness.mean()),
        "sign": float((a * b).sum(dim=1).sign().mean()),
        "identified": float(seen.identified.float().mean()),
    }


def show(name: str, row: dict[str, float]) -> None:
    figures = "  ".join(f"{key} {value:6.2f}" for key, value in row.items())
    print(f"{name:32s} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist-5k")
    parser.add_argument("--model", default="cnn", help="the network that is trained on obscured images")
    parser.add_argument("--loda", default="loda", help="settings other than c, as in loda:variant=loda2")
    parser.add_argument("--c", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2, help="networks that are trained for each row")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.time()

    data = load(options.data, seed=0)
    private, pool = data.private[: options.images], data.pool()

    def trained_on(x: Tensor) -> float:
        runs = [accuracy(options.model, Batch(x, private.y), data, options.epochs, seed) for seed in range(options.seeds)]
        return sum(runs) / len(runs)

    rows: dict[str, dict[str, float]] = {"original images": {"accuracy": trained_on(private.x)}}
    show("original images", rows["original images"])
    for c in options.c:
        method = parse(f"{options.loda}{',' if ':' in options.loda else ':'}c={c}")
        assert isinstance(method, Loda)
        memory = method.equip(data.public, data.input_shape)
        start = memory.starts(private.x.shape, generator(0, "start"))
        if c == options.c[0]:
            rows["their public starts"] = {"accuracy": trained_on(start), **likeness(private, start, pool)}
            show("their public starts", rows["their public starts"])
        before = time.process_time()
        parts = zip(private.x.split(128), start.split(128), strict=True)
        obscured = torch.cat([method.obscure(x, begin, memory) for x, begin in parts])
        obscured = (obscured * 255).round() / 255
        cost = (time.process_time() - before) / len(private)
        rows[method.spec] = {"accuracy": trained_on(obscured), **likeness(private, obscured, pool), "seconds_per_image": cost}
        show(method.spec, rows[method.spec])
    if options.out:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        about = {"gradveil": __version__, "torch": torch.__version__, "machine": platform.machine()}
        about |= {"date": date.today().isoformat(), "seconds": f"{time.time() - began:.0f}"}
        write_json(options.out, {"settings": settings, "rows": rows, "environment": about})
        print(json.dumps(about))


if __name__ == "__main__":
    main()
