"""An audit on a Ray cluster one of whose nodes is killed in the middle: cell by cell the same as a local run.

    python benchmarks/faults/ray_nodes.py

Starts a head without CPUs and two worker nodes on this machine, lets `gradveil audit --ray` run on them, kills one node
while it works, and compares the folder with that of a local run. Needs the extra `cluster`. Every process that is ended
is one that was started here. The outcome goes to docs/results/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import record
from safetensors.torch import load_file
from small import SECONDS, digits

DEFENSES = ["prune:ratio=0.9"]
ATTACKS = ["ig:steps=200", "ig:steps=150", "ig:steps=250", "dlg:steps=10", "linear"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray(*words: str) -> subprocess.Popen[bytes]:
    """A Ray node as a process group of its own that stays in the foreground, so that it can be ended by its number."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    memory = ["--object-store-memory", str(100 * 2**20)]
    # On a busy machine a node that lives may be late to say so.
    patient = {**os.environ, "RAY_health_check_timeout_ms": "60000", "RAY_health_check_initial_delay_ms": "60000"}
    return subprocess.Popen([*command, *memory], start_new_session=True, env=patient, **quiet)  # type: ignore[call-overload,no-any-return]


def end(node: subprocess.Popen[bytes]) -> None:
    """The node with all of its processes, at once and unasked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    address = f"127.0.0.1:{free_port()}"
    port = address.partition(":")[2]
    shared = ["--include-dashboard=false", "--temp-dir", str(folder)]
    nodes = [ray("--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=0", *shared)]
    try:
        time.sleep(8)
        for number in (1, 2):
            nodes.append(ray(f"--address={address}", f"--node-ip-address=127.0.0.{number + 1}", "--num-cpus=1"))
        time.sleep(8)
        yield address, nodes
    finally:
        for node in reversed(nodes):
            end(node)


def audit(data: Path, folder: Path, *more: str) -> subprocess.Popen[bytes]:
    chosen = [w for d in DEFENSES for w in ("--defense", d)] + [w for a in ATTACKS for w in ("--attack", a)]
    words = ["audit", "--data", str(data), *chosen, "--victims", "3", "--out", str(folder), "--quiet", *more]
    return subprocess.Popen([sys.executable, "-m", "gradveil", *words])


def contents(folder: Path) -> dict[str, Any]:
    """Every cell and every tensor, without what a clock says."""
    cells = {p.name: _timeless(json.loads(p.read_text())) for p in (folder / "cells").glob("*.json")}
    tensors = {p.name: {n: t.tolist() for n, t in load_file(p).items()} for p in (folder / "tensors").iterdir()}
    return {"cells": cells, "tensors": tensors, "summary": _timeless(json.loads((folder / "summary.json").read_text()))}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in SECONDS}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def campaign() -> list[str]:
    with tempfile.TemporaryDirectory(prefix="gv-") as name:
        root = Path(name)
        data = digits(root / "small.npz")
        assert audit(data, root / "local", "--workers", "1").wait() == 0
        with cluster(root / "ray") as (address, nodes):
            running = audit(data, root / "cluster", "--ray", address)
            cells = root / "cluster" / "cells"
            deadline = time.monotonic() + 300
            while len(list(cells.glob("*.json"))) < 4 and running.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            before = len(list(cells.glob("*.json")))
            end(nodes.pop())
            code = running.wait(600)
        assert code == 0, f"exit code {code}"
        local, remote = contents(root / "local"), contents(root / "cluster")
        total = len(local["cells"])
        same = sum(remote["cells"].get(key) == value for key, value in local["cells"].items())
        tensors = sum(remote["tensors"].get(key) == value for key, value in local["tensors"].items())
        assert before < total, "the node was killed too late"
        assert local == remote, f"{same} of {total} cells are equal"
    return [
        "A head and two worker nodes on one machine; one worker node was killed (SIGKILL to all of its processes).",
        "",
        "| cells | finished before the kill | equal to the local run | tensor files equal | summary equal |",
        "|---|---|---|---|---|",
        f"| {total} | {before} | {same} | {tensors} of {len(local['tensors'])} | yes |",
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lines = campaign()
    print("\n".join(lines))
    record("Many machines", "ray_nodes.py", lines)
