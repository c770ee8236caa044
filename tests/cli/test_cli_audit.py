"""`gradveil audit` and `gradveil report`: what they print, exit codes, and one line for bad input."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import numpy as np
import pytest

QUICK = ("--attack", "ig:steps=3", "--victims", "2", "--defense", "clip", "--workers", "0")


def test_an_audit_ends_with_table_verdicts_and_the_page(gradveil, archive, tmp_path):
    folder = tmp_path / "run"
    code, out, err = gradveil("audit", "--data", archive, *QUICK, "--out", str(folder))
    assert code == 0
    assert "verdict" in out and "clip" in out and str(folder / "report.html") in out.replace("\n", "")
    assert "[5/5]" in err
    again = gradveil("audit", "--data", archive, *QUICK, "--out", str(folder))
    assert again[0] == 0 and "5 of 5 cells are done already" in again[2]
    code, out, _ = gradveil("report", str(folder), "--pictures", "none")
    assert code == 0 and "clip" in out
    assert "data:image/png" not in (folder / "report.html").read_text()


def test_quiet_prints_nothing_and_the_default_folder_is_the_same_every_time(gradveil, archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("audit", "--data", archive, *QUICK, "--quiet")
    assert gradveil(*words) == (0, "", "")
    (folder,) = (tmp_path / "runs").iterdir()
    before = {p: p.stat().st_mtime_ns for p in (folder / "cells").iterdir()}
    assert gradveil(*words) == (0, "", "")
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert {p: p.stat().st_mtime_ns for p in (folder / "cells").iterdir()} == before


LEAKY = ("--model", "smlp", "--attack", "linear", "--victims", "8", "--defense", "clip", "--workers", "0")


@pytest.mark.parametrize(
    ("words", "condition", "code", "says"),
    [
        (QUICK, "worst.psnr.max > 0", 1, "holds for none, clip"),
        # Two victims show nothing, so that no leak was found is no reason to pass.
        (QUICK, 'verdict == "leaks"', 3, "cannot tell whether updates leak under none and clip"),
        (LEAKY, "worst.psnr.max > 500", 0, ""),
        (LEAKY, 'verdict == "leaks" and spec != "none"', 1, "holds for clip"),
    ],
)
def test_fail_if_sets_the_exit_code(gradveil, archive, tmp_path, words, condition, code, says):
    command = ("audit", "--data", archive, *words, "--quiet", "--out", str(tmp_path / "run"))
    assert gradveil(*command) == (0, "", ""), "without a gate an audit that cannot tell is done all the same"
    found, _, err = gradveil(*command, "--fail-if", condition)
    assert found == code and says in err and (err == "") == (code == 0)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_gate_is_not_green_where_no_attack_ran(gradveil, archive, tmp_path):
    words = ("audit", "--data", archive, "--model", "lenet", "--attack", "linear", "--victims", "8", "--defense", "clip")
    command = (*words, "--workers", "0", "--quiet", "--out", str(tmp_path / "run"), "--junit", str(tmp_path / "junit.xml"))
    code, out, err = gradveil(*command)
    assert (code, out) == (3, "") and err.count("\n") == 1 and "cannot tell whether updates leak under none and clip" in err
    code, _, err = gradveil(*command, "--fail-if", 'worst.ssim.max > 0.6 and spec != "none"')
    assert code == 3 and "worst.ssim.max was not measured" in err and "holds for none" not in err
    root = ET.parse(tmp_path / "junit.xml").getroot()
    messages = [error.get("message", "") for error in root.iter("error")]
    assert root.get("failures") == "0" and sum("no attack ran" in message for message in messages) == 2


def test_a_config_file_says_the_same_as_options(gradveil, archive, tmp_path):
    file = tmp_path / "audit.yaml"
    file.write_text(f"data: {archive}\ndefenses: [clip]\nattacks: ['ig:steps=3']\nvictims: 2\n")
    run = tmp_path / "run"
    assert gradveil("audit", "--config", str(file), "--workers", "0", "--quiet", "--out", str(run))[0] == 0
    stored = run / "audit.yaml"
    assert gradveil("audit", "--config", str(stored), "--workers", "0", "--quiet", "--out", str(run))[0] == 0
    summary = json.loads((run / "summary.json").read_text())
    assert [d["spec"] for d in summary["defenses"]] == ["none", "clip"] and summary["case"]["victims"] == 2


def test_a_plan_lists_the_cells_with_an_estimate_and_writes_nothing(gradveil, archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = gradveil("audit", "--data", archive, "--plan", *QUICK)
    assert (code, err) == (0, "")
    assert "ig:steps=3 under clip" in out and "estimate" in out.lower() and "5 cells" in out
    assert list(tmp_path.iterdir()) == []


BAD = {
    "unknown defense": (["--defense", "prun"], "did you mean 'prune'"),
    "unknown attack": (["--attack", "igg"], "did you mean 'ig'"),
    "unknown model": (["--model", "lenett"], "did you mean 'lenet'"),
    "unknown data": (["--data", "mnist-5"], "did you mean 'mnist-5k'"),
    "unknown setting": (["--defense", "prune:rate=0.5"], "no setting 'rate'"),
    "bad value": (["--defense", "prune:ratio=2"], "ratio='2'"),
    "not a setting": (["--attack", "ig:steps"], "not a setting"),
    "bad number": (["--victims", "few"], "--victims"),
    "no victims": (["--victims", "0"], "victims=0"),
    "too many victims": (["--victims", "100"], "private images"),
    "bad level": (["--knowledge", "total"], "knowledge='total'"),
    "two trainings": (["--trained-rounds", "1", "--trained-epochs", "1"], "not both"),
    "missing data": (["--data", "nowhere/x.npz"], "no such file"),
    "missing config": (["--config", "nowhere.yaml"], "no such file"),
    "bad condition": (["--fail-if", "worst.sim.max > 1"], "did you mean 'worst.ssim.max'"),
    "condition on what is not measured": (["--fail-if", "utility.pdm > 1"], "--utility"),
    "unknown option": (["--victimes", "3"], "--victimes"),
    "unknown argument": (["now"], "now"),
    "bad model": (["--model", "json:dumps"], "json:dumps"),
}


@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(gradveil, archive, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    data = [] if "--data" in words else ["--data", archive]
    code, out, err = gradveil("audit", *data, *words, "--out", "run")
    assert code == 2 and out == ""
    assert err.startswith("gradveil: ") and err.count("\n") == 1 and says in err, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"images": np.zeros((20, 8, 8), np.uint8)}, "labels"),
        ({"images": np.zeros((20, 8, 8), np.float32) + 3, "labels": np.arange(20) % 2}, "[0, 1]"),
        ({"images": np.array([{}] * 20, dtype=object), "labels": np.arange(20)}, "images"),
    ],
)
def test_a_wrong_archive_is_one_line(gradveil, tmp_path, monkeypatch, arrays, says):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "wrong.npz", **arrays)
    code, _, err = gradveil("audit", "--data", "wrong.npz", "--out", "run")
    assert code == 2 and err.count("\n") == 1 and says in err
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_is_one_line(gradveil, archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def wide(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))\n"
        "def colour(): return nn.Conv2d(3, 4, 3)\n"
        "def broken(): raise RuntimeError('no weights\\nhere')\n"
    )
    for name, says in (("wide", "3 classes"), ("colour", "does not take images"), ("broken", "no weights here")):
        code, _, err = gradveil("audit", "--data", archive, "--model", f"nets:{name}", "--out", "run")
        assert code == 2 and err.count("\n") == 1 and says in err, err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else_is_one_line(gradveil, archive, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = gradveil("audit", "--data", archive, *QUICK, "--out", str(tmp_path))
    assert code == 2 and err.count("\n") == 1 and "holds no audit" in err
    assert gradveil("report", str(tmp_path))[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_plan_fits_80_columns_and_tells_once_why_an_attack_does_not_apply(gradveil, archive, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--data", archive, "--model", "smlp", "--attack", "rgap", "--defense", "prune:ratio=0.9", "--victims", "1"]
    code, out, _ = gradveil("audit", *words, "--out", str(tmp_path / "run"), "--plan")
    assert code == 0 and "\x1b" not in out
    lines = [line.rstrip() for line in out.splitlines()]
    assert [line.endswith("not run") for line in lines if line.startswith("rgap under ")] == [True, True]
    assert out.count("does not apply") == 1 and "Not run (2 cells): attack 'rgap' does not apply" in out
    assert max(map(len, lines)) <= 80
