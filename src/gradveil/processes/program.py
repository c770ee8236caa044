"""The program of a worker process: reads jobs from its input, one JSON line each, does them, and writes the results.

It ends when its input ends, so no worker outlives a parent that was killed.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time

_INTERVAL = 0.2  # seconds between two reports of progress


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's model prints must not get between the lines

    def say(*message: object) -> None:
        print(json.dumps(message), file=lines, flush=True)

    path, module, prepare, setup = json.loads(sys.stdin.readline())
    sys.path[:] = path  # what the parent can import can be imported here
    jobs: queue.Queue[tuple[object, bool]] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()

    import torch

    from gradveil.core.errors import UserError, one_line
    from gradveil.processes.scheduler import OutOfMemory

    torch.set_num_threads(1)
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _INTERVAL:
            reported = time.monotonic()
            say("progress", done, total)

    try:
        perform = getattr(importlib.import_module(module), prepare)(setup)
        say("ready")
        while True:
            job, second_try = jobs.get()
            say("finished", perform(job, second_try, progress))
    except OutOfMemory as error:  # a fresh process has all of the memory
        sys.exit(f"out of memory: {one_line(error)[:200]}")
    except UserError as error:  # bad input, or the disk is full
        say("refused", str(error))


def _listen(jobs: queue.Queue[tuple[object, bool]]) -> None:
    for line in sys.stdin:
        jobs.put(tuple(json.loads(line)))
    os._exit(0)


if __name__ == "__main__":
    main()
