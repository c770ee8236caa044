"""An audit on a Ray cluster one of whose nodes is killed in the middle: cell by cell the same as a local run. And one
that loses them all: it ends with one line, and what it finished is kept.

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


ASK = """
import sys, time, ray
until = time.monotonic() + float(sys.argv[3])
while time.monotonic() < until:
    try:
        if not ray.is_initialized():
            ray.init(sys.argv[1], log_to_driver=False)
        if sum(node["Alive"] for node in ray.nodes()) == int(sys.argv[2]):
            sys.exit(0)
    except (ConnectionError, RuntimeError, ValueError):
        ray.shutdown()
    time.sleep(1)
sys.exit("the cluster did not come up")
"""


def wait_for(address: str, nodes: int, seconds: int = 200) -> None:
    """Until so many nodes are there: on a busy machine that takes its time."""
    words = [sys.executable, "-c", ASK, address, str(nodes), str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds + 100)
    assert done.returncode == 0, done.stderr[-300:]


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
        wait_for(address, 1)
        for number in (1, 2):  # one after another: on a busy machine a start may take longer than Ray allows for
            nodes.append(ray(f"--address={address}", f"--node-ip-address=127.0.0.{number + 1}", "--num-cpus=1"))
            wait_for(address, number + 1)
        yield address, nodes
    finally:
        for node in reversed(nodes):
            end(node)


def audit(data: Path, folder: Path, *more: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
    chosen = [w for d in DEFENSES for w in ("--defense", d)] + [w for a in ATTACKS for w in ("--attack", a)]
    words = ["audit", "--data", str(data), *chosen, "--victims", "3", "--out", str(folder), "--quiet", *more]
    return subprocess.Popen([sys.executable, "-m", "gradveil", *words], stderr=stderr)


def contents(folder: Path) -> dict[str, Any]:
    """Every cell and every tensor, without what a clock says."""
    cells = {p.name: _timeless(json.loads(p.read_text())) for p in (folder / "cells").glob("*.json")}
    tensors = {p.name: {n: t.tolist() for n, t in load_file(p).items()} for p in (folder / "tensors").iterdir()}
    return {"cells": cells, "tensors": tensors, "summary": _timeless(json.loads((folder / "summary.json").read_text()))}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in SECONDS}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def finished(running: subprocess.Popen[bytes], folder: Path, count: int) -> dict[str, bytes]:
    """The cells that are stored as soon as there are so many."""
    deadline = time.monotonic() + 300
    while len(list((folder / "cells").glob("*.json"))) < count and running.poll() is None:
        assert time.monotonic() < deadline, "the cluster does no cells"
        time.sleep(0.05)
    return {p.name: p.read_bytes() for p in (folder / "cells").glob("*.json")}


def all_nodes_killed() -> list[str]:
    """All nodes are killed, without and with the head."""
    rows = []
    for killed, spared in (("both worker nodes", 1), ("both worker nodes and the head", 0)):
        with tempfile.TemporaryDirectory(prefix="gv-") as name:
            root = Path(name)
            data = digits(root / "small.npz")
            with cluster(root / "ray") as (address, nodes):
                running = audit(data, root / "run", "--ray", address, stderr=subprocess.PIPE)
                before = finished(running, root / "run", 3)
                while len(nodes) > spared:
                    end(nodes.pop())
                at = time.monotonic()
                _, said = running.communicate(timeout=300)
                seconds = time.monotonic() - at
            after = {p.name: p.read_bytes() for p in (root / "run" / "cells").glob("*.json")}
            lines = [line for line in said.decode().splitlines() if line.startswith("gradveil:")]
            assert running.returncode == 2 and len(lines) == 1, f"exit code {running.returncode}: {said.decode()}"
            assert all(after[key] == content for key, content in before.items())
            more = audit(data, root / "run", "--workers", "1").wait()
            assert more == 0, f"exit code {more} without the cluster"
            rows.append(f"| {killed} | {len(after)} | {seconds:.0f} s | {running.returncode} | {len(after)} |")
    head = "| killed | cells finished | the audit ended after | exit code | of them intact, and gone on from |"
    return ["When no node is left, the audit ends in one line.", "", head, "|---|---|---|---|---|", *rows]


def one_node_killed() -> list[str]:
    with tempfile.TemporaryDirectory(prefix="gv-") as name:
        root = Path(name)
        data = digits(root / "small.npz")
        assert audit(data, root / "local", "--workers", "1").wait() == 0
        with cluster(root / "ray") as (address, nodes):
            running = audit(data, root / "cluster", "--ray", address)
            before = len(finished(running, root / "cluster", 4))
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
    lines = [*one_node_killed(), "", *all_nodes_killed()]
    print("\n".join(lines))
    record("Many machines", "ray_nodes.py", lines)
