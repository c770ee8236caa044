"""Killed and resumed: what is finished stays as it is, and the summary is that of a run that was never stopped."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec

DEFENSES = ["gaussian:std=3.0", "prune:ratio=0.9", "clip"]


def start(digits: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    chosen = [w for d in DEFENSES for w in ("--defense", d)]
    words = ["audit", "--data", digits, *chosen, "--attack", "ig:steps=150", "--victims", "2", "--workers", "1"]
    command = [sys.executable, "-m", "gradveil", *words, "--out", str(folder)]
    # A test run in the background of a shell ignores Ctrl-C, and its children would inherit that.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    out = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=environment, preexec_fn=listen, **out)  # noqa: PLW1509


def stored(folder: Path) -> dict[str, tuple[int, int]]:
    files = [*(folder / "cells").glob("*.json"), *(folder / "tensors").glob("*.safetensors")]
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}


def wait_for_attacks(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while sum('"kind": "attack"' in p.read_text() for p in (folder / "cells").glob("*.json")) < count:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_killed_and_a_stopped_run_go_on_from_what_is_done(digits, tmp_path, command_environment, comparable):
    folder = tmp_path / "run"
    killed = start(digits, folder, command_environment)
    wait_for_attacks(killed, folder, 1)
    killed.kill()
    killed.wait()
    done = stored(folder)
    assert not (folder / "summary.json").exists()

    stopped = start(digits, folder, command_environment)
    wait_for_attacks(stopped, folder, 2)
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 130
    assert "The same command goes on from there" in said and "Traceback" not in said
    assert done.items() <= stored(folder).items()
    done = stored(folder)

    case = Case(make_spec({"data": digits, "defenses": DEFENSES, "attacks": "ig:steps=150", "victims": 2}))
    run_audit(case, Execution(out=folder, workers=0))
    assert done.items() <= stored(folder).items()
    run_audit(case, Execution(out=tmp_path / "other", workers=0))
    assert comparable(folder) == comparable(tmp_path / "other")
