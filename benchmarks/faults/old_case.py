"""How a case of `old_faults.py` runs commands: a folder of its own, limits on time and address space, one source tree."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

SECONDS, CLOCK, MEMORY = 40, 100, 12 * 2**30  # of processor time, of the clock, bytes of address space
TRAIN = """
import sys, torch, gradveil as gv
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
x, y = torch.rand(6, 1, 6, 6), torch.arange(6) % 3
"""
NET = """import torch
def make(*_, **__):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
"""


@dataclass(frozen=True)
class Place:
    """One folder, and the version of Gradveil that commands run in it."""

    folder: Path
    source: Path  # the folder `src` of a checkout

    @property
    def environment(self) -> dict[str, str]:
        quiet = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "COLUMNS": "200"}
        return {**os.environ, **quiet, "PYTHONPATH": str(self.source)}

    def run(self, words: list[str], *, limited: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**self.environment, **more},
            text=True,
            errors="replace",
            capture_output=True,
            timeout=CLOCK if limited else 3 * CLOCK,
            stdin=subprocess.DEVNULL,
            preexec_fn=_limits if limited else None,
            check=False,
        )

    def gradveil(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run(["-m", "gradveil", *words], **more)

    def python(self, text: str) -> subprocess.CompletedProcess[str]:
        return self.run(["-c", text])

    def says(self, text: str, word: str) -> str | None:
        """Whether lines of Python print the word, or their last words in its place."""
        done = self.python(text)
        return None if word in done.stdout else " ".join((done.stderr + done.stdout).split())[-100:]

    def audit_words(self, out: str = "run") -> list[str]:
        """A small audit of drawn images, as words of the command line."""
        data = self.folder / "data.npz"
        if not data.exists():
            draw = np.random.default_rng(0)
            np.savez(data, images=draw.random((300, 6, 6)).astype(np.float32), labels=np.arange(300) % 3)
        words = ["audit", "--data", str(data), "--model", "smlp", "--attack", "linear", "--defense", "prune:ratio=0.9"]
        return [*words, "--victims", "2", "--quiet", "--out", str(self.folder / out)]

    def pictures(self, name: str, per_class: int = 12) -> Path:
        """A folder of two classes of drawn pictures."""
        for label in "ab":
            (self.folder / name / label).mkdir(parents=True)
            for i in range(per_class):
                pixels = np.random.default_rng(i).integers(0, 255, (12, 12), dtype=np.uint8)
                Image.fromarray(pixels).save(self.folder / name / label / f"{i}.png")
        return self.folder / name


Check = Callable[[Place], str | None]  # what went wrong, or nothing
CASES: dict[str, Check] = {}


def case(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CASES[name] = check
        return check

    return register


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def refused(done: subprocess.CompletedProcess[str]) -> str | None:
    """Exit code 2 with one line, or what happened instead."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode != 2 or len(lines) != 1:
        return f"exit code {done.returncode}, {len(lines)} lines: {lines[-1][:80] if lines else ''}"
    return None


def broken(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a command ended otherwise than with a result or a refusal."""
    return "Traceback" in done.stderr or done.returncode not in (0, 2)
