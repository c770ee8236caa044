"""An audit on a Ray cluster that loses a node: the script that shows it is the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradveil import cli

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults" / "ray_nodes.py"


@pytest.mark.slow
def test_a_killed_node_changes_nothing(command_environment):
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    if not SCRIPT.exists():
        pytest.skip("the script is not here")
    call = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import ray_nodes; ray_nodes.campaign()"
    done = subprocess.run(
        [sys.executable, "-c", call], env=command_environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_ray_or_a_cluster_the_reason_is_one_line(digits, tmp_path, capsys):
    command = ["audit", "--data", digits, "--attack", "linear", "--quiet", "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--ray", "127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("gradveil[cluster]" in said or "no Ray cluster" in said)
