"""Worker processes of the ATS search: policies go in and scores come out, one JSON line each.

A worker is started as a program of its own, so that a user's script needs no main guard; what it works on is in a file.
It ends when its input ends, so none outlives a search that was killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.defenses.data.ats import Policy
    from gradveil.defenses.data.ats_search import Score, Search
    from gradveil.types import Tensors


def score_in_workers(
    policies: Sequence[Policy],
    tensors: Tensors,
    search: Search,
    *,
    model: str,
    workers: int,
    note: Callable[[Score], None],
) -> None:
    """Score every policy, in any order. `model` is the text that names the model in every process."""
    from gradveil.defenses.data.ats_search import Score
    from gradveil.files import write_tensors

    waiting = list(reversed(policies))
    inbox: queue.Queue[tuple[subprocess.Popen[str], str]] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(file := Path(folder) / "search.safetensors", tensors)
        first = {"tensors": str(file), "search": asdict(search), "model": model, "path": sys.path}  # type: ignore[call-overload]
        crew = [_start(first, inbox) for _ in range(min(workers, len(policies)))]
        try:
            for worker in crew:
                _send(worker, waiting.pop())
            for _ in policies:
                worker, line = inbox.get()
                if not line:
                    raise RuntimeError(f"a worker of the search ended unexpectedly (exit code {worker.wait()})")
                note(Score.read(json.loads(line)))
                if waiting:
                    _send(worker, waiting.pop())
        finally:
            for worker in crew:
                worker.kill()
                worker.wait()


def _start(first: dict[str, Any], inbox: queue.Queue[tuple[subprocess.Popen[str], str]]) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C reaches the parent alone
    )
    _send(worker, first)

    def listen() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            inbox.put((worker, line))
        inbox.put((worker, ""))

    threading.Thread(target=listen, daemon=True).start()
    return worker


def _send(worker: subprocess.Popen[str], message: object) -> None:
    assert worker.stdin is not None
    try:
        print(json.dumps(message), file=worker.stdin, flush=True)
    except BrokenPipeError:
        return  # it has died, which its listener reports


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's model prints must not get between the lines
    first = json.loads(sys.stdin.readline())
    sys.path[:] = first["path"]  # what the parent can import can be imported here
    policies: queue.Queue[Policy] = queue.Queue()
    threading.Thread(target=_listen, args=(policies,), daemon=True).start()

    import torch
    from safetensors.torch import load_file

    from gradveil.defenses.data.ats_search import Scorer, Search
    from gradveil.models import build

    torch.set_num_threads(1)
    tensors = load_file(first["tensors"])
    channels, height, width = tensors["images"].shape[1:]
    module = build(first["model"], input_shape=(channels, height, width), num_classes=int(tensors["classes"]))
    scorer = Scorer(module, tensors, Search(**first["search"]))
    while True:
        print(json.dumps(scorer(policies.get()).plain()), file=lines, flush=True)


def _listen(policies: queue.Queue[Policy]) -> None:
    for line in sys.stdin:
        policies.put(tuple(json.loads(line)))
    os._exit(0)


if __name__ == "__main__":
    main()
