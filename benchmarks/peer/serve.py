"""The peer's side of the comparison: attacks of `breaching` on request, one JSON line in, one JSON line out.

Runs in the peer's own environment. A request names a model and its seed (so that both sides have the same weights), a
file of images and labels, the settings, and how many iterations; the answer has CPU seconds and PSNR of every image.
A request with an update has a file with weights, gradients and labels instead, and CPU seconds; the answer has the file
of the images that were rebuilt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import standin
import torch

from gradveil.models import build

standin.install()
out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # breaching prints; stdout is for answers alone

import breaching  # noqa: E402


def attack(request: dict[str, Any]) -> dict[str, Any]:
    with np.load(request["images"], allow_pickle=False) as file:
        pixels, labels, mean, std = (torch.from_numpy(file[k]) for k in ("x", "y", "mean", "std"))
    pixels, labels = pixels[: request["count"]], labels[: request["count"]]
    shape = list(pixels.shape[1:])
    model = build(request["model"], input_shape=tuple(shape), num_classes=request["classes"], seed=request["seed"])
    model.eval()
    mean, std = mean.view(-1, 1, 1), std.view(-1, 1, 1)
    loss = torch.nn.CrossEntropyLoss()
    config = breaching.get_attack_config(
        "invertinggradients",
        overrides=[
            f"optim.max_iterations={request['steps']}",
            f"regularization.total_variation.scale={request['tv']}",
            f"optim.callback={request['steps']}",
        ],
    )
    attacker = breaching.attacks.prepare_attack(model, loss, config)
    about = {"shape": shape, "classes": request["classes"], "modality": "vision"}
    about = {**about, "mean": mean.flatten().tolist(), "std": std.flatten().tolist()}
    payload = [
        {
            "parameters": [p.detach() for p in model.parameters()],
            "buffers": [b.detach() for b in model.buffers()],
            "metadata": breaching.utils.OmegaConf.create(about),
        }
    ]
    seconds, quality, norms = [], [], []
    torch.manual_seed(request["seed"])
    for x, y in zip(pixels.split(1), labels.split(1), strict=True):
        gradients = torch.autograd.grad(loss(model((x - mean) / std), y), list(model.parameters()))
        norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
        metadata = {"num_data_points": 1, "labels": y, "local_hyperparams": None}
        shared = [{"gradients": list(gradients), "buffers": None, "metadata": metadata}]
        begun = time.process_time()
        answer, _ = attacker.reconstruct(payload, shared, server_secrets={})
        seconds.append(time.process_time() - begun)
        error = ((answer["data"] * std + mean).clamp(0, 1) - x).double().square().mean()
        quality.append(float(-10 * error.log10()))
    return {"seconds": seconds, "psnr": quality, "norms": norms}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    return rebuild(request) if "update" in request else attack(request)


def rebuild(request: dict[str, Any]) -> dict[str, Any]:
    """The images behind one gradient, in as many iterations as the CPU seconds allow."""
    shape = request["shape"]
    model = build(request["model"], input_shape=tuple(shape), num_classes=request["classes"], seed=0)
    with np.load(request["update"], allow_pickle=False) as file:
        stored = {name: torch.from_numpy(file[name]) for name in file.files}
    model.load_state_dict({n.removeprefix("state."): t for n, t in stored.items() if n.startswith("state.")})
    model.eval()
    gradients = [stored[f"gradient.{name}"] for name, _ in model.named_parameters()]
    mean, std = stored["mean"], stored["std"]
    about = {"shape": shape, "classes": request["classes"], "modality": "vision"}
    about |= {"mean": mean.tolist(), "std": std.tolist()}
    payload = {"parameters": [p.detach() for p in model.parameters()], "buffers": [b.detach() for b in model.buffers()]}
    payload["metadata"] = breaching.utils.OmegaConf.create(about)
    metadata = {"num_data_points": len(stored["labels"]), "labels": stored["labels"], "local_hyperparams": None}

    def run(steps: int) -> tuple[torch.Tensor, float]:
        overrides = [f"optim.max_iterations={steps}", f"optim.callback={steps}"]
        config = breaching.get_attack_config("invertinggradients", overrides=overrides)
        attacker = breaching.attacks.prepare_attack(model, torch.nn.CrossEntropyLoss(), config)
        torch.manual_seed(0)
        shared = [{"gradients": gradients, "buffers": None, "metadata": dict(metadata)}]
        begun = time.process_time()
        answer, _ = attacker.reconstruct([payload], shared, server_secrets={})
        return answer["data"], time.process_time() - begun

    run(1)
    once, few = run(1)[1], run(4)[1]
    steps = max(1, int((request["seconds"] - once) / max((few - once) / 3, 1e-4)))
    images, seconds = run(steps)
    np.savez(request["out"], images=images.numpy())
    return {"seconds": seconds, "steps": steps}


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
