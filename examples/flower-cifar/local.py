"""Starts the parts of a federation on this machine, on loopback alone, and ends by its number each one it started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
STOCK_LINE = "@app.train()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Federation:
    """A folder of its own for Flower's files, and the processes that were started."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, list[tuple[str, subprocess.Popen[bytes]]]()
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # all that the app needs is in this environment
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: Ray then listens on loopback alone
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        (folder / "flwr").mkdir(parents=True, exist_ok=True)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children are ended with it
        )
        self.processes.append((name, process))
        print(f"started {name}, process {process.pid}", flush=True)
        return process

    def connect(self, port: int, certificate: Path | None = None) -> None:
        """Tell the `flwr` command where the SuperLink is, and wait until it listens."""
        trust = f'root-certificates = "{certificate}"' if certificate else "insecure = true"
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n{trust}\n'
        (self.folder / "flwr" / "config.toml").write_text(text)
        trusted = ssl.create_default_context(cafile=certificate) if certificate else None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as probe:
                    if trusted:  # a certificate that is not ours ends it here
                        trusted.wrap_socket(probe, server_hostname="127.0.0.1").close()
                    return
            except ConnectionRefusedError:
                time.sleep(0.2)
        raise SystemExit(f"the SuperLink does not listen; see {self.folder}")

    def run(self, app: Path, settings: str, *options: str, timeout: float) -> None:
        """`flwr run`, until the run has ended."""
        command = ["flwr", "run", str(app), "here", "--stream", "--run-config", settings, *options]
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self.environment,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        (self.folder / "run.log").write_bytes(done.stdout)
        if done.returncode:
            raise SystemExit(f"flwr run failed:\n{done.stdout.decode(errors='replace')[-3000:]}")

    def stop(self) -> None:
        """End every process that was started here, the last one first, and what it started in turn."""
        for name, process in reversed(self.processes):
            end(process.pid)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                end(process.pid, hard=True)
                process.wait(timeout=20)
            print(f"stopped {name}, process {process.pid}", flush=True)


def end(group: int, hard: bool = False) -> None:
    try:
        os.killpg(group, signal.SIGKILL if hard else signal.SIGTERM)
    except ProcessLookupError:
        return  # it ended by itself


@contextmanager
def federation() -> Iterator[Federation]:
    folder = Path(tempfile.mkdtemp(prefix="flower-cifar-"))
    started = Federation(folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # asked to end: not without ending what was started
    try:
        yield started
    except BaseException:
        print(f"logs are kept in {folder}", file=sys.stderr)
        started.stop()
        raise
    else:
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)


def copy_of_app(folder: Path, defense: str | None) -> Path:
    """The app as it is, or with its one line changed."""
    target = folder / ("app" if defense is None else "app-protected")
    target.mkdir()
    shutil.copy(HERE / "pyproject.toml", target)
    shutil.copytree(HERE / "flower_cifar", target / "flower_cifar", ignore=shutil.ignore_patterns("__pycache__"))
    if defense is not None:
        client = target / "flower_cifar" / "client_app.py"
        text = client.read_text()
        if text.count(STOCK_LINE) != 1:
            raise SystemExit(f"{client.name} has no line {STOCK_LINE} to change; it is protected already?")
        client.write_text(text.replace(STOCK_LINE, f'@app.train(mods=[gradveil.flower.mod("{defense}")])'))
    return target


def settings(out: Path, **values: float) -> str:
    return " ".join([f"{key.replace('_', '-')}={value}" for key, value in values.items()] + [f'out="{out}"'])


def captured(out: Path) -> Sequence[Path]:
    """The updates of round 1, one per client."""
    return sorted((out / "round-001").glob("client-*.safetensors"))
