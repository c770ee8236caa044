"""`gradveil report` and `gradveil compare` on folders from elsewhere: a page or one line, and nothing outside is touched."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from advised import advised

from gradveil import cli

Run = Callable[..., Path]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "object": b"{}",
    "number": b"7",
    "NaN": b'{"case": NaN, "schema": NaN, "key": NaN}',
    "infinite": b'{"schema": 1e999}',
    "cut": b'{"schema": 2, "case": {',
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "digits": b'{"schema": ' + b"9" * 100_000 + b"}",
    "not UTF-8": b'{"schema": "\xff\xfe"}',
    "NUL": b"\0" * 1000,
    "many": b"[" + b"0," * 1_000_000 + b"0]",
    "large": b'"' + b"x" * (1 << 25) + b'"',
    "other schema": b'{"schema": 99}',
}
FILES = ("summary.json", "environment.json", "audit.yaml", "cells/cell-00-00.json")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("gradveil: ") and len(said) < 2000
    return said


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line(run: Run, capsys: pytest.CaptureFixture[str], name: str, damage: str) -> None:
    folder, whole = run(victims=1), run(victims=1)
    (folder / name).write_bytes(DAMAGE[damage])
    before, begun = sorted(os.listdir(folder)), time.process_time()
    harmless = name == "audit.yaml" and damage not in ("not UTF-8", "large", "many")  # it is shown as text
    assert cli.main(["report", str(folder), "--quiet"]) == (0 if harmless else 2)
    if not harmless:
        assert name in one_line(capsys)
        assert sorted(os.listdir(folder)) == before, "no page of what cannot be read"
    if name != "audit.yaml":
        assert cli.main(["compare", str(whole), str(folder), "--quiet"]) == 2
        assert name in one_line(capsys)
    assert time.process_time() - begun < 10


def as_pipe(file: Path) -> None:
    os.mkfifo(file)


def as_folder(file: Path) -> None:
    file.mkdir()


def as_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def as_loop(file: Path) -> None:
    file.symlink_to(file)


@pytest.mark.skipif(os.name != "posix", reason="special files are those of POSIX")
@pytest.mark.parametrize("make", [as_pipe, as_folder, as_device, as_loop], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", [*FILES, "tensors/cell-00-00.safetensors", "cells"])
def test_special_files_are_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], name: str, make: Callable[[Path], None]
) -> None:
    folder = run(victims=1)
    shutil.rmtree(folder / name) if name == "cells" else (folder / name).unlink()
    make(folder / name)
    told = name.startswith("tensors") or (name, make) == ("cells", as_folder)  # the page says what is missing
    assert cli.main(["report", str(folder), "--quiet"]) == (0 if told else 2)
    if not told:
        assert name in one_line(capsys)


def test_a_page_in_place_of_a_link_leaves_its_target_alone(run: Run, tmp_path: Path) -> None:
    folder, mine = run(victims=1), tmp_path / "mine.html"
    mine.write_text("mine")
    (folder / "report.html").symlink_to(mine)
    assert cli.main(["report", str(folder), "--quiet"]) == 0
    assert mine.read_text() == "mine" and not (folder / "report.html").is_symlink()


@pytest.mark.parametrize("path", ["x" * 300, "nul\0", "missing", "a/" * 3000])
@pytest.mark.parametrize("command", ["report", "compare", "audit"])
def test_impossible_paths_are_one_line(command: str, path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = f"{tmp_path}/{path}"
    audit = ["audit", "--plan", "--attack", "ig", "--victims", "1", "--out", folder]
    words = {"report": ["report", folder], "compare": ["compare", folder, folder], "audit": audit}[command]
    code = cli.main(words)
    if (command, path) == ("audit", "missing"):
        assert code == 0
    else:
        assert code == 2
        one_line(capsys)


def test_countless_defenses_are_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(victims=1)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    summary["defenses"] = [{**summary["defenses"][1], "spec": f"prune:ratio=0.{i}"} for i in range(501)]
    (folder / "summary.json").write_text(json.dumps(advised(summary)))
    assert cli.main(["report", str(folder)]) == 2
    assert "more than 500 defenses" in one_line(capsys)


def test_an_alias_bomb_in_a_run_that_is_taken_up_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "--attack", "ig:steps=1", "--victims", "1", "--workers", "0", "--quiet", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    capsys.readouterr()
    (tmp_path / "run" / "audit.yaml").write_text(BOMB)
    assert cli.main(words) == 2
    assert "audit.yaml" in one_line(capsys)
    for damage in DAMAGE.values():
        (tmp_path / "run" / "environment.json").write_bytes(damage)
        assert cli.main(words) == 2
        assert "environment.json" in one_line(capsys)
