"""The folder of a run: cells that are complete are taken up, and all others are done again."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.core.errors import UserError
from gradveil.core.results import ScoreRow
from gradveil.storage.run_folder import Environment, Outcome, RunFolder, RunIdentity


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


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "[" * 5000, '{"key": "a"}', "\xff"])
def test_a_damaged_cell_is_done_again_and_refused_by_reports(folder: RunFolder, text: str) -> None:
    (folder.path / "cells" / "a.json").write_bytes(text.encode("latin-1"))
    assert folder.read("a") is None
    with pytest.raises(UserError, match=r"a\.json is damaged.*delete it and resume") as error:
        _ = folder.cells
    assert "\n" not in str(error.value)


def test_cells_under_each_others_names_are_not_believed(folder: RunFolder) -> None:
    a, b = (folder.path / "cells" / f"{key}.json" for key in "ab")
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert folder.read("a") is None and folder.read("b") is None
    with pytest.raises(UserError, match=r"a\.json holds the cell b"):
        folder.outcome("a")


@pytest.mark.parametrize("bytes_left", [0, 8, 100, -1])
def test_a_cell_with_a_tensor_file_that_was_cut_short_is_done_again(folder: RunFolder, bytes_left: int) -> None:
    file = folder.path / "tensors" / "a.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_left])
    assert folder.read("a") is None
    file.unlink()
    assert folder.read("a") is None


def test_images_are_read_by_their_place(folder: RunFolder) -> None:
    first, missing, last = folder.images("a", "original", [(0, 1), (2, 0), (1, 2)])
    assert np.array_equal(first, IMAGES["original"][0, 1].numpy()) and missing is None
    assert np.array_equal(last, IMAGES["original"][1, 2].numpy())
    assert folder.images("a", "fed", [(0, 0)]) == [None] == folder.images("b", "original", [(0, 0)])


def test_seconds_add_up_over_the_runs_of_a_folder(tmp_path: Path) -> None:
    for total in (2.5, 5.0):
        with RunFolder(tmp_path / "run").opened(RUN) as folder:
            folder.finish(ScoreRow(), 2.5)
        environment = folder.environment
        assert environment is not None and environment.seconds == total
    assert (environment.case, environment.seed, environment.data_sha256) == ("c" * 16, 3, "d" * 64)
    assert environment.packages["torch"] == torch.__version__
    assert folder.settings.endswith("data: faces\nseed: 3\n")
    assert json.loads((folder.path / "summary.json").read_text())["scored"] == 0


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


@pytest.mark.parametrize("text", ["", "[]", '{"case": 3}', '{"seconds": NaN}'])
def test_a_damaged_environment_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "environment.json").write_text(text)
    with pytest.raises(UserError, match=r"environment\.json is damaged") as error:
        _ = RunFolder(tmp_path).environment
    assert "\n" not in str(error.value)
