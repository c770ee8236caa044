"""Temporary folders: gone after use, after a signal, and after a kill at the next start; nobody else's is touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradveil.processes.temporary import TemporaryFolder, remove_leftover_folders

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and locks are those of POSIX")

AUDIT = """
import sys, threading, time, torch, gradveil as gv
from torch import nn
x, y = torch.rand(40, 1, 6, 6), torch.arange(40) % 2
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
def audit(steps):
    return gv.audit((x, y), model, ["gaussian:std=1"], [f"ig:steps={steps}"], victims=2, quiet=True)
"""
DURING = AUDIT + "print('ready', flush=True); audit(10**6)"
AFTER = AUDIT + "report = audit(2); print('ready', flush=True); time.sleep(100)"
SWALLOWING = """
import time
from gradveil.processes import ending, temporary
ending._UNHEARD = 2.5
with ending.orderly(), temporary.TemporaryFolder():
    try:
        print("ready", flush=True)
        time.sleep(50)
    except KeyboardInterrupt:
        print("swallowed", flush=True)
    time.sleep(50)
"""
FORKED = """
import os, sys, time
from gradveil.processes.temporary import TemporaryFolder
folder = TemporaryFolder()
folder.path.mkdir()
if not (child := os.fork()):
    if sys.argv[1] == "exit":
        folder.remove()
        sys.exit(0)
    time.sleep(100)
if sys.argv[1] == "signal":
    time.sleep(0.5)
    os.kill(child, 15)
code = os.waitpid(child, 0)[1]
assert folder.path.is_dir() and code == (15 if sys.argv[1] == "signal" else 0), code
folder.remove()
print("kept")
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process and of those that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def start(temporary: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(*words: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            preexec_fn=_default_signals,  # noqa: PLW1509
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def _default_signals() -> None:
    """A shell may have set them to be ignored (in the background, under nohup), which a child would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until(ready: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob(".gradveil-*"))  # torch has a folder there too


def tensors_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".part")]


@pytest.mark.parametrize(("script", "number"), [(DURING, signal.SIGTERM), (AFTER, signal.SIGTERM), (AFTER, signal.SIGHUP)])
def test_an_audit_from_python_that_is_asked_to_end_leaves_nothing(start, temporary: Path, script: str, number: int) -> None:
    process = start("-c", script)
    wait_until(lambda: tensors_in(temporary), process)
    if script == AFTER:
        assert process.stdout.readline() == "ready\n" and list(temporary.rglob("summary.json"))
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -number, said
    assert "Traceback" not in said and folders(temporary) == []


def test_a_request_to_end_that_is_swallowed_is_made_again(start, temporary: Path) -> None:
    process = start("-c", SWALLOWING)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "swallowed\n"
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM and folders(temporary) == [], said


def test_what_a_killed_audit_leaves_is_removed_at_the_next_start_and_living_ones_are_kept(start, temporary: Path) -> None:
    killed, living = start("-c", DURING), start("-c", AFTER)
    for process in (killed, living):
        assert process.stdout.readline() == "ready\n"
    wait_until(lambda: len(tensors_in(temporary)) > 2, killed)
    killed.kill()
    killed.communicate()
    assert len(folders(temporary)) == 2
    with TemporaryFolder() as folder:
        assert len(folders(temporary)) == 2, "that of the living one, and this one"
    assert not folder.exists()
    living.terminate()
    living.communicate(timeout=60)
    assert folders(temporary) == []


def test_a_command_that_is_asked_to_end_keeps_whole_cells_and_leaves_no_half_written_files(
    start, temporary: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["-m", "gradveil", "audit", "--attack", "ig:steps=100000", "--victims", "2", "--workers", "1", "--out", str(out)]
    process = start(*words)
    wait_until(lambda: list((out / "tensors").glob("*.safetensors")), process)
    for part in ("cells", "tensors"):  # what a worker leaves that is stopped while it writes
        (out / part).mkdir(exist_ok=True)
        (out / part / ".gradveil-0123abcd-abcdefgh.part").write_text("half")
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, said
    assert "cells are done and kept in" in said and "Traceback" not in said
    assert not list(out.rglob("*.part")) and list((out / "cells").glob("*.json")) and folders(temporary) == []


def test_two_quick_interrupts_end_a_command_in_one_line(start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(
        "-m", "gradveil", "audit", "--attack", "ig:steps=100000", "--victims", "2", "--workers", "1", "--out", str(out)
    )
    wait_until(lambda: list((out / "cells").glob("*.json")), process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, said = process.communicate(timeout=60)
    # The second one may arrive when the interpreter has put its handlers away.
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in said
    assert "The same command goes on from there" in said


@pytest.mark.parametrize("way", ["exit", "signal"])
def test_a_forked_child_leaves_the_folder_to_its_parent(start, temporary: Path, way: str) -> None:
    process = start("-c", FORKED, way)
    out, said = process.communicate(timeout=60)
    assert out == "kept\n" and process.returncode == 0, said
    assert folders(temporary) == []


# -- what is not ours --------------------------------------------------------------------------------------------------


@pytest.fixture
def leftover(start, temporary: Path) -> Path:
    """A folder whose process was killed."""
    name = "gradveil.processes.temporary"
    process = start("-c", f"import os, {name} as t; t.TemporaryFolder().path.mkdir(); os.kill(os.getpid(), 9)")
    process.communicate(timeout=60)
    (folder,) = folders(temporary)
    return folder


def other_inode(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def other_name(folder: Path) -> None:
    folder.rename(folder.with_name(".gradveil-0123456789abcdef.folder"))


def no_marker(folder: Path) -> None:
    (folder / ".gradveil-process").unlink()


def pipe_as_marker(folder: Path) -> None:
    no_marker(folder)
    os.mkfifo(folder / ".gradveil-process")


def linked_marker(folder: Path) -> None:
    (folder / ".gradveil-process").rename(folder.parent / "marker")
    (folder / ".gradveil-process").symlink_to(folder.parent / "marker")


def linked_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def empty_marker(folder: Path) -> None:
    (folder / ".gradveil-process").write_text("")


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("mine")


def test_the_leftover_itself_is_removed_and_what_it_links_to_is_not(leftover: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("text")
    (leftover / "content" / "link").symlink_to(tmp_path / "mine")
    (leftover / "link").symlink_to(tmp_path / "mine" / "letter.txt")
    remove_leftover_folders()
    assert not leftover.exists() and (tmp_path / "mine" / "letter.txt").read_text() == "text"


CHANGES = [other_inode, other_name, no_marker, pipe_as_marker, linked_marker, linked_folder, empty_marker, a_file]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_is_not_surely_ours_stays(leftover: Path, temporary: Path, change: Callable[[Path], None]) -> None:
    change(leftover)
    for name in ("gradveil-notes", ".gradveil-short.folder", ".gradveil-0123456789ABCDEF.folder", "tmpabc"):
        (temporary / name).mkdir()
    before = sorted(str(path) for path in temporary.rglob("*"))
    remove_leftover_folders()
    assert sorted(str(path) for path in temporary.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whose", ["folder", "marker"])
def test_folders_of_other_users_stay(leftover: Path, whose: str) -> None:
    os.chown(leftover if whose == "folder" else leftover / ".gradveil-process", 12345, 12345)
    remove_leftover_folders()
    assert (leftover / "content").is_dir()
