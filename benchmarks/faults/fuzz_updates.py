"""Spoilt tensors: updates, checkpoints, and the state of a training."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from damage import CLASSES, HUGE, SHAPE, Job, Random, damaged, safetensors, text, value

import gradveil as gv
from gradveil.data import DataSet, load
from gradveil.federation import FederationPlan, train


def _data() -> DataSet:
    draw = torch.Generator().manual_seed(0)
    return load((torch.rand(60, *SHAPE, generator=draw), torch.arange(60) % CLASSES))


DATA = _data()


def victim() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4), torch.nn.Sigmoid(), torch.nn.Linear(4, 3))


DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "C64": 8, "X": 4}


def tensors_file(rng: Random, file: Path, meta: dict[str, object]) -> None:
    """The victim's tensors, with names, types, shapes, offsets and values that may lie."""
    header: dict[str, object] = {}
    body = b""
    for name, tensor in victim().state_dict().items():
        kind = "F32" if rng.random() < 0.85 else rng.choice(list(DTYPES))
        shape: list[object] = list(tensor.shape)
        if rng.random() < 0.08:
            shape = [rng.choice([*HUGE, -1, 1, 36, "4", None, 0.5]) for _ in range(rng.randrange(4))]
        if rng.random() < 0.08:
            name = rng.choice([name + "x", "", "é\0", "../../x", "1.weight", "__metadata__", text(rng, 6)])
        values = np.random.default_rng(rng.randrange(2**32)).normal(size=tensor.numel()).astype(np.float32)
        if rng.random() < 0.08:
            values[0] = rng.choice([np.nan, np.inf, 1e38, 0.0])
        raw = (values.tobytes() * 2)[: tensor.numel() * DTYPES[kind]]
        start: object = len(body)
        end: object = len(body) + len(raw)
        if rng.random() < 0.06:
            start, end = (rng.choice([*HUGE, 0, start, end]) for _ in range(2))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        body += raw
    if rng.random() < 0.7:
        header["__metadata__"] = {k: v if isinstance(v, str) else json.dumps(v) for k, v in meta.items()}
    elif rng.random() < 0.3:
        header["__metadata__"] = value(rng)
    content = safetensors(rng, header, body)
    if rng.random() < 0.1:  # a name twice
        content = content.replace(b'"1.bias"', b'"1.weight"')
    file.write_bytes(damaged(rng, content) if rng.random() < 0.4 else content)


def facts(rng: Random) -> dict[str, object]:
    told: dict[str, object] = {"gradveil": "update", "kind": "gradient", "examples": "1", "input_shape": list(SHAPE)}
    told |= {"num_classes": 3, "mean": [0.5], "std": [0.5]}
    for _ in range(rng.choice([0, 0, 1, 2])):
        key = rng.choice(["kind", "examples", "input_shape", "num_classes", "mean", "std", "lr", "local_steps", text(rng, 6)])
        told[key] = rng.choice([value(rng), rng.choice(["gradient", "delta"]), rng.choice(HUGE)])
    return told


def update(rng: Random, folder: Path) -> Job:
    file = folder / "update.safetensors"
    tensors_file(rng, file, facts(rng))
    options: dict[str, Any] = {"input_shape": SHAPE} if rng.random() < 0.3 else {}
    options |= {"labels": [rng.choice([0, 1, 2, 3, -1])]} if rng.random() < 0.1 else {}

    def job() -> object:
        rebuilt = gv.attack_update(update=file, model=victim(), attacks=["linear", "ig:steps=2"], budget="quick", **options)
        return rebuilt.save(folder / "out")

    return job


def checkpoint(rng: Random, folder: Path) -> Job:
    if rng.random() < 0.35:
        return training_state(rng, folder)
    before, after = folder / "before.safetensors", folder / "after.safetensors"
    for file in (before, after):
        tensors_file(rng, file, {})
    more: dict[str, Any] = {"lr": rng.choice([0.1, 0.0, -1.0, float("nan"), 1e300])} if rng.random() < 0.9 else {}

    def job() -> object:
        rebuilt = gv.attack_update(
            before=before, after=after, model=victim(), input_shape=SHAPE, attacks=["linear", "ig:steps=2"], **more
        )
        return rebuilt.save(folder / "out")

    return job


def training_state(rng: Random, folder: Path) -> Job:
    """The folder of a training run that goes on: its state may be damaged."""
    run = folder / "run"
    shutil.copytree(_trained(), run)
    for file in run.iterdir():
        if file.is_file() and rng.random() < 0.7:
            file.write_bytes(damaged(rng, file.read_bytes()))
    return lambda: train(victim(), DATA, "none", FederationPlan(rounds=2, clients=2, images_per_client=12), folder=run)


_TRAINED: list[Path] = []


def _trained() -> Path:
    if not _TRAINED:
        folder = Path(tempfile.mkdtemp(prefix="gradveil-fuzz-")) / "run"
        train(victim(), DATA, "none", FederationPlan(rounds=1, clients=2, images_per_client=12), folder=folder)
        state = folder / "state.safetensors"
        content = state.read_bytes().replace(b'\\"rounds\\": 1', b'\\"rounds\\": 2')
        assert len(content) == state.stat().st_size
        state.write_bytes(content)  # so that a second round is still to be done
        _TRAINED.append(folder)
    return _TRAINED[0]
