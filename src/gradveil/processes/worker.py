"""Worker processes: programs of their own that get messages and answer, one JSON line each.

They are not forked or spawned, so a user's script needs no main guard, and no pickle passes between processes.
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
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

Message = dict[str, Any]
Work = TypeVar("Work")

# One thread a worker; and glibc keeps the pages of large temporaries instead of asking for them anew at every step.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}


class Worker(Generic[Work]):
    """The parent's end of a worker process. What it says comes to `inbox`, and None when it has ended."""

    def __init__(self, program: Path, first: Message, inbox: queue.Queue[tuple[Worker[Work], Message | None]]):
        self.task: Work | None = None
        self.fresh = True  # no task was given to it yet
        self.ready = False
        self.short = ""  # of memory, in its own words
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, str(program)],  # not -m, which looks into the current folder first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_ENVIRONMENT},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
        self._send(first)
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def take(self, task: Work, message: Message) -> None:
        self.task, self.fresh = task, False
        self._send(message)

    def stop(self) -> None:
        self._process.kill()  # files are renamed into place, so there is nothing to be finished
        self._process.wait()
        self._errors.close()

    def last_words(self) -> str:
        code = self._process.wait()
        if self.short:
            return f"out of memory: {self.short}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            return f"signal {signal.Signals(-code).name}; out of memory?"
        return said[-1] if said else f"exit code {code}"

    def _send(self, message: Message) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return  # it has died, which its listener reports

    def _listen(self, inbox: queue.Queue[tuple[Worker[Work], Message | None]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            inbox.put((self, json.loads(line)))
        inbox.put((self, None))
