"""Faults of 0.1.0 with files: those of the user were deleted, and those of strangers hung or broke a command."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile

import numpy as np
from old_case import CLOCK, NET, TRAIN, Place, broken, case, refused
from safetensors.numpy import save_file


@case("files of a user in --out stay")
def dot_files_stay(place: Place) -> str | None:
    words, mine = place.audit_words("mine"), place.folder / "mine"
    files = {".env.local": "secret", ".pre-commit-config.yaml": "repos: []", ".git/.keep": ""}
    for name, content in files.items():
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text(content)
    place.gradveil(*words)
    lost = [name for name, content in files.items() if not (mine / name).is_file() or (mine / name).read_text() != content]
    return f"deleted or changed: {', '.join(lost)}" if lost else None


def _member(shape: tuple[int, ...], descr: str) -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode()


@case("npz whose class_names claim 10^11 entries of no bytes")
def endless_names(place: Place) -> str | None:
    place.audit_words()
    with zipfile.ZipFile(place.folder / "data.npz", "a") as archive:
        archive.writestr("class_names.npy", _member((10**11,), "<U0"))
    return refused(place.gradveil("audit", "--data", "data.npz", "--plan"))


@case("npz with 2,000,000 class names")
def many_names(place: Place) -> str | None:
    place.audit_words()
    with np.load(place.folder / "data.npz") as data:
        names = np.array([str(i) for i in range(2_000_000)])
        np.savez(place.folder / "names.npz", images=data["images"], labels=data["labels"], class_names=names)
    return refused(place.gradveil("audit", "--data", "names.npz", "--plan"))


@case("a named pipe in the place of an archive")
def pipe_as_archive(place: Place) -> str | None:
    (place.folder / "data").mkdir()
    os.mkfifo(place.folder / "data" / "x.npz")
    return refused(place.gradveil("audit", "--data", "data", "--plan"))


@case("a named pipe in the place of a picture")
def pipe_as_picture(place: Place) -> str | None:
    os.mkfifo(place.pictures("pictures") / "a" / "a.png")
    return refused(place.gradveil("audit", "--data", "pictures", "--plan"))


@case("EPS named .png starts no other program")
def no_other_program(place: Place) -> str | None:
    (place.folder / "bin").mkdir()
    spy, started = place.folder / "bin" / "gs", place.folder / "started"
    spy.write_text(f"#!/bin/sh\ntouch {started}\nexit 0\n")
    spy.chmod(0o755)
    eps = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\n%%EndComments\nshowpage\n%%EOF\n"
    for picture in place.pictures("pictures").rglob("*.png"):
        picture.write_text(eps)
    done = place.gradveil("audit", "--data", "pictures", "--plan", PATH=f"{spy.parent}:{os.environ['PATH']}")
    return "it ran gs" if started.exists() else refused(done)


@case("metadata of an update: numbers that cannot be")
def metadata(place: Place) -> str | None:
    weights = {"1.weight": np.ones((3, 36), np.float32), "1.bias": np.ones(3, np.float32)}
    (place.folder / "net.py").write_text(NET)
    lies = {"num_classes": ("40000000", '"10"', "10.0", "-5", "[10]"), "mean": (f"[1{'0' * 400}]",), "examples": ("9" * 5000,)}
    lies["input_shape"] = ("[true, 28, 28]", "[" * 2000 + "]" * 2000)
    faults = []
    for key, value in [(key, value) for key, values in lies.items() for value in values]:
        facts = {"gradveil": "update", "kind": "gradient", "examples": "1", "input_shape": "[1, 6, 6]", "num_classes": "3"}
        save_file(weights, place.folder / "u.safetensors", metadata={**facts, key: value})
        model = "lenet" if key == "num_classes" else "net:make"
        words = ["attack", "u.safetensors", "--model", model, "--attack", "linear", "--out", "o", "--quiet"]
        done = place.gradveil(*words)
        if broken(done):
            faults.append(f"{key}={value[:12]}: exit code {done.returncode}")
    return "; ".join(faults) or None


@case("an update of 1,000,000 tiny tensors")
def many_tensors(place: Place) -> str | None:
    head = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(1_000_000)}
    text = json.dumps(head, separators=(",", ":")).encode()
    (place.folder / "u.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (place.folder / "net.py").write_text(NET)
    words = ["attack", "u.safetensors", "--model", "net:make", "--input-shape", "1,6,6", "--classes", "3", "--out", "o"]
    return refused(place.gradveil(*words, "--attack", "linear", "--quiet"))


@case("--out of 300 characters")
def long_name(place: Place) -> str | None:
    return refused(place.gradveil(*place.audit_words(), "--out", "x" * 300))


@case("an output folder with a NUL in its name")
def nul_in_name(place: Place) -> str | None:
    """No command line can hold it; a call from Python can."""
    call = "gv.audit((x, y), net, ['none'], ['linear'], victims=2, quiet=True, out='a\\0b')\n"
    error = f"try: {call}except Exception as error: print(type(error).__module__, type(error).__name__)\n"
    larger = "x, y = torch.rand(300, 1, 6, 6), torch.arange(300) % 3\n"
    return place.says(TRAIN + larger + error, "errors UserError")


@case("damaged files of a run folder")
def damaged_run(place: Place) -> str | None:
    words, run = place.audit_words(), place.folder / "run"
    if place.gradveil(*words).returncode:
        return "the audit failed"
    faults = []
    for path in (run / "environment.json", run / "summary.json", min((run / "cells").glob("*.json"))):
        intact = path.read_bytes()
        for content in ("null", "{}", "[" * 5000):
            for command in (["report", "run", "--quiet"], words):
                path.write_text(content)
                done = place.gradveil(*command)
                if broken(done):
                    kind = path.name if path.parent == run else "a cell"
                    faults.append(f"{kind} {content[:4]} {command[0]}")
        path.write_bytes(intact)
    return "; ".join(faults) or None


@case("a YAML alias bomb in a stranger's run folder")
def alias_bomb(place: Place) -> str | None:
    words = place.audit_words()
    place.gradveil(*words)
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (place.folder / "run" / "audit.yaml").write_text(f"l0: &l0 [x, x, x, x, x, x, x, x, x]\n{levels}data: *l11\n")
    done = place.gradveil(*words)
    return f"exit code {done.returncode}: {done.stderr[-60:]}" if broken(done) else None


@case("two quick Ctrl-C")
def two_interrupts(place: Place) -> str | None:
    words = place.audit_words()
    words[words.index("linear")] = "ig:steps=100000"
    job = subprocess.Popen(
        [sys.executable, "-m", "gradveil", *words],
        cwd=place.folder,
        env=place.environment,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores it for its background jobs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        until = time.monotonic() + CLOCK
        while time.monotonic() < until and not list((place.folder / "run").glob("cells/*.json")):
            time.sleep(0.1)
        time.sleep(2)  # the long attack has begun
        for _ in range(2):
            job.send_signal(signal.SIGINT)
            time.sleep(0.05)
        text = job.communicate(timeout=CLOCK)[1]
    finally:
        job.kill()
    return f"traceback: {text[-80:]}" if "Traceback" in text else None
