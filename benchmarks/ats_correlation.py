"""Does ATS's privacy score say what an attack will get? Its correlation with PSNR over random policies.

    GRADVEIL_DATA=… python benchmarks/ats_correlation.py --data cifar10 --model convnet:width=8 --out ats-cifar10.json
    python benchmarks/ats_correlation.py --data mnist-5k --model cnn --policies 30

Every policy is scored on one set of images and attacked on another, on the same half-trained model; PSNR is against the
transformed image, as in the paper (Figure 2: r = 0.697 over 100 policies). A policy that is begun before the time is up
is finished; the summary says how many there were.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from scipy.stats import pearsonr, spearmanr

from gradveil import __version__, attacks
from gradveil.client import Client
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.defenses.data.ats import Policy, write_policy
from gradveil.defenses.data.ats_search import Scorer, Search, candidates, half_trained
from gradveil.files import write_json
from gradveil.gradients import ModelFunction
from gradveil.metrics import psnr
from gradveil.models import build
from gradveil.types import LocalTraining, Sighting, generator, observe


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--data", default="mnist-5k")
    read.add_argument("--model", default="cnn")
    read.add_argument("--policies", type=int, default=24)
    read.add_argument("--images", type=int, default=20, help="that a policy is scored on")
    read.add_argument("--victims", type=int, default=6, help="that are attacked under it")
    read.add_argument("--attack", default="ig:steps=300,tv=0.001")
    read.add_argument("--minutes", type=float, default=10)
    read.add_argument("--epochs", type=int, default=50, help="of the half-trained model")
    read.add_argument("--seed", type=int, default=0)
    read.add_argument("--out", type=Path)
    given = read.parse_args()
    begun = time.monotonic()
    torch.set_num_threads(1)

    data = load(given.data, seed=given.seed)
    shape, classes = data.input_shape, data.num_classes
    module = build(given.model, input_shape=shape, num_classes=classes, seed=given.seed)
    search = Search(candidates=given.policies, images=given.images, epochs=given.epochs, seed=given.seed)
    trained = half_trained(module, data.private, mean=data.mean, std=data.std, search=search)
    order = torch.randperm(len(data.test), generator=generator(given.seed, "ats-images"))
    scored, victims = data.test[order[: given.images]], data.test[order[given.images :][: given.victims]]

    function = ModelFunction(module)
    tensors = {"images": scored.x, "labels": scored.y, "mean": data.mean, "std": data.std}
    tensors |= {f"fresh.{n}": t for n, t in function.state().items()} | {f"trained.{n}": t for n, t in trained.items()}
    scorer, attack = Scorer(module, tensors, search), attacks.parse(given.attack)

    def gained(policy: Policy) -> float:
        """Mean PSNR of the attack under a policy."""
        client = Client(
            function,
            parse(f"ats:policy={write_policy((policy,))}"),
            LocalTraining(),
            state=trained,
            private=data.private,
            public=None,
            num_classes=classes,
            mean=data.mean,
            std=data.std,
            seed=given.seed,
        )
        sent = [client.round(trained, victims[i : i + 1], i) for i in range(len(victims))]
        seen = [
            observe(
                function,
                [Sighting(trained, update)],
                input_shape=shape,
                num_classes=classes,
                mean=data.mean,
                std=data.std,
                level="paper",
                trace=trace,
            )
            for update, trace in sent
        ]
        rebuilt = torch.cat([found.images for found in attack(seen, seed=given.seed)])
        return float(psnr(torch.cat([trace.fed.x for _, trace in sent]), rebuilt).mean())

    rows: list[tuple[str, float, float]] = []
    for policy in candidates(search):
        if time.monotonic() - begun > 60 * given.minutes:
            break
        rows.append((write_policy((policy,)), scorer.privacy(policy), gained(policy)))
        print("{:3} {:>9}  S_pri {:.3f}  PSNR {:.2f} dB".format(len(rows), *rows[-1]), flush=True)

    scores, levels = [row[1] for row in rows], [row[2] for row in rows]
    straight, ranked = pearsonr(scores, levels), spearmanr(scores, levels)
    summary = {
        "policies": len(rows),
        "pearson": {"r": float(straight.statistic), "p": float(straight.pvalue)},
        "spearman": {"r": float(ranked.statistic), "p": float(ranked.pvalue)},
        "psnr": {"mean": statistics.fmean(levels), "min": min(levels), "max": max(levels)},
        "seconds": round(time.monotonic() - begun),
    }
    print(summary)
    if given.out:
        about = {
            "date": str(date.today()),
            "gradveil": __version__,
            "torch": torch.__version__,
            "on": platform.machine(),
        }
        options = {name: str(value) for name, value in vars(given).items()}
        write_json(given.out, {"options": options, **about, **summary, "rows": [list(row) for row in rows]})


if __name__ == "__main__":
    main()
