"""Ctrl-C, also twice, ends in one line; so does a path that no file can have."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.cli import main

Run = Callable[..., tuple[int, str, str]]

PROGRAM = """
import sys, time
from gradveil import cli

def work(arguments):
    try:
        print("working", flush=True)
        time.sleep(60)
    finally:
        time.sleep({cleanup})  # stops its workers
        print("cleaned", flush=True)

cli._run = work
cli.PATIENCE = {patience}
sys.exit(cli.main())
"""


def started(cleanup: float, patience: float) -> subprocess.Popen[str]:
    code = PROGRAM.format(cleanup=cleanup, patience=patience)
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background shell would ignore it
    out = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], preexec_fn=listen, **out)  # noqa: PLW1509
    assert process.stdout is not None and process.stdout.readline() == "working\n"
    return process


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("presses", [1, 2, 5])
def test_quick_presses_stop_in_order(presses: int) -> None:
    process = started(cleanup=0.5, patience=20)
    time.sleep(0.1)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == "cleaned\n"
    assert err == "gradveil: stopped; what was finished is kept.\n"


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_stop_that_hangs_can_be_ended(tmp_path: Path) -> None:
    process = started(cleanup=60, patience=0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("words", [("-m", "gradveil"), ("-c", "import sys, gradveil.__main__ as m; sys.exit(m.main())")])
def test_an_interrupt_while_the_program_is_imported_is_one_line(words: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n")
    paths = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.run(
        [sys.executable, *words], env=environment, preexec_fn=listen, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "gradveil: stopped.\n")


def test_the_installed_program_catches_it_too() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"gradveil": "gradveil.__main__:main"}


def test_a_call_from_python_leaves_the_handler_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_anywhere_is_one_line(gradveil: Run, monkeypatch: pytest.MonkeyPatch, archive: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.auditing.case.data_sets.load", interrupted)
    code, _, err = gradveil("audit", "--data", archive)
    assert code == 130 and err.strip() == "gradveil: stopped; what was finished is kept."


LONG = ["x" * 300, "a/" + "é" * 200, "y/" * 3000, "a\0b"]
COMMANDS = (
    ("audit", "--data", "ARCHIVE", "--out", "PATH"),
    ("audit", "--config", "PATH"),
    ("audit", "--data", "ARCHIVE", "--out", "OUT", "--junit", "PATH"),
    ("audit", "--data", "PATH", "--out", "OUT"),
    ("attack", "PATH", "--model", "lenet"),
    ("attack", "--model", "lenet", "--before", "PATH", "--after", "PATH", "--input-shape", "1,8,8", "--classes", "3"),
    ("protect", "ARCHIVE", "PATH"),
    ("protect", "PATH", "OUT"),
    ("train", "--data", "ARCHIVE", "--rounds", "1", "--out", "PATH"),
    ("search", "--data", "ARCHIVE", "--out", "PATH"),
    ("report", "PATH"),
    ("compare", "PATH", "PATH"),
    ("reproduce", "precode/table1", "--out", "PATH"),
    ("reproduce", "PATH"),
)


@pytest.mark.parametrize("path", LONG, ids=["300 characters", "400 bytes", "6000 characters", "NUL"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_path_that_no_file_can_have_is_one_line(
    words: tuple[str, ...], path: str, gradveil: Run, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = gradveil(*({"PATH": path, "ARCHIVE": archive, "OUT": "out"}.get(word, word) for word in words))
    assert code == 2
    assert err.startswith("gradveil: ") and err.count("\n") == 1 and len(err) < 1100
    assert not [p for p in tmp_path.iterdir() if p.name != "out"]


def test_a_place_that_cannot_be_written_is_one_line(gradveil: Run, archive: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, err = gradveil("audit", "--data", archive, "--out", str(tmp_path / "file" / "below"))
    assert code == 2 and err.count("\n") == 1 and "file" in err
    assert (tmp_path / "file").read_text() == "mine"
