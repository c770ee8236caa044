"""A worker process: reads cells from its input, one JSON line each, does them, and says so on its output.

It is started as a program of its own and not forked or spawned, so that a user's script needs no main guard, and no
pickle passes between processes.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_EVERY = 0.2  # seconds between two reports on one cell


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's model prints must not get between the lines
    lock = threading.Lock()

    def say(**message: Any) -> None:
        with lock:
            print(json.dumps(message), file=lines, flush=True)

    first = json.loads(sys.stdin.readline())
    sys.path[:] = first["path"]  # what the parent can import can be imported here
    cells: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(cells,), daemon=True).start()

    import torch

    from gradveil.auditing.case import Case
    from gradveil.auditing.cells import run_cell
    from gradveil.auditing.limits import Limits, OutOfMemory
    from gradveil.auditing.plan import Cell
    from gradveil.auditing.spec import make_spec
    from gradveil.auditing.store import RunFolder
    from gradveil.core.errors import UserError

    torch.set_num_threads(1)
    try:
        case, folder = Case(make_spec(first["spec"])), RunFolder(Path(first["folder"]))
    except UserError as error:
        say(event="refused", error=str(error))
        return
    say(event="ready")
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY:
            last = time.monotonic()
            say(event="progress", done=done, total=total)

    device = torch.device(first["device"])
    while True:
        task = cells.get()
        limits = Limits(first["memory"], device, task["again"])
        try:
            run_cell(Cell.read(task["cell"]), case, folder, progress, limits)
        except OutOfMemory as error:  # a fresh process has all of the memory
            say(event="short", error=" ".join(str(error).split())[:200])
            return
        except UserError as error:  # the disk is full
            say(event="refused", error=str(error))
            return
        say(event="done")


def _listen(cells: queue.Queue[dict[str, Any]]) -> None:
    """When the parent is gone, so is the work: nothing half-written is left, since files are renamed into place."""
    for line in sys.stdin:
        cells.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
