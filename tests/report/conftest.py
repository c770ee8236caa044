"""Synthetic runs in the format of a run's folder. Scores and rates are computed from the pictures, so they agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advised import advised
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scipy.stats import beta

from gradveil.storage.run_folder import StoredCell
from gradveil.summary import Summary

Images = NDArray[np.float32]
SCOPE = "lenet on mnist-5k, an untrained model, batches of 1 image, one gradient per update, 4 victims"


@dataclass
class Plan:
    """What to make up. `leak` says how much of an image every defense lets through, from 0 to 1."""

    leak: dict[str, float] = field(default_factory=lambda: {"none": 1.0, "prune:ratio=0.9": 0.6, "precode": 0.0})
    strength: dict[str, float] = field(default_factory=lambda: {"ig": 1.0, "dlg": 0.4, "precode-ignore": 0.8})
    verdict: dict[str, str] = field(default_factory=dict)
    victims: int = 4
    batch: int = 1
    shape: tuple[int, int, int] = (1, 12, 12)
    utility: bool = True
    tensors: bool = True
    against: Sequence[str] = ("original",)
    images: Images | None = None
    class_names: list[str] = field(default_factory=list)
    case: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # top-level fields of the summary


def stats(values: NDArray[Any]) -> dict[str, float]:
    return {k: float(getattr(values, k)()) for k in ("mean", "std", "min", "max")}


def interval(hits: int, n: int, chance: float = 0.005) -> dict[str, float]:
    low = 0.0 if hits == 0 else float(beta.ppf(0.025, hits, n - hits + 1))
    high = 1.0 if hits == n else float(beta.ppf(0.975, hits + 1, n - hits))
    return {"rate": hits / n, "low": low, "high": high, "chance": chance}


def test_of(hits: NDArray[np.bool_]) -> dict[str, float]:
    return {
        "statistic": 2.0 + 9.0 * float(hits.sum()), "null_mean": 2.0, "p": 0.001 if hits.any() else 0.6, "level": 0.05,
        "draws": 999, "strangers": 160, "untested": 0, "smallest_p": 0.001, "control_rate": 1.0, "control_null": 0.02,
        "power": 0.9, "detectable": 0.25,
    }  # fmt: skip


def make_run(folder: Path, plan: Plan | None = None) -> Path:
    """Write a whole run's folder but the page."""
    plan = plan or Plan()
    rng = np.random.default_rng(0)
    number = plan.victims * plan.batch
    flat = plan.images if plan.images is not None else _blobs(rng, number, plan.shape)
    original = flat.reshape(plan.victims, plan.batch, *plan.shape).astype(np.float32)
    labels = np.arange(number) % 3
    (folder / "cells").mkdir(parents=True)
    (folder / "tensors").mkdir()
    defenses = []
    for d, (defense, leak) in enumerate(plan.leak.items()):
        fed = np.clip(original[..., ::-1], 0, 1).copy() if "loda" in defense else original
        rows, hits = [], np.zeros(number, bool)
        psnrs, ssims = np.zeros(number), np.full(number, -2.0)
        by_victim: list[dict[str, Any]] = [{} for _ in range(number)]
        for a, (attack, strength) in enumerate(plan.strength.items()):
            key = f"cell-{d:02d}-{a:02d}"
            share = leak * strength
            noise = rng.random(original.shape, np.float32)
            rebuilt = (share * fed + (1 - share) * noise).astype(np.float32)
            mse = ((rebuilt - original) ** 2).reshape(number, -1).mean(1) + 1e-6
            psnr, ssim = -10 * np.log10(mse), np.clip(1 - 4 * np.sqrt(mse), -1, 1)
            identified = np.full(number, share > 0.3) & (rng.random(number) < 0.2 + share)
            better = identified & ~hits | (identified == hits) & (ssim > ssims)
            for i in np.flatnonzero(better):
                by_victim[i] = {
                    "victim": int(i // plan.batch), "image": int(i % plan.batch), "attack": attack,
                    "psnr": float(psnr[i]), "ssim": float(ssim[i]), "identified": bool(identified[i]),
                }  # fmt: skip
            psnrs, ssims, hits = np.maximum(psnrs, psnr), np.maximum(ssims, ssim), hits | identified
            row = {
                "spec": attack, "status": "ok", "adaptive": attack.startswith(defense.partition(":")[0]),
                "knowledge": "realistic", "updates": 1, "scored": number, "failed": 0, "error": None, "cell": key,
                "psnr": stats(psnr), "ssim": stats(ssim), "mse": stats(mse), "lpips": None,
                "asr": float((ssim >= 0.6).mean()), "identified": interval(int(identified.sum()), number),
                "label_accuracy": 1.0, "seconds": 4.2 + a, "iterations": 300,
            }  # fmt: skip
            rows += [{**row, "against": truth} for truth in plan.against]
            victims = [
                {"victim": i // plan.batch, "image": i % plan.batch, "psnr": float(psnr[i]), "ssim": float(ssim[i]),
                 "mse": float(mse[i]), "lpips": None, "identified": bool(identified[i]), "rank": 1, "failed": False,
                 "label": int(labels[i]), "label_guess": int(labels[i])}
                for i in range(number)
            ]  # fmt: skip
            steps = list(range(0, 301, 3))
            objective = [float(np.exp(-s * share / 40) + 1e-3) for s in steps]
            cell = {
                "key": key, "kind": "attack", "defense": defense, "attack": attack, "status": "ok", "rows": rows[-1:],
                "victims": victims, "history": {"objective": objective, "step": steps}, "seconds": 4.2,
                "iterations": 300, "tensors_sha256": None,
            }  # fmt: skip
            if plan.tensors:
                tensors = {"original": original, "fed": fed, "reconstruction": rebuilt}
                save_file(tensors, folder / "tensors" / f"{key}.safetensors")
            store_cell(folder, cell)
        worst = {
            "psnr": stats(psnrs), "ssim": stats(ssims), "mse": stats(10 ** (-psnrs / 10)), "lpips": None,
            "asr": float((ssims >= 0.6).mean()), "scored": number, "failed": 0, "attacks": len(plan.strength),
            "identified": interval(int(hits.sum()), number), "by_victim": by_victim,
        }  # fmt: skip
        accuracy = 0.93 - 0.04 * d
        entry: dict[str, Any] = {
            "spec": defense, "stage": ["update"], "counter": [], "attacks": rows, "worst": worst,
            "utility": None, "gradient": {"cosine": 1 - 0.1 * d, "noise_ratio": 0.1 * d},
            "verdict": plan.verdict.get(defense) or ("leaks" if hits.any() else "no leak shown"),
            "test": test_of(hits), "scope": SCOPE, "warnings": [],
        }  # fmt: skip
        if plan.utility:
            pdm = 100 * (0.93 - accuracy) / 0.93
            entry["utility"] = {"acc_test": accuracy, "acc_train": accuracy + 0.01, "acc_sensitive": None, "pdm": pdm,
                                "seconds_per_round": 2 + 0.4 * d, "overhead": 1 + 0.2 * d, "model": "lenet",
                                "audited_model": True, "audited_updates": True,
                                "scope": "FedSGD, 10 clients", "seeds": 3, "rounds": 20, "lr": 0.05,
                                "server_lr": 1.0}  # fmt: skip
            curve = [accuracy * (1 - np.exp(-r / 4)) for r in range(1, 21)]
            cell = {"key": f"utility-{d:02d}", "kind": "utility", "defense": defense, "attack": "", "tensors_sha256": None,
                    "history": {"acc_test": curve}}  # fmt: skip
            store_cell(folder, cell)
        defenses.append(entry)
    summary = {
        "schema": 2, "gradveil": "0.2.0", "suite": "standard-v2", "scope": SCOPE, "warnings": [],
        "granted": ["the model and every update that is sent"], "not_tested": ["a trained model"],
        "case": {"data": "mnist-5k", "model": "lenet", "victims": plan.victims, "batch_size": plan.batch,
                 "local_steps": 1, "local_lr": 0.01, "trained_rounds": 0, "trained_epochs": 0, "updates": 1,
                 "knowledge": "realistic", "budget": "quick", "seed": 0,
                 "input_shape": list(plan.shape), "num_classes": 3, "class_names": plan.class_names, **plan.case},
        "victims_needed": [{"share": 0.1, "victims": 15}, {"share": 0.5, "victims": None}],
        "defenses": defenses,
        "baseline": {"psnr": stats(np.array([9.0, 10.0])), "ssim": stats(np.array([0.1, 0.2])),
                     "identified": interval(0, number)},
        "command": "gradveil audit --data mnist-5k --model lenet --seed 0",
        **plan.extra,
    }  # fmt: skip
    _write(folder / "summary.json", advised(summary))
    environment = {
        "case": "0123456789abcdef", "data_sha256": "d" * 64, "model_sha256": "e" * 64, "seed": 0, "gradveil": "0.2.0",
        "python": "3.11.2", "packages": {"torch": "2.13.0"}, "platform": "Linux", "cpus": 2, "seconds": 83.2,
        "finished": "2026-11-18T01:30:00Z",
    }  # fmt: skip
    _write(folder / "environment.json", environment)
    (folder / "audit.yaml").write_text("data: mnist-5k\nmodel: lenet\nseed: 0\n")
    return folder


def _blobs(rng: np.random.Generator, number: int, shape: tuple[int, int, int]) -> Images:
    """Smooth bright spots on black, each elsewhere."""
    channels, height, width = shape
    y, x = np.mgrid[0:height, 0:width]
    centre = rng.random((number, channels, 2)) * [height, width]
    far = (y - centre[..., 0, None, None]) ** 2 + (x - centre[..., 1, None, None]) ** 2
    return np.exp(-far / (0.05 * height * width)).astype(np.float32)


def store_cell(folder: Path, cell: dict[str, Any]) -> None:
    """Write the file of a cell, with the hashes of its tensors and of itself."""
    tensors = folder / "tensors" / f"{cell['key']}.safetensors"
    digest = hashlib.sha256(tensors.read_bytes()).hexdigest() if tensors.is_file() else None
    stored = StoredCell.model_validate_json(json.dumps({**cell, "tensors_sha256": digest}))
    (folder / "cells" / f"{stored.key}.json").write_text(stored.sealed(), encoding="utf-8")


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """`run(leak=…, victims=…)` makes a folder and returns it."""

    def make(**fields: Any) -> Path:
        number = sum(1 for _ in tmp_path.glob("run-*"))
        return make_run(tmp_path / f"run-{number}", Plan(**fields))

    return make


@pytest.fixture(name="store_cell")
def _store_cell() -> Callable[[Path, dict[str, Any]], None]:
    return store_cell


@pytest.fixture
def parsed() -> Callable[[dict[str, Any]], Summary]:
    """A summary as the verdict makes it, of what a test has made of one."""
    return lambda summary: Summary.model_validate(advised(summary), strict=False)


@pytest.fixture
def summary(run: Callable[..., Path]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run() / "summary.json").read_text())
    return loaded
