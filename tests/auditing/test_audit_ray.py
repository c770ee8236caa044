"""An audit on a Ray cluster that loses a node, or all: the script that shows it is the test, and a cluster that is none."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradveil import cli
from gradveil.auditing import cluster

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults" / "ray_nodes.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_node_killed", "all_nodes_killed"])
def test_a_killed_node_changes_nothing_and_when_all_are_gone_the_audit_ends(name, command_environment):
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    if not SCRIPT.exists():
        pytest.skip("the script is not here")
    call = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import ray_nodes; ray_nodes.{name}()"
    done = subprocess.run(
        [sys.executable, "-c", call], env=command_environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_ray_or_a_cluster_the_reason_is_one_line(digits, tmp_path, capsys):
    command = ["audit", "--data", digits, "--attack", "linear", "--quiet", "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--ray", "127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("gradveil[cluster]" in said or "no Ray cluster" in said)


class Pretended:
    """Ray as far as the audit uses it: tasks run at once in this process, until all nodes are lost."""

    exceptions = SimpleNamespace(RayTaskError=type("RayTaskError", (Exception,), {}), RayError=RuntimeError)

    def __init__(self, tasks: int, back: float | None = None, headless: bool = False):
        self.left, self.back, self.headless, self.lost, self.ended = tasks, back, headless, None, 0
        self.port = socket.create_server(("127.0.0.1", 0))  # where the head listens

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address=f"127.0.0.1:{self.port.getsockname()[1]}")

    def put(self, value):
        return value

    def remote(self, **_):
        def prepared(function):
            return SimpleNamespace(remote=lambda *given: Task(function, given))

        return prepared

    def wait(self, tasks, num_returns, timeout):
        if self.left == 0 and not self._returned():
            self.port.close() if self.headless else None
            time.sleep(timeout)
            return [], tasks
        self.left = max(0, self.left - 1)
        return tasks[:1], tasks[1:]

    def _returned(self):
        self.lost = self.lost or time.monotonic()
        return self.back is not None and time.monotonic() - self.lost >= self.back

    def get(self, task):
        return task.function(*task.given)

    def nodes(self):
        there = self.left > 0 or self._returned()
        assert there or not self.headless, "a dead head is not asked: it would never answer"
        return [{"Alive": True, "Resources": {"memory": 1.0}}, {"Alive": there, "Resources": {"CPU": 1.0}}]

    def shutdown(self):
        self.ended += 1
        self.port.close()


class Task:
    def __init__(self, function, given):
        self.function, self.given = function, given


@pytest.mark.parametrize("headless", [False, True])
def test_when_every_node_is_dead_the_audit_ends_in_one_line(headless, digits, tmp_path, monkeypatch, capsys, comparable):
    monkeypatch.setattr(cluster, "NO_NODE_SECONDS", 0.5)
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.05)
    fake = Pretended(tasks=2, headless=headless)
    monkeypatch.setattr(cluster, "_connect", lambda at: fake)
    run = ["audit", "--data", digits, "--attack", "linear", "--defense", "prune:ratio=0.9", "--victims", "2", "--quiet"]
    begun = time.monotonic()
    assert cli.main([*run, "--out", str(tmp_path / "run"), "--ray", "x"]) == 2
    assert time.monotonic() - begun < 60
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no node of the Ray cluster" in said and "goes on" in said
    assert fake.ended == 1
    kept = {p: (p.stat().st_ino, p.read_bytes()) for p in (tmp_path / "run" / "cells").iterdir()}
    assert len(kept) == 2 and not (tmp_path / "run" / "summary.json").exists()
    assert cli.main([*run, "--out", str(tmp_path / "run"), "--workers", "0"]) == 0
    assert all((p.stat().st_ino, p.read_bytes()) == value for p, value in kept.items())
    assert cli.main([*run, "--out", str(tmp_path / "local"), "--workers", "0"]) == 0
    assert comparable(tmp_path / "run") == comparable(tmp_path / "local")


def test_nodes_that_come_back_in_time_are_waited_for(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "NO_NODE_SECONDS", 30.0)
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.05)
    fake = Pretended(tasks=1, back=1.0)
    monkeypatch.setattr(cluster, "_connect", lambda at: fake)
    run = ["audit", "--data", digits, "--attack", "linear", "--defense", "none", "--victims", "2", "--quiet"]
    assert cli.main([*run, "--out", str(tmp_path / "run"), "--ray", "x"]) == 0
    assert fake.ended == 1 and (tmp_path / "run" / "summary.json").exists()
