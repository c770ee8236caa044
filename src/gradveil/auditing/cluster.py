"""Cells on many machines: every cell is a Ray task that gets the files it needs and returns the files it wrote.

Nothing is shared but these bytes (JSON and safetensors), so the nodes need no common disk. All files are written here,
by the same code as in a local run. Ray runs the tasks of a node that dies again on another node. When there is no node
for a while, the audit ends, and the same command goes on from what is finished.
"""

import gc
import json
import os
import socket
import time
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import torch

from gradveil.auditing.case import Case
from gradveil.auditing.cells import run_cell
from gradveil.auditing.limits import Limits
from gradveil.auditing.plan import Cell, make_plan
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError, one_line
from gradveil.processes.scheduler import Lost, OutOfMemory, Workers
from gradveil.processes.temporary import TemporaryFolder
from gradveil.storage.files import write_bytes
from gradveil.storage.run_folder import RunFolder

Files = dict[str, bytes]  # by path in the run folder
CPUS = 1  # per task
NO_NODE_SECONDS = 60.0  # without a node that could take a task, after which the audit ends
_POLL_SECONDS = 2.0  # between two looks at the nodes


def _connect(address: str) -> ModuleType:
    # After so long without its head Ray ends the process, with many lines; we end before that, with one line.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(int(10 * NO_NODE_SECONDS)))
    try:
        import ray
        import ray.exceptions  # a mere folder named `ray` has none
    except ImportError:
        raise UserError("--ray needs the package ray: pip install 'gradveil[cluster]'.") from None
    if address.rpartition(":")[2].isdigit() and "://" not in address and not _reachable(address):  # Ray waits minutes
        raise UserError(f"no Ray cluster at '{address}' (nothing answers there).")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"no Ray cluster at '{address}' ({one_line(error)[:200]}).") from None
    module: ModuleType = ray
    return module


class RayWorkers(Workers[Cell, None]):
    """Every job is a Ray task. Ray decides how many run at the same time, and where."""

    def __init__(self, address: str, case: Case, folder: RunFolder, limits: Limits):
        """Connect to the cluster at this address (`auto`: the cluster of this machine)."""
        self._ray = ray = _connect(address)
        self._folder, self._limits = folder, limits
        self._spec = ray.put(case.spec.plain())
        self._task = ray.remote(num_cpus=CPUS, max_retries=3)(do_cell)  # Ray's own, after a node died
        self._files: dict[str, object] = {}  # by key: the files of a cell are sent to the cluster once
        self._running: dict[object, Cell] = {}  # by reference to the task
        head = getattr(ray.get_runtime_context(), "gcs_address", "")
        self._head = head if _reachable(head) else ""  # through a proxy (ray://) it is not reachable

    def start(self, job: Cell, second_try: bool) -> None:
        needs = [self._sent(key) for key in job.needs]
        limits = (self._limits.memory, str(self._limits.device), second_try)
        self._running[self._task.remote(self._spec, job.plain(), limits, *needs)] = job

    def wait(self, progress: Callable[[Cell, int, int], None]) -> tuple[Cell, Lost | None]:
        node_seen = time.monotonic()
        while time.monotonic() - node_seen < NO_NODE_SECONDS:
            wait = min(_POLL_SECONDS, self.seconds_left())
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=wait)
            if ended:
                return self._running.pop(ended[0]), self._outcome(ended[0])
            if self._any_node():
                node_seen = time.monotonic()
        raise UserError(
            f"no node of the Ray cluster has been alive for {NO_NODE_SECONDS:.0f} s; what is finished is kept, and "
            "the same command goes on from it."
        )

    def stop(self) -> None:
        self._ray.shutdown()  # Ray ends the tasks that are left

    def _any_node(self) -> bool:
        """Whether a node is alive that could do a cell."""
        if self._head and not _reachable(self._head):  # `ray.nodes()` never returns when the head is dead
            return False
        return any(n["Alive"] and n.get("Resources", {}).get("CPU", 0) >= CPUS for n in self._ray.nodes())

    def _sent(self, key: str) -> object:
        if key not in self._files:
            self._files[key] = self._ray.put(_files_of(self._folder, key))
        return self._files[key]

    def _outcome(self, task: object) -> Lost | None:
        """Store the files that a task returned, or say why there are none."""
        try:
            files: Files = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(f"a node of the cluster: {error.cause}") from None
            if not isinstance(error.cause, OutOfMemory):
                raise
            return Lost(f"out of memory: {error.cause}")
        except self._ray.exceptions.RayError as error:  # its process or its node died, more than once
            return Lost(one_line(error)[:200])
        _write(self._folder, files)
        return None


def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_POLL_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _files_of(folder: RunFolder, key: str) -> Files:
    paths = [f"cells/{key}.json", f"tensors/{key}.safetensors"]
    return {path: (folder.path / path).read_bytes() for path in paths if (folder.path / path).is_file()}


def _write(folder: RunFolder, files: Files) -> None:
    for path in sorted(files, reverse=True):  # tensors first: a cell's file says that it is complete
        write_bytes(folder.path / path, files[path])


# -- on a node ---------------------------------------------------------------------------------------------------------


def do_cell(spec: dict[str, object], cell: dict[str, object], limits: tuple[int | None, str, bool], *needs: Files) -> Files:
    """One cell in a private folder; returns the files that it wrote."""
    torch.set_num_threads(1)
    (case, keys), todo = _case(json.dumps(spec)), Cell.read(cell)
    if todo.key not in keys:
        raise UserError("its data, model, code or version of gradveil differs from those of the machine that asks.")
    memory, device, second_try = limits
    with TemporaryFolder() as path:
        folder = RunFolder(path)
        for files in needs:
            _write(folder, files)
        try:
            run_cell(todo, case, folder, lambda done, total: None, Limits(memory, torch.device(device), second_try))
        except OutOfMemory:
            _case.cache_clear()  # Ray may give the second try to this process
            gc.collect()
            raise
        return _files_of(folder, todo.key)


@lru_cache(maxsize=1)
def _case(spec: str) -> tuple[Case, set[str]]:
    """The case, and the keys of its cells as this node would name them."""
    case = Case(make_spec(json.loads(spec)))
    return case, {cell.key for cell in make_plan(case)}
