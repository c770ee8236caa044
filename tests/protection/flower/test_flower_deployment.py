"""The example as a person runs it: a SuperLink and two SuperNodes that talk TLS, from its own script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradveil.storage.updates import load_update

pytest.importorskip("flwr", reason="the deployment needs flwr")

EXAMPLE = Path(__file__).parents[3] / "examples" / "flower-cifar"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_two_rounds_over_tls_with_defended_clients(tmp_path: Path) -> None:
    """On the embedded digits, so that no file is needed; every process that was started has ended."""
    out = tmp_path / "out"
    command = [sys.executable, str(EXAMPLE / "deploy.py"), "--out", str(out), "--images", "20", "--data", "mnist-5k"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    started = [int(pid) for pid in re.findall(r"started [\w-]+, process (\d+)", done.stdout)]
    assert len(started) == 3
    assert not [pid for pid in started if alive(pid)]

    updates = sorted((out / "round-001").glob("client-*.safetensors"))
    assert len(updates) == 2
    parts = set()
    for path in updates:
        update, facts = load_update(path)
        values = torch.cat([t.flatten() for t in update.tensors.values()])
        assert float((values == 0).float().mean()) == pytest.approx(0.9, abs=0.01)  # pruned on the client
        assert (update.examples, facts["lr"]) == (20, 0.02)
        assert set(update.tensors) == set(load_file(out / "round-001" / "before.safetensors"))
        parts.add(facts["reported"]["metrics"]["part"])
        assert "90.0% unchanged" in done.stdout
    assert parts == {0, 1}
    curves = json.loads((out / "accuracy.json").read_text())
    assert (len(curves["acc_test"]), len(curves["acc_clients"])) == (3, 2)  # before the first round too
