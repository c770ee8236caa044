"""The folder of a run: cells that are complete are taken up, and all others are done again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.core.errors import UserError
from gradveil.core.results import ScoreRow
from gradveil.storage.environment import Environment
from gradveil.storage.files import LOCK
from gradveil.storage.resumable import trained_once
from gradveil.storage.run_folder import Damaged, Outcome, RunFolder, RunIdentity


@dataclass(frozen=True)
class Name:
    key: str
    kind: str = "attack"
    defense: str = "none"
    attack: str = "ig"


HERE = Environment.here(case="c" * 16, data_sha256="d" * 64, model_sha256="e" * 64, seed=3)
RUN = RunIdentity(HERE, {"data": "faces", "seed": 3}, {"data": "faces", "seed": 3})
IMAGES = {"original": torch.arange(24.0).view(2, 3, 1, 2, 2)}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.write(Name("a"), Outcome(rows=(ScoreRow(asr=0.5),), seconds=2.0), IMAGES)
    folder.write(Name("b", attack="dlg"), Outcome(status="not applicable", error="no"))
    folder.write(Name("f"), Outcome(status="failed", error="broke", traceback="Traceback …"))
    return folder


def test_a_cell_is_read_back_as_it_was_written(folder: RunFolder) -> None:
    cell = folder.read("a")
    assert cell is not None and (cell.key, cell.kind, cell.defense, cell.attack) == ("a", "attack", "none", "ig")
    assert cell.rows[0].asr == 0.5 and cell.seconds == 2.0 and cell.status == "ok"
    assert torch.equal(folder.tensors("a")["original"], IMAGES["original"])
    assert folder.outcome("b").error == "no" and folder.read("b") is not None
    assert list(folder.cells) == ["a", "b", "f"]


def test_what_raised_an_error_is_to_be_done_again(folder: RunFolder) -> None:
    assert folder.read("f") is None and folder.outcome("f").error == "broke"
    assert folder.read("never") is None


def refused(folder: RunFolder, key: str, reason: str) -> None:
    """The cell is done again, which one line says, and reports refuse it in one line."""
    said: list[str] = []
    assert folder.read(key, said.append) is None
    assert len(said) == 1 and said[0].startswith("computed again: ") and reason in said[0] and "\n" not in said[0]
    with pytest.raises(UserError) as error:
        _ = RunFolder(folder.path).cells
    assert f"{key}.json" in str(error.value) and "\n" not in str(error.value)


DEEP, LONG, FIELDS = "[" * 5000, '{"key": ' + "9" * 5000 + "}", '{"key": "a"}'
LARGE = '["' + "x" * 2**24 + '"]'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", "NaN", "7", DEEP, LONG, FIELDS, "\xff", '["' + "x" * 2**24 + '"]']
)
def test_a_damaged_cell_is_done_again_and_refused_by_reports(folder: RunFolder, text: str) -> None:
    (folder.path / "cells" / "a.json").write_bytes(text.encode("latin-1"))
    refused(folder, "a", "a.json is damaged")
    with pytest.raises(UserError, match="delete it and resume"):
        folder.outcome("a")


@pytest.mark.parametrize(
    ("before", "after"), [('"asr": 0.5', '"asr": 0.6'), ('"asr": 0.5', '"asr": NaN'), ('"ig"', '"dlg"'), ('"ok"', '"failed"')]
)
def test_a_changed_number_or_word_in_a_cell_is_noticed(folder: RunFolder, before: str, after: str) -> None:
    file = folder.path / "cells" / "a.json"
    text = file.read_text()
    assert before in text and folder.read("a") is not None
    file.write_text(text.replace(before, after))
    refused(folder, "a", "a.json ")


def test_a_cell_of_another_version_is_believed_if_it_can_be_read(folder: RunFolder) -> None:
    file = folder.path / "cells" / "a.json"
    stored = folder.outcome("a")
    fields = json.loads(file.read_text())
    assert fields.pop("sha256")

    def sealed(content: dict[str, object]) -> str:
        text = json.dumps(content, indent=1).removesuffix("\n}")
        return f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'

    fewer = {name: value for name, value in fields.items() if name not in ("agreement", "events")}
    for content in (fewer, {**fields, "added_later": [1, "  two  "]}):
        file.write_text(sealed(content))
        assert folder.read("a") == stored
        file.write_text(sealed(content).replace("original", "fed"))
        refused(folder, "a", "does not hold what was written")
    file.write_text(sealed({**fields, "victims": "all"}))
    refused(folder, "a", "a.json was written by another version of gradveil")


def test_cells_under_each_others_names_are_not_believed(folder: RunFolder) -> None:
    a, b = (folder.path / "cells" / f"{key}.json" for key in "ab")
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    refused(folder, "a", "a.json holds the cell 'b'")
    assert folder.read("b") is None


def test_tensors_under_each_others_names_are_not_believed(folder: RunFolder) -> None:
    folder.write(Name("c"), Outcome(), {"original": IMAGES["original"] + 1})
    a, c = (folder.path / "tensors" / f"{key}.safetensors" for key in "ac")
    first, second = a.read_bytes(), c.read_bytes()
    a.write_bytes(second)
    c.write_bytes(first)
    said: list[str] = []
    assert folder.read("a", said.append) is None and folder.read("c", said.append) is None
    assert [line.count("does not hold what was written") for line in said] == [1, 1]
    with pytest.raises(Damaged, match="does not hold what was written"):
        folder.tensors("a")
    with pytest.raises(Damaged, match="does not hold what was written"):
        folder.images(folder.outcome("a"), "original", [(0, 0)])


@pytest.mark.parametrize("position", [0, 8, 60, -1])
def test_one_changed_bit_of_the_tensors_is_noticed(folder: RunFolder, position: int) -> None:
    file = folder.path / "tensors" / "a.safetensors"
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    assert folder.read("a") is None
    with pytest.raises(Damaged):
        folder.tensors("a")


@pytest.mark.parametrize("bytes_left", [0, 8, 100, -1])
def test_a_cell_with_a_tensor_file_that_was_cut_short_is_done_again(folder: RunFolder, bytes_left: int) -> None:
    file = folder.path / "tensors" / "a.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_left])
    said: list[str] = []
    assert folder.read("a", said.append) is None and len(said) == 1
    file.unlink()
    assert folder.read("a") is None


@pytest.mark.skipif(os.name != "posix", reason="special files are those of POSIX")
@pytest.mark.parametrize("name", ["cells/a.json", "tensors/a.safetensors"])
def test_special_files_and_links_are_not_read_and_are_replaced_by_the_cell(
    folder: RunFolder, name: str, tmp_path: Path
) -> None:
    file, outside = folder.path / name, tmp_path / "outside"
    outside.write_bytes(file.read_bytes())
    before = outside.read_bytes()
    for make in (os.mkfifo, lambda path: os.symlink(outside, path), lambda path: os.symlink("/dev/zero", path)):
        file.unlink()
        make(file)
        said: list[str] = []
        assert folder.read("a", said.append) is None and len(said) == 1
        folder.write(Name("a"), Outcome(), IMAGES)
        assert stat.S_ISREG(file.lstat().st_mode) and folder.read("a") is not None
    assert outside.read_bytes() == before


def test_a_folder_in_place_of_a_cell_is_left_alone(folder: RunFolder) -> None:
    file = folder.path / "cells" / "a.json"
    file.unlink()
    (file / "notes").mkdir(parents=True)
    assert folder.read("a") is None
    with pytest.raises(UserError, match=r"a\.json: cannot be written \(is a directory\)"):
        folder.write(Name("a"), Outcome())
    assert (file / "notes").is_dir()


def test_images_are_read_by_their_place(folder: RunFolder) -> None:
    cell = folder.outcome("a")
    first, missing, negative, last = folder.images(cell, "original", [(0, 1), (2, 0), (-1, 0), (1, 2)])
    assert negative is None
    assert np.array_equal(first, IMAGES["original"][0, 1].numpy()) and missing is None
    assert np.array_equal(last, IMAGES["original"][1, 2].numpy())
    assert folder.images(cell, "fed", [(0, 0)]) == [None] == folder.images(folder.outcome("b"), "original", [(0, 0)])


def test_seconds_add_up_over_the_runs_of_a_folder(tmp_path: Path) -> None:
    for scored, total in ((0, 2.5), (1, 5.0), (1, 5.0)):  # the last one only looks at it again
        with RunFolder(tmp_path / "run").opened(RUN) as folder:
            folder.finish(ScoreRow(scored=scored), 2.5)
        environment = folder.environment
        assert environment is not None and environment.seconds == total
    assert (environment.case, environment.seed, environment.data_sha256) == ("c" * 16, 3, "d" * 64)
    assert environment.packages["torch"] == version("torch")  # torch.__version__ may name the build too
    assert folder.settings.endswith("data: faces\nseed: 3\n")
    assert json.loads((folder.path / "summary.json").read_text())["scored"] == 1


def test_the_date_of_a_run_is_that_of_its_finding(tmp_path: Path) -> None:
    def finished(scored: int) -> int:
        with RunFolder(tmp_path / "run").opened(RUN) as folder:
            folder.finish(ScoreRow(scored=scored), 1.0)
        assert folder.environment is not None and folder.environment.finished is not None
        return folder.environment.finished.year

    this_year, file = finished(1), tmp_path / "run" / "environment.json"
    file.write_text(file.read_text().replace(f'"finished": "{this_year}', '"finished": "2001'))
    assert finished(1) == 2001, "the same finding, looked at again"
    assert finished(2) == this_year


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"terms": {"data": "digits", "seed": 3}}, "another audit .data faces, now digits"),
        ({"environment": HERE.model_copy(update={"case": "0" * 16})}, "the data, the model or gradveil has changed"),
    ],
)
def test_the_folder_of_another_run_is_refused(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    with RunFolder(tmp_path / "run").opened(RUN):
        pass
    with pytest.raises(UserError, match=says), RunFolder(tmp_path / "run").opened(replace(RUN, **other)):
        pass


@pytest.mark.parametrize("text", ["", "[]", '{"case": 3}', '{"seconds": NaN}', DEEP, LONG])
def test_a_damaged_environment_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "environment.json").write_text(text)
    with pytest.raises(UserError, match=r"environment\.json is damaged") as error:
        _ = RunFolder(tmp_path).environment
    assert "\n" not in str(error.value)


# -- whose folder it is ------------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, tuple[int, int, object]]:
    """Every path below a folder, and the folder itself, with mode, time of change and bytes."""
    paths = [folder, *folder.rglob("*")]
    return {
        str(p): (p.lstat().st_mode, p.lstat().st_mtime_ns, os.readlink(p) if p.is_symlink() else p.is_file() and p.read_bytes())
        for p in paths
    }


def refuses(path: Path, says: str) -> None:
    with pytest.raises(UserError, match=says) as error, RunFolder(path).opened(RUN):
        pass
    assert "\n" not in str(error.value)


def finished_run(path: Path) -> None:
    with RunFolder(path).opened(RUN) as run:
        run.write(Name("a"), Outcome(), IMAGES)


HOME = {".bashrc": "PATH=1", ".ssh/id_ed25519": "key", "Documents/cells/a.json": "{}", ".gradveil.lock": ""}


@pytest.mark.parametrize(
    "files",
    [
        HOME,
        {".env.local": "KEY=1"},
        {".git/.keep": ""},
        {".gradveil-run": "mine"},
        {".gradveil-run": "", "cells/a.json": "{}"},
        {".gradveil-0123abcd-abcdefgh.part": "mine", "letter.txt": "text"},
        {"environment.json": HERE.model_dump_json(), "audit.yaml": "data: faces\nseed: 3\n"},
        {"cells/a.json": "{}", "tensors/a.safetensors": ""},
    ],
)
def test_a_folder_without_the_marker_is_left_byte_for_byte(tmp_path: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "home"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "link").symlink_to(folder)
    before = everything(tmp_path)
    for path in (folder, tmp_path / "link"):
        refuses(path, "not empty and holds no audit; choose another --out")
    assert everything(tmp_path) == before


def test_files_links_to_nothing_and_impossible_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("text")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "to-file").symlink_to(tmp_path / "letter.txt")
    os.mkfifo(tmp_path / "pipe")
    before = everything(tmp_path)
    for name in ("letter.txt", "to-file", "pipe"):
        refuses(tmp_path / name, "is a file; --out names a folder")
    for name in ("nowhere", "loop", "x" * 300, "nul\0", "letter.txt/run"):
        refuses(tmp_path / name, "choose another --out|cannot write there|cannot be written")
    assert everything(tmp_path) == before


def test_a_folder_shared_with_others_is_refused_although_it_is_empty(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    before = everything(tmp_path)
    refuses(shared, "shared with other users")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("part", ["cells", "tensors", "cache"])
def test_a_run_never_writes_through_a_link_in_its_folder(tmp_path: Path, part: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".gradveil-0123abcd-abcdefgh.part").write_text("mine")
    finished_run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / part, ignore_errors=True)
    (tmp_path / "run" / part).symlink_to(outside)
    before = everything(tmp_path)
    refuses(tmp_path / "run", "is not a folder of this run, or a link")
    assert everything(tmp_path) == before


def test_a_link_in_place_of_the_lock_or_the_marker_leaves_its_target_alone(tmp_path: Path) -> None:
    for name in (LOCK, ".gradveil-run", "environment.json", "audit.yaml"):
        run, mine = tmp_path / f"run-{name}", tmp_path / f"mine-{name}"
        finished_run(run)
        mine.write_text("mine")
        (run / name).unlink()
        (run / name).symlink_to(mine)
        refuses(run, "choose another --out|is a link|cannot write there")
        assert mine.read_text() == "mine"


def test_every_file_of_a_run_is_open_to_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with RunFolder(tmp_path / "runs" / "one").opened(RUN) as run:
            run.write(Name("a"), Outcome(), IMAGES)
            trained_once(run.cache / "nets" / "net.safetensors", lambda _: {"w": torch.ones(2)})
            run.finish(ScoreRow(), 1.0)
    finally:
        os.umask(before)
    modes = {str(p.relative_to(tmp_path)): stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "runs").rglob("*")}
    assert len(modes) > 10
    assert {name: mode for name, mode in modes.items() if mode != (0o700 if (tmp_path / name).is_dir() else 0o600)} == {}


def test_a_folder_with_countless_cells_is_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.storage.run_folder.MAX_CELLS", 2)
    with pytest.raises(UserError, match="3 cells; at most 2 are read"):
        _ = folder.cells
