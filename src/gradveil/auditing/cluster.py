"""Cells on many machines: every cell is a Ray task that gets the files it needs and returns the files it wrote.

Nothing is shared but these bytes (JSON and safetensors), so the nodes need no common disk; all that is kept is written
here, by the same code as in a local run. The tasks of a node that dies are run again elsewhere; when no node is left
for a while, the audit ends, and the same command goes on from what is finished.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradveil.auditing.case import Case
from gradveil.auditing.cells import run_cell
from gradveil.auditing.limits import Limits, OutOfMemory
from gradveil.auditing.plan import Cell
from gradveil.auditing.progress import Display
from gradveil.auditing.spec import make_spec
from gradveil.auditing.store import RunFolder
from gradveil.core.errors import UserError
from gradveil.storage.files import write_bytes

Files = dict[str, bytes]
_RETRIES = 3  # of a task whose node died
CPUS = 1  # that a task takes
DESERTED = 60.0  # seconds without a node that could take one, after which nobody is waited for any more
_LOOK = 2.0  # seconds between two looks at the nodes


def run_on_ray(cells: Sequence[Cell], case: Case, folder: RunFolder, display: Display, limits: Limits, at: str) -> None:
    """Do the cells on the cluster at the address `at` (`auto`: the one of this machine)."""
    ray = _connect(at)
    try:
        Conductor(ray, case, folder, display, limits).run(cells)
    finally:
        ray.shutdown()


def _connect(at: str) -> Any:
    # After so long without its head Ray ends the process, with many words; we do so before, with one line.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(int(10 * DESERTED)))
    try:
        import ray
        import ray.exceptions  # a mere folder of that name is not it
    except ImportError:
        raise UserError("--ray needs the package ray: pip install 'gradveil[cluster]'.") from None
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address=at, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"no Ray cluster at '{at}' ({' '.join(str(error).split())[:200]}).") from None
    return ray


class Watch:
    """Looks after the nodes while nothing is finished."""

    def __init__(self, ray: Any):
        self.ray, self.alive = ray, time.monotonic()  # when there last was a node that could do a cell
        head = getattr(ray.get_runtime_context(), "gcs_address", "")
        self.head = head if _reachable(head) else ""  # through a proxy (ray://) it is not

    def look(self) -> None:
        if self._manned():
            self.alive = time.monotonic()
        elif time.monotonic() - self.alive >= DESERTED:
            raise UserError(
                f"no node of the Ray cluster has been alive for {DESERTED:.0f} s; what is finished is kept, and the same "
                "command goes on from it."
            )

    def _manned(self) -> bool:
        if self.head and not _reachable(self.head):  # asked for its nodes, a dead head keeps one waiting for ever
            return False
        return any(n["Alive"] and n.get("Resources", {}).get("CPU", 0) >= CPUS for n in self.ray.nodes())


def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK).close()
    except (OSError, ValueError):
        return False
    return True


class Conductor:
    """Hands out cells when all that they wait for is here, and stores what comes back."""

    def __init__(self, ray: Any, case: Case, folder: RunFolder, display: Display, limits: Limits):
        self.ray, self.case, self.folder, self.display, self.limits = ray, case, folder, display, limits
        self.spec = ray.put({"spec": case.spec.plain(), "id": case.id})
        self.task = ray.remote(num_cpus=CPUS, max_retries=_RETRIES)(do_cell)
        self.files: dict[str, Any] = {}  # of finished cells, by key: each is sent to the cluster once
        self.again: set[str] = set()

    def run(self, cells: Sequence[Cell]) -> None:
        waiting, done = list(cells), {key for cell in cells for key in cell.needs} - {cell.key for cell in cells}
        out: dict[Any, Cell] = {}
        watch = Watch(self.ray)
        while waiting or out:
            for cell in [c for c in waiting if done.issuperset(c.needs)]:
                waiting.remove(cell)
                out[self._send(cell)] = cell
                self.display.begin(cell)
            ready, _ = self.ray.wait(list(out), num_returns=1, timeout=_LOOK)
            if not ready:
                watch.look()
                continue
            watch.alive = time.monotonic()
            (finished,) = ready
            cell = out.pop(finished)
            if self._receive(cell, finished):
                done.add(cell.key)
                self.display.end(cell, self.folder.outcome(cell.key))
            else:
                self.again.add(cell.key)
                waiting.insert(0, cell)
                self.display.end_early(cell)

    def _send(self, cell: Cell) -> Any:
        needs = [self._kept(key) for key in cell.needs]
        how = {"memory": self.limits.memory, "device": str(self.limits.device), "again": cell.key in self.again}
        return self.task.remote(self.spec, cell.plain(), how, *needs)

    def _kept(self, key: str) -> Any:
        if key not in self.files:
            paths = [f"cells/{key}.json", f"tensors/{key}.safetensors"]
            found = {p: (self.folder.path / p).read_bytes() for p in paths if (self.folder.path / p).is_file()}
            self.files[key] = self.ray.put(found)
        return self.files[key]

    def _receive(self, cell: Cell, finished: Any) -> bool:
        """Store what a task returned; False if the cell is worth a second try."""
        try:
            files: Files = self.ray.get(finished)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(f"a node of the cluster: {error.cause}") from None
            if not isinstance(error.cause, OutOfMemory):
                raise
            why = f"out of memory: {error.cause}"
        except self.ray.exceptions.RayError as error:  # its process or its node died, more than once
            why = " ".join(str(error).split())[:200]
        else:
            for path in sorted(files, reverse=True):  # tensors first: a cell's file says that it is complete
                write_bytes(self.folder.path / path, files[path])
            return True
        if cell.key not in self.again:
            return False
        error_line = f"the worker process ended unexpectedly, twice ({why})"
        self.folder.write(cell, {"status": "failed", "error": error_line, "traceback": why})
        return True


# -- on a node ---------------------------------------------------------------------------------------------------------


def do_cell(about: dict[str, Any], cell: dict[str, Any], how: dict[str, Any], *needs: Files) -> Files:
    """One cell in a private folder of its own; what it wrote is the answer."""
    import torch

    torch.set_num_threads(1)
    case, todo = _case(json.dumps(about["spec"]), about["id"]), Cell.read(cell)
    limits = Limits(how["memory"], torch.device(how["device"]), how["again"])
    with tempfile.TemporaryDirectory(prefix="gradveil-") as name:
        folder = RunFolder(Path(name))
        for files in needs:
            for path, content in files.items():
                write_bytes(folder.path / path, content)
        run_cell(todo, case, folder, lambda done, total: None, limits)
        paths = [f"cells/{todo.key}.json", f"tensors/{todo.key}.safetensors"]
        return {p: (folder.path / p).read_bytes() for p in paths if (folder.path / p).is_file()}


@lru_cache(maxsize=1)
def _case(spec: str, expected: str) -> Case:
    """The same case as at the other end: a node that would work on other data or another model says so."""
    case = Case(make_spec(json.loads(spec)))
    if case.id != expected:
        raise UserError("its data, model or version of gradveil differs from those of the machine that asks.")
    return case
