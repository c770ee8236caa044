"""`breaching` in a process and an environment of its own, made on first use in `benchmarks/.peer`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PEER = "breaching==0.1.2"


class PeerProcess:
    """Answers one request at a time; `peer/serve.py` says which."""

    def __init__(self, folder: Path):
        self.log = (folder / "peer.log").open("w+")
        self.process = subprocess.Popen(
            [str(environment()), str(HERE / "peer" / "serve.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.log.seek(0)
            sys.exit(f"the peer stopped:\n{self.log.read()[-2000:]}")
        return json.loads(answer)  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def environment() -> Path:
    """The peer's Python. torchvision is left out, which pip would bring in; `peer/standin.py` takes its place."""
    home = HERE / ".peer"
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists() or ready.read_text() != PEER:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch_version = torch.__version__.partition("+")[0]
        needs = [f"torch=={torch_version}", "numpy", "scipy", "hydra-core", "pyyaml", "tqdm", "pydantic"]
        subprocess.run([*install, *needs], check=True)
        subprocess.run([*install, "--no-deps", PEER], check=True)
        ready.write_text(PEER)
    return python
