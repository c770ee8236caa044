"""Spoilt text: methods as people write them, and YAML configs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from damage import HUGE, TEXTS, Job, Random, damaged, text, value

from gradveil import attacks, defenses, models
from gradveil.auditing.condition import Condition
from gradveil.auditing.spec import AuditSpec, read_spec
from gradveil.data import load
from gradveil.federation.partition import share


def grammar(rng: Random, folder: Path) -> Job:
    kinds: list[tuple[list[str], Callable[[str], object]]] = [
        (defenses.registry.names(), defenses.parse),
        (attacks.registry.names(), attacks.parse),
        (models.MODELS.names(), models.MODELS.parse),
        (["mnist-5k", "mnist", "cifar10", "torchvision", str(folder)], load),
        (["worst.ssim.max > 0.6", "spec != 'none' and worst.asr > 0.1", "not (worst.psnr.mean >= 20)"], Condition),
        (["iid", "dirichlet:alpha=0.5", "classes:per_client=2"], lambda s: share(torch.arange(30) % 3, 3, s, 0)),
    ]
    names, parse = rng.choice(kinds)
    name = rng.choice(names)
    written = name
    for _ in range(rng.randrange(4)):
        key = rng.choice(["ratio", "std", "steps", "policy", "restarts", "norm", "size", "private", "alpha", text(rng, 6)])
        setting = rng.choice([str(rng.choice(HUGE)), "0.5", "-1", "nan", "inf", "1e400", "3-1-7+43-18-18", *TEXTS])
        written += (":" if ":" not in written else ",") + f"{key}={setting}"
    if rng.random() < 0.3:
        written += "+" + rng.choice(names)
    if rng.random() < 0.4:
        written = damaged(rng, written.encode("utf-8", "replace")).decode("utf-8", "replace")
    if rng.random() < 0.1:
        written = text(rng, 40)
    return lambda: parse(written)


_KEYS = ("data", "model", "defenses", "attacks", "victims", "batch_size", "seed", "budget", "utility")
BOMB = f"{_KEYS[0]}: &data [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{key}: &{key} [{','.join([f'*{before}'] * 8)}]\n" for before, key in itertools.pairwise(_KEYS)
)  # a few lines that unfold to 134 million words


def config(rng: Random, folder: Path) -> Job:
    spec = {"data": "mnist-5k", "model": "lenet", "defenses": ["prune:ratio=0.9"], "attacks": ["ig:steps=5"], "victims": 2}
    for _ in range(rng.randrange(4)):
        key = rng.choice([*AuditSpec.model_fields, "out", text(rng, 10)])
        spec[key] = value(rng)
    with contextlib.suppress(yaml.YAMLError):
        written = yaml.safe_dump(spec, allow_unicode=rng.random() < 0.5)
    content = written.encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.4:
        content = damaged(rng, content)
    elif kind < 0.45:
        content = rng.choice(
            [BOMB, "- " * 3000, "[" * 3000, "{" * 500, "!!python/object/apply:os.getcwd []", "&a [*a]"]
        ).encode()
    elif kind < 0.5:
        content = rng.randbytes(rng.randrange(200))
    file = folder / "audit.yaml"
    file.write_bytes(content)
    return lambda: read_spec(file)
