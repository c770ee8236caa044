"""What was wrong in 0.1.0, as commands: each case says what happens now.

    python benchmarks/faults/old_faults.py                         # this version, and the section in reliability.md
    python benchmarks/faults/old_faults.py --source OLD/src        # another checkout, nothing is recorded

A case runs the command line, or a few lines of Python, as a user would, in a folder of its own, with limits on time and
address space. It returns what went wrong, or nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from record import record
from safetensors.numpy import save_file

SECONDS, CLOCK, MEMORY = 60, 400, 12 * 2**30  # of processor time, of the clock, bytes of address space
CASES: dict[str, Callable[[Path], str | None]] = {}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "COLUMNS": "200"}
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
MESSAGES = """
import torch, gradveil as gv
from gradveil import flower
from flwr.app import ArrayRecord, Context, Message, RecordDict, MetricRecord
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
def message(state):
    made = Message(RecordDict({"arrays": ArrayRecord(state)}), dst_node_id=7, message_type="train")
    made.metadata.__dict__["_message_id"] = "one"
    return made
"""


def case(name: str) -> Callable[[Callable[[Path], str | None]], Callable[[Path], str | None]]:
    def register(function: Callable[[Path], str | None]) -> Callable[[Path], str | None]:
        CASES[name] = function
        return function

    return register


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def run(words: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**ENVIRONMENT, **more},
        text=True,
        errors="replace",
        capture_output=True,
        timeout=CLOCK,
        stdin=subprocess.DEVNULL,
        preexec_fn=_limits,
        check=False,
    )


def gradveil(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "gradveil", *words], folder, **more)


def python(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    return run(["-c", text], folder)


def refused(done: subprocess.CompletedProcess[str]) -> str | None:
    """Exit code 2 with one line, or what happened instead."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode != 2 or len(lines) != 1:
        return f"exit code {done.returncode}, {len(lines)} lines: {lines[-1][:80] if lines else ''}"
    return None


def small_audit(folder: Path, out: str = "run") -> list[str]:
    data = folder / "data.npz"
    if not data.exists():
        draw = np.random.default_rng(0)
        np.savez(data, images=draw.random((300, 6, 6)).astype(np.float32), labels=np.arange(300) % 3)
    words = ["audit", "--data", str(data), "--model", "smlp", "--attack", "linear", "--defense", "prune:ratio=0.9"]
    return [*words, "--victims", "2", "--quiet", "--out", str(folder / out)]


# -- protection --------------------------------------------------------------------------------------------------------


@case("two processes draw different noise")
def noise_differs(folder: Path) -> str | None:
    text = TRAIN + 'gv.protect(net, "gaussian:std=1.0", data=(x, y)).backward(x, y); print(net[1].weight.grad.sum().item())'
    first, second = (python(folder, text) for _ in range(2))
    if first.returncode or second.returncode:
        return (first.stderr or second.stderr)[-100:]
    return "the same noise" if first.stdout == second.stdout else None


@case("two protected copies differ")
def copies_differ(folder: Path) -> str | None:
    for label in "ab":
        (folder / "src" / label).mkdir(parents=True)
        for i in range(4):
            picture = np.random.default_rng(i).integers(0, 255, (12, 12), dtype=np.uint8)
            Image.fromarray(picture).save(folder / "src" / label / f"{i}.png")
    for copy in ("one", "two"):
        done = gradveil(folder, "protect", "src", copy, "--defense", "ats", "--quiet")
        if done.returncode:
            return done.stderr[-100:]
    one, two = ([p.read_bytes() for p in sorted((folder / c).rglob("*.png"))] for c in ("one", "two"))
    return "the same pictures twice" if one == two else None


@case("a defense that returns nothing sends nothing (guard)")
def guard_is_closed(folder: Path) -> str | None:
    text = MESSAGES + (
        "from gradveil.defenses import Defense\n"
        "class Empty(Defense):\n    stages = frozenset({'update'})\n    def update(self, tensors, step): return {}\n"
        "x, y = torch.rand(6, 1, 6, 6), torch.arange(6) % 3\n"
        "guard = flower.protect(message(net.state_dict()), context, net, Empty(), data=(x, y))\n"
        "guard.backward(x, y); torch.optim.SGD(guard.model.parameters(), lr=0.1).step()\n"
        "try: reply = guard.reply()\n"
        "except gv.UserError if hasattr(gv, 'UserError') else Exception: print('refused')\n"
        "else: print('refused' if reply.has_error() else 'sent')\n"
    )
    done = python(folder, text)
    return None if "refused" in done.stdout else (done.stdout + done.stderr)[-100:]


