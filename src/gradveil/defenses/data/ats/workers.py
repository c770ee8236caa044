"""Worker processes of the ATS search: policies go in and scores come out.

What a worker works on is in a file. It ends when its input ends, so none outlives a search that was killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.core.types import Tensors
    from gradveil.defenses.data.ats.defense import Policy
    from gradveil.defenses.data.ats.search import Score, Search
    from gradveil.processes.worker import Message, Worker


def score_in_workers(
    policies: Sequence[Policy],
    tensors: Tensors,
    search: Search,
    *,
    model: str,
    workers: int,
    note: Callable[[Score], None],
) -> None:
    """Score every policy, in any order. `model` is the text that names the model in every process.

    A policy whose worker dies or runs out of memory is tried once more, in a new one, and then given up.
    """
    from gradveil.core.errors import UserError
    from gradveil.defenses.data.ats.search import Score
    from gradveil.processes.worker import Worker
    from gradveil.storage.files import write_tensors

    waiting = list(reversed(policies))
    inbox: queue.Queue[tuple[Worker[Policy], Message | None]] = queue.Queue()
    again: set[Policy] = set()
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(file := Path(folder) / "search.safetensors", tensors)
        first: Message = {"tensors": str(file), "search": asdict(search), "model": model, "path": sys.path}
        crew = [Worker(Path(__file__), first, inbox) for _ in range(min(workers, len(policies)))]
        try:
            while waiting or any(w.task for w in crew):
                for worker in crew:
                    if worker.task is None and waiting and (worker.fresh or waiting[-1] not in again):
                        policy = waiting.pop()
                        worker.take(policy, {"policy": policy})
                worker, message = inbox.get()
                if message is None:
                    why = worker.last_words()
                    if not worker.ready:
                        raise UserError(f"a worker of the search could not start ({why}); what is scored is kept.")
                    if worker.task and worker.task not in again:
                        again.add(worker.task)
                        waiting.append(worker.task)
                    elif worker.task:
                        note(Score.lost(worker.task, f"its process ended unexpectedly, twice ({why})"))
                    worker.stop()
                    crew.remove(worker)
                    if waiting:
                        crew.append(Worker(Path(__file__), first, inbox))
                elif message["event"] == "ready":
                    worker.ready = True
                elif message["event"] == "done":
                    note(Score.read(message["score"]))
                    worker.task = None
        finally:
            for worker in crew:
                worker.stop()


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

    from gradveil.defenses.data.ats.search import Scorer, Search
    from gradveil.models import build

    def say(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)

    torch.set_num_threads(1)
    tensors = load_file(first["tensors"])
    channels, height, width = tensors["images"].shape[1:]
    module = build(first["model"], input_shape=(channels, height, width), num_classes=int(tensors["classes"]))
    scorer = Scorer(module, tensors, Search(**first["search"]))
    say(event="ready")
    while True:
        say(event="done", score=scorer(policies.get()).plain())


def _listen(policies: queue.Queue[Policy]) -> None:
    for line in sys.stdin:
        policies.put(tuple(json.loads(line)["policy"]))
    os._exit(0)


if __name__ == "__main__":
    main()
