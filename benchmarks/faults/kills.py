"""Random kills: audits, trainings, recipes, policy searches and protected copies, each resumed to the result of a run
that nobody disturbed.

    python benchmarks/faults/kills.py --kills 300

A job is started, killed (SIGKILL to it and its workers) after a random time, and so on until it gets through; then what
it made is compared with what the same job made undisturbed. Beside every job, in its folder, in the folder for temporary
files and in the data lie canaries: files of a user with names like ours. After every run they are compared byte by byte.
Writes docs/results/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import record
from safetensors.torch import load_file
from small import SECONDS, digits

from gradveil import attacks, defenses, models
from gradveil.cli import main as main_of_gradveil
from gradveil.storage import resumable
from gradveil.storage.files import LOCK

MOST = 12  # kills of one run: then it is let through
CANARIES = (  # names that a careless clean-up would take for its own
    ".env.local",
    ".git/config",
    ".gradveil",
    ".gradveil.lock",
    ".gradveil-old/tensors.safetensors",
    ".history.json.tmp",
    ".tmp1234",
    "cells/1.json",
    "gradveil-notes/summary.json",
    "out.bak/cells/a.json",
    "out2/.keep",
    "policy.json.partial.1",
    "report.html",
    "summary.json.x1",
    "tensors/mine.safetensors",
)


@dataclass
class Job:
    """A command, and what it leaves behind as something that can be compared."""

    name: str
    words: Callable[[Path], list[str]]  # of a folder
    result: Callable[[Path], Any]
    seconds: float = 0.0  # of an undisturbed run
    kills: int = 0
    runs: int = 0
    equal: int = 0
    unlike: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # canaries


class Run:
    """A command in a fork of this process, whose imports are done: nearly all of its time is work that can be lost."""

    def __init__(self, words: list[str]):
        self.code: int | None = None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.dup2(self.log.fileno(), 2)
            code = 70
            try:
                code = main_of_gradveil(words)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it is still at work after so long."""
        until = time.monotonic() + seconds
        while self.code is None and time.monotonic() < until:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.005)
        return self.code

    def kill(self) -> None:
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-300:]


def descendants(pid: int) -> list[int]:
    """Workers are separate sessions: the process table lists them, and they are ended with their parent."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                children += [int(path.parent.name), *descendants(int(path.parent.name))]
    return children


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in SECONDS}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def audited(folder: Path) -> Any:
    out = folder / "out"
    left = [p.name for p in (*out.rglob(".*"), *out.rglob("*.partial.*")) if p.name != LOCK]
    nets = {p.name: {n: t.tolist() for n, t in load_file(p).items()} for p in out.glob("cache/*.safetensors")}
    cells = {p.name: timeless(json.loads(p.read_text())) for p in (out / "cells").iterdir()}
    tensors = {p.name: {n: t.tolist() for n, t in load_file(p).items()} for p in (out / "tensors").iterdir()}
    return [cells, tensors, timeless(json.loads((out / "summary.json").read_text())), nets, left]


def trained(folder: Path) -> Any:
    out = folder / "out"
    state = {n: t.tolist() for n, t in load_file(out / "state.safetensors").items()}
    return [timeless(json.loads((out / "history.json").read_text())), state]


def reproduced(folder: Path) -> Any:
    (result,) = (folder / "out" / "results").rglob("*.json")
    content = json.loads(result.read_text())
    return [content["rows"], content["claims"]]


def lay_canaries(folder: Path) -> dict[str, bytes]:
    """Files of a user, and all that lies in the folder from the start; name → content."""
    for number, name in enumerate(CANARIES):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"mine {number}".encode() * 50)
    return contents_of(folder)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def changed(folder: Path, before: dict[str, bytes]) -> list[str]:
    """The canaries that are gone or differ."""
    after = contents_of(folder)
    return [name for name, content in before.items() if after.get(name) != content]


def searched(folder: Path) -> Any:
    return json.loads((folder / "policy.json").read_text())


def protected(folder: Path) -> Any:
    pictures = {str(p.relative_to(folder)): np.asarray(Image.open(p)).tolist() for p in (folder / "copy").rglob("*.png")}
    return [pictures, sorted(p.name for p in folder.iterdir())]


RECIPE = """
title: A table of three defenses
common: {{data: "{data}", model: lenet, victims: 2, knowledge: paper, seed: 100}}
audits: {{a: {{}}}}
cell: {{audit: a, attack: "ig:steps=60"}}
rows:
  none: {{defense: none}}
  pruned: {{defense: "prune:ratio=0.9"}}
  noisy: {{defense: "gaussian:std=0.1"}}