@case("values that are not finite do not leave (mod)")
def mod_is_closed(folder: Path) -> str | None:
    text = MESSAGES + (
        "def trained(m, c):\n"
        "    state = {n: t * float('nan') for n, t in net.state_dict().items()}\n"
        "    return Message(RecordDict({'arrays': ArrayRecord(state)}), reply_to=m)\n"
        "reply = flower.mod('prune:ratio=0.5')(message(net.state_dict()), context, trained)\n"
        "print('refused' if reply.has_error() else 'sent')\n"
    )
    done = python(folder, text)
    return None if "refused" in done.stdout else (done.stdout + done.stderr)[-100:]


@case("the same message with another model brings other noise")
def noise_follows_the_model(folder: Path) -> str | None:
    text = MESSAGES + (
        "sent = []\n"
        "for factor in (1.0, 2.0):\n"
        "    state = {n: t * factor for n, t in net.state_dict().items()}\n"
        "    same = lambda m, c: Message(RecordDict({'arrays': ArrayRecord(state)}), reply_to=m)\n"
        "    reply = flower.mod('gaussian:std=1.0')(message(state), context, same)\n"
        "    sent.append(torch.tensor(reply.content['arrays']['1.weight'].numpy()) - state['1.weight'])\n"
        "print('differs' if (sent[0] - sent[1]).abs().max() > 1e-3 else 'the same noise')\n"
    )
    done = python(folder, text)
    return None if "differs" in done.stdout else (done.stdout + done.stderr)[-100:]


# -- files of the user, and files from strangers -----------------------------------------------------------------------


@case("files of a user in --out stay")
def dot_files_stay(folder: Path) -> str | None:
    words = small_audit(folder, "mine")
    files = {".env.local": "secret", ".pre-commit-config.yaml": "repos: []", ".git/.keep": ""}
    for name, content in files.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / name).write_text(content)
    gradveil(folder, *words)
    lost = [n for n, c in files.items() if not (folder / "mine" / n).is_file() or (folder / "mine" / n).read_text() != c]
    return f"deleted or changed: {', '.join(lost)}" if lost else None


def member(shape: tuple[int, ...], descr: str) -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode()


@case("npz whose class_names claim 10^11 entries of no bytes")
def endless_names(folder: Path) -> str | None:
    small_audit(folder)
    with zipfile.ZipFile(folder / "data.npz", "a") as archive:
        archive.writestr("class_names.npy", member((10**11,), "<U0"))
    return refused(gradveil(folder, "audit", "--data", "data.npz", "--plan"))


@case("a named pipe in the place of an archive, and of a picture")
def pipes(folder: Path) -> str | None:
    os.mkfifo(folder / "x.npz")
    (folder / "pictures" / "a").mkdir(parents=True)
    os.mkfifo(folder / "pictures" / "a" / "a.png")
    return refused(gradveil(folder, "audit", "--data", "x.npz", "--plan")) or refused(
        gradveil(folder, "audit", "--data", "pictures", "--plan")
    )


@case("EPS named .png starts no other program")
def no_other_program(folder: Path) -> str | None:
    (folder / "bin").mkdir()
    spy = folder / "bin" / "gs"
    spy.write_text(f"#!/bin/sh\ntouch {folder}/started\nexit 1\n")
    spy.chmod(0o755)
    eps = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\n%%EndComments\nshowpage\n%%EOF\n"
    for label in "ab":
        (folder / "pictures" / label).mkdir(parents=True)
        (folder / "pictures" / label / "a.png").write_text(eps)
    done = gradveil(folder, "audit", "--data", "pictures", "--plan", PATH=f"{folder}/bin:{os.environ['PATH']}")
    return "it ran gs" if (folder / "started").exists() else refused(done)


@case("metadata of an update: numbers that cannot be")
def metadata(folder: Path) -> str | None:
    weights = {"1.weight": np.ones((3, 36), np.float32), "1.bias": np.ones(3, np.float32)}
    (folder / "net.py").write_text(NET)
    lies = {"num_classes": ("40000000", '"10"', "10.0", "-5", "[10]"), "mean": (f"[1{'0' * 400}]",), "examples": ("9" * 5000,)}
    lies["input_shape"] = ("[true, 28, 28]", "[" * 2000 + "]" * 2000)
    faults = []
    for key, values in lies.items():
        for value in values:
            facts = {"gradveil": "update", "kind": "gradient", "examples": "1", "input_shape": "[1, 6, 6]", "num_classes": "3"}
            save_file(weights, folder / "u.safetensors", metadata={**facts, key: value})
            done = gradveil(
                folder, "attack", "u.safetensors", "--model", "net:make", "--attack", "linear", "--out", "o", "--quiet"
            )
            if "Traceback" in done.stderr or done.returncode not in (0, 2):
                faults.append(f"{key} {value[:20]}: exit code {done.returncode}")
    return "; ".join(faults) or None


@case("--out of 300 characters")
def long_name(folder: Path) -> str | None:
    return refused(gradveil(folder, *small_audit(folder), "--out", "x" * 300))


