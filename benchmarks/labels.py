"""How many labels of a batch are told from its gradient, before and after training: a table in Markdown.

    python benchmarks/labels.py --model lenet --data mnist-5k

The share of the multiset of labels that is right, the mean over seeds and batches. `expected` tries all sizes of the
gradient; `rehearsed` takes the size that was sent and labelled public images. `told` is what attacks use.
"""

from __future__ import annotations

import argparse
from collections import Counter
from statistics import mean

import torch
from torch import Tensor

from gradveil import models
from gradveil.attacks.labels import _beliefs, infer_labels
from gradveil.attacks.labels.rules import expected_rule, llg
from gradveil.attacks.layers import classifier_gradients
from gradveil.attacks.unit_length import unit_length
from gradveil.core.gradients import ModelFunction
from gradveil.core.observation import Sighting, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Update
from gradveil.data import DataSet, load
from gradveil.federation.central import CentralPlan, train_central

SIZES, SEEDS, BATCHES = (4, 8, 16, 32), (100, 101, 102), 8


def share(labels: Tensor, true: Tensor) -> float:
    """How much of the multiset is right."""
    return sum((Counter(labels.tolist()) & Counter(true.tolist())).values()) / len(true)


def accuracies(data: DataSet, model: str, epochs: int, seed: int) -> dict[int, list[dict[str, float]]]:
    """Of every batch, by its size: the share that each rule tells."""
    module = models.build(model, input_shape=data.input_shape, num_classes=data.num_classes, seed=seed)
    if epochs:
        module.load_state_dict(train_central(module, data, "none", CentralPlan(epochs=epochs, seed=seed)), strict=False)
    function = ModelFunction(module)
    state, task = function.state(), data.task(function)
    rows: dict[int, list[dict[str, float]]] = {}
    for size in SIZES:
        for places in torch.randperm(len(data.private), generator=generator(seed, "labels")).split(size)[:BATCHES]:
            batch = data.private[places]
            update = Update(function.gradient(state, task.normalize(batch.x), batch.y), "gradient", size)
            seen = unit_length(observe(task, [Sighting(state, update)], public=data.public))
            weight, bias = classifier_gradients(seen)
            assert weight is not None and bias is not None
            rules = {
                "llg": llg(weight, size),
                "expected": expected_rule(bias, size, _beliefs(seen).mean(0)),
                "told": infer_labels(seen),
            }
            rows.setdefault(size, []).append({name: share(labels, batch.y) for name, labels in rules.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="mnist-5k")
    parser.add_argument("--epochs", type=int, nargs="*", default=[0, 8])
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    options = parser.parse_args()
    data = load(options.data)
    print("| data | model | epochs | batch | llg | expected | told |\n|---|---|---|---|---|---|---|")
    for epochs in options.epochs:
        seeds = [accuracies(data, options.model, epochs, seed) for seed in options.seeds]
        for size in SIZES:
            rows = [row for one in seeds for row in one[size]]
            cells = [f"{mean(row[name] for row in rows):.2f}" for name in ("llg", "expected", "told")]
            print(f"| {options.data} | {options.model} | {epochs} | {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