columns:
  PSNR: {{metric: psnr}}
published:
  none: [50.0]
  pruned: [10.0]
  noisy: [10.0]
claims:
  - {{text: pruning hides the image, order: [pruned | PSNR, none | PSNR]}}
"""


def jobs(data: Path, few: Path, pictures: Path, recipe: Path) -> list[Job]:
    audit = ["audit", "--data", str(data), "--defense", "prune:ratio=0.9", "--attack", "ig:steps=80", "--attack", "linear"]
    audit += ["--victims", "2", "--quiet"]
    train = ["audit", "--data", str(few), "--defense", "refiner:steps=1,epochs=5"]
    train += ["--attack", "ggl:steps=2,draws=2,restarts=1", "--victims", "1", "--quiet"]
    federation = ["train", "--data", str(data), "--model", "lenet", "--defense", "gaussian:std=0.01", "--clients", "4"]
    federation += ["--rounds", "12", "--quiet"]
    search = ["search", "--data", str(data), "--model", "lenet", "--candidates", "24", "--images", "6", "--quiet"]
    return [
        Job("audit, in one process", lambda f: [*audit, "--workers", "0", "--out", str(f / "out")], audited),
        Job("audit, two workers", lambda f: [*audit, "--workers", "2", "--out", str(f / "out")], audited),
        Job("generator and evaluator, trained", lambda f: [*train, "--workers", "0", "--out", str(f / "out")], audited),
        Job("federated training", lambda f: [*federation, "--out", str(f / "out")], trained),
        Job("recipe", lambda f: ["reproduce", str(recipe), "--out", str(f / "out"), "--quiet"], reproduced),
        Job("ATS search", lambda f: [*search, "--workers", "1", "--out", str(f / "policy.json")], searched),
        Job(
            "protected copy",
            lambda f: ["protect", str(pictures), str(f / "copy"), "--defense", "ats", "--quiet", "--reproducible", "0"],
            protected,
        ),
    ]


def picture_folder(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        for i in range(400):
            Image.fromarray(draw.integers(0, 255, (12, 12), dtype=np.uint8)).save(folder / label / f"{i}.png")
    return folder


def difference(a: Any, b: Any, path: str = "") -> str:
    """Where two results first differ, or nothing."""
    if type(a) is not type(b) or (isinstance(a, list) and len(a) != len(b)) or (isinstance(a, dict) and a.keys() != b.keys()):
        return f"{path or '/'}: {str(a)[:80]} in place of {str(b)[:80]}"
    if isinstance(a, dict | list):
        keys = a if isinstance(a, dict) else range(len(a))
        return next((text for key in keys if (text := difference(a[key], b[key], f"{path}/{key}"))), "")
    return "" if a == b else f"{path}: {str(a)[:80]} in place of {str(b)[:80]}"


def disturbed(job: Job, expected: Any, folder: Path, rng: random.Random, left: int) -> int:
    """One run with kills; how many there were."""
    kills, before = 0, lay_canaries(folder)
    while True:
        run, at = Run(job.words(folder)), time.monotonic()
        if run.wait(job.seconds * rng.uniform(0.02, 0.7) if kills < min(MOST, left) else 600) is None:
            run.kill()
            kills += 1
            continue
        finished = "exists already" in run.said() and not difference(job.result(folder), expected)
        if run.code and not finished:  # a kill may come after the last file is in its place
            job.unlike.append(f"exit code {run.code}: {run.said()}")
            print(job.name, run.said(), file=sys.stderr)
        elif unlike := difference(job.result(folder), expected):
            job.unlike.append(f"another result at {unlike}")
            print(job.name, unlike, file=sys.stderr)
        else:
            job.equal += 1
        job.runs += 1
        job.changed += changed(folder, before)
        if not kills and not run.code:
            job.seconds = time.monotonic() - at  # the machine may have been busy at first
        return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="in all; the kinds of jobs take turns")
    parser.add_argument("--minutes", type=float, default=40, help="to stop after, at the latest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind of job alone; nothing is recorded")
    options = parser.parse_args()
    rng, begun = random.Random(options.seed), time.monotonic()
    torch.set_num_threads(1)
    for module in ("gradveil.auditing.run", "gradveil.protection.dataset", "gradveil.recipes.run", "torch._dynamo"):
        importlib.import_module(module)
    importlib.import_module("gradveil.defenses.data.ats.search")
    resumable.EVERY = 0.1  # these trainings take seconds, not minutes
    attacks.registry.names(), defenses.registry.names(), models.MODELS.names()
    with tempfile.TemporaryDirectory(prefix="gradveil-kills-") as name:
        root = Path(name)
        (root / "temporary").mkdir()
        tempfile.tempdir = str(root / "temporary")
        os.environ["TMPDIR"] = tempfile.tempdir
        data = root / "data"
        data.mkdir()
        small = digits(data / "small.npz")
        (data / "recipe.yaml").write_text(RECIPE.format(data=small))
        todo = jobs(small, digits(data / "few.npz", 200), picture_folder(data / "pictures"), data / "recipe.yaml")
        todo = [job for job in todo if options.only in (None, job.name)]
        users = {folder: lay_canaries(folder) for folder in (data, root / "temporary")}
        expected = []
        for job in todo:
            folder = root / "undisturbed" / job.name
            folder.mkdir(parents=True)
            lay_canaries(folder)
            at = time.monotonic()
            run = Run(job.words(folder))
            if run.wait(600) != 0:
                raise SystemExit(f"{job.name}: {run.said()}")
            job.seconds = time.monotonic() - at
            expected.append(job.result(folder))
        while (done := sum(j.kills for j in todo)) < options.kills and time.monotonic() - begun < 60 * options.minutes:
            place = min(range(len(todo)), key=lambda i: todo[i].kills)
            folder = root / "disturbed"
            folder.mkdir()
            todo[place].kills += disturbed(todo[place], expected[place], folder, rng, options.kills - done)
            shutil.rmtree(folder)
            for place_of_user, before in users.items():
                todo[place].changed += changed(place_of_user, before)
            print({j.name: (j.kills, j.runs, j.equal) for j in todo}, flush=True)
    rows = [
        "| job | kills | runs they hit | resumed to an equal result | otherwise | canaries changed |",
        "|---|---|---|---|---|---|",
    ]
    for j in todo:
        unlike, lost = "; ".join(j.unlike) or "none", ", ".join(j.changed) or "none"
        rows.append(f"| {j.name} | {j.kills} | {j.runs} | {j.equal} | {unlike} | {lost} |")
    total = sum(j.kills for j in todo)
    about = f"{total} SIGKILLs at random times, seed {options.seed}, {(time.monotonic() - begun) / 60:.0f} minutes. Equal: "
    about += "every number of every cell, tensor, network, policy or picture, and no file left over. Canaries: "
    about += (
        f"{len(CANARIES)} files of a user, with names like ours, in the folder of the job, beside the data and in the folder "
    )
    about += "for temporary files, compared byte by byte after every run."
    if options.only is None:
        record("Kills", "kills.py", [about, "", *rows])
    return 1 if any(j.unlike or j.changed for j in todo) else 0


if __name__ == "__main__":
    sys.exit(main())