@case("damaged files of a run folder")
def damaged_run(folder: Path) -> str | None:
    words = small_audit(folder)
    if gradveil(folder, *words).returncode:
        return "the audit failed"
    faults = []
    for name in ("environment.json", "summary.json"):
        good = (folder / "run" / name).read_bytes()
        for content in ("[]", "null", "{}", "{", "[" * 5000):
            (folder / "run" / name).write_text(content)
            for command in (["report", "run", "--quiet"], words):
                done = gradveil(folder, *command)
                if "Traceback" in done.stderr or done.returncode not in (0, 2):
                    faults.append(f"{name} {content[:4]} {command[0]}")
        (folder / "run" / name).write_bytes(good)
    return "; ".join(faults) or None


@case("a YAML alias bomb in a stranger's run folder")
def alias_bomb(folder: Path) -> str | None:
    words = small_audit(folder)
    gradveil(folder, *words)
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (folder / "run" / "audit.yaml").write_text("l0: &l0 [x, x, x, x, x, x, x, x, x]\n" + levels)
    done = gradveil(folder, *words)
    return None if done.returncode in (0, 2) and "Traceback" not in done.stderr else done.stderr[-100:]


@case("two quick Ctrl-C")
def two_interrupts(folder: Path) -> str | None:
    words = small_audit(folder)
    words[words.index("linear")] = "ig:steps=100000"
    with subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words], cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as job:
        time.sleep(15)
        for _ in range(2):
            job.send_signal(signal.SIGINT)
            time.sleep(0.05)
        text = job.communicate(timeout=CLOCK)[1]
    return f"traceback: {text[-80:]}" if "Traceback" in text else None


# -- what is stored, and what a page holds -----------------------------------------------------------------------------


@case("the page is for its owner alone, and does not hold the private images")
def page(folder: Path) -> str | None:
    words = small_audit(folder)
    gradveil(folder, *words)
    file = folder / "run" / "report.html"
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode != 0o600:
        return f"mode {mode:o}"
    gradveil(folder, "report", "run", "--pictures", "shown", "--quiet")
    shown = {part[:200] for part in file.read_text().split("data:image/png;base64,")[1:]}
    gradveil(folder, "report", "run", "--pictures", "blurred", "--quiet")
    text = file.read_text()
    return "the clear pictures are in the blurred page" if any(part in text for part in shown) else None


@case("SIGTERM leaves no tensors behind")
def terminated(folder: Path) -> str | None:
    (folder / "tmp").mkdir()
    text = TRAIN + (
        "data = (torch.rand(300, 1, 6, 6), torch.arange(300) % 3)\n"
        "print('go', flush=True)\n"
        "gv.audit(data, net, ['none', 'prune:ratio=0.5'], ['linear', 'ig:steps=100000'], victims=2, quiet=True)\n"
    )
    environment = {**ENVIRONMENT, "TMPDIR": str(folder / "tmp")}
    with subprocess.Popen([sys.executable, "-c", text], cwd=folder, env=environment, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        until = time.monotonic() + CLOCK
        while time.monotonic() < until and not [p for p in (folder / "tmp").rglob("*") if p.is_file()]:
            time.sleep(0.1)
        time.sleep(5)
        job.terminate()
        job.wait(CLOCK)
    left = [p.name for p in (folder / "tmp").rglob("*.safetensors")]
    return f"{len(left)} files of tensors" if left else None


@case("swapped cells are noticed")
def swapped_cells(folder: Path) -> str | None:
    words = small_audit(folder)
    gradveil(folder, *words)
    before = json.loads((folder / "run" / "summary.json").read_text())
    cells = {p: p.read_bytes() for p in sorted((folder / "run" / "cells").glob("*.json"))}
    paths = list(cells)
    for path, other in zip(paths, paths[1:] + paths[:1], strict=True):
        path.write_bytes(cells[other])
    gradveil(folder, *words)
    after = json.loads((folder / "run" / "summary.json").read_text())
    rows = [[(d["spec"], d["verdict"], [a["spec"] for a in d["attacks"]]) for d in s["defenses"]] for s in (before, after)]
    return None if rows[0] == rows[1] else "another table"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="the src folder of another checkout; nothing is recorded")
    parser.add_argument("--only", help="cases whose name holds this text")
    options = parser.parse_args()
    ENVIRONMENT["PYTHONPATH"] = str((options.source or Path(__file__).parents[2] / "src").resolve())
    outcomes = {}
    for name, check in CASES.items():
        if options.only and options.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="gradveil-case-") as folder:
            try:
                outcomes[name] = check(Path(folder))
            except subprocess.TimeoutExpired:
                outcomes[name] = f"no end within {CLOCK} s"
        print(f"{name}: {outcomes[name] or 'holds'}", flush=True)
    if not options.source and not options.only:
        rows = ["| case | now |", "|---|---|", *(f"| {name} | {fault or 'holds'} |" for name, fault in outcomes.items())]
        record("Faults of 0.1.0", "old_faults.py", rows)
    return 1 if any(outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
