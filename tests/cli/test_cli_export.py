"""`gradveil export`: which defense, what the file holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradveil as gv
from gradveil.auditing.export import usage
from gradveil.core.errors import UserError
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import LEAKS, Summary

TRAINING = ("--local-epochs", "2", "--local-batch-size", "2", "--local-lr", "0.05", "--batch-size", "4")


@pytest.fixture
def run(gradveil, archive, tmp_path, monkeypatch):
    """A finished audit of weight differences under two defenses, in the folder `run`."""
    monkeypatch.chdir(tmp_path)
    defenses = ("--defense", "clip:norm=0.1", "--defense", "gaussian:std=0.01")
    words = ("audit", "--data", archive, *defenses, "--attack", "linear", "--victims", "3", *TRAINING)
    assert gradveil(*words, "--workers", "0", "--quiet", "--out", "run")[0] == 0
    return tmp_path / "run"


def change(run: Path, edit) -> None:
    """Change the stored summary."""
    file = run / "summary.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_the_file_holds_task_units_and_what_was_measured(gradveil, run):
    code, out, err = gradveil("export", "run", "--defense", "gaussian:std=1e-2")  # another spelling
    assert (code, err) == (0, "")
    protection = gv.Protection.read("protection.json")
    assert protection.defense == "gaussian" and protection.versions == {"gaussian": 2}  # its default
    assert protection.training == gv.LocalTraining(epochs=2, batch_size=2, lr=0.05) and protection.images == 4
    assert (protection.units.kind, protection.units.steps, protection.units.lr) == ("delta", 4, 0.05)
    assert protection.task.input_shape == (1, 8, 8) and protection.task.num_outputs == 3
    assert protection.task.parameters["fc.bias"] == (3,) and len(protection.task.parameters) == 8
    summary = Summary.read(run)
    assert protection.task.mean == summary.case.mean != ()
    row = summary.defenses[-1]
    assert protection.scope == row.scope and protection.verdict == row.verdict and not protection.leak_accepted
    (cell,) = [c for c in RunFolder(run).cells.values() if (c.kind, c.defense) == ("observe", row.spec)]
    norms, ratios = ([getattr(c, name) for c in cell.changes] for name in ("norm", "noise_ratio"))
    measured = protection.measured
    assert measured.updates == 3 and (measured.norm.min, measured.norm.max) == (min(norms), max(norms))
    assert measured.noise_ratio.median == sorted(ratios)[1]
    entries = sum(t.numel() for n, t in RunFolder(run).tensors(cell.key).items() if n.startswith("0/0/update/"))
    assert ratios[0] == pytest.approx(0.01 * entries**0.5 / norms[0], rel=0.05)  # noise of this size on every entry
    flat = " ".join(out.split())
    assert 'gradveil.flower.mod("protection.json")' in flat and 'protect(message, context, model, "protection.json"' in flat
    assert "4 steps of sgd per round at learning rate 0.05" in flat and "LocalTraining(epochs=2, batch_size=2, lr=0.05)" in flat


def test_several_defenses_are_listed_in_one_line(gradveil, run):
    for words, says in (((), "name one with --defense"), (("--defense", "prune"), "prune was not audited")):
        code, out, err = gradveil("export", "run", *words)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert says in err and "clip:norm=0.1 (cannot tell) and gaussian:std=0.01 (cannot tell)" in err
    assert not Path("protection.json").exists()
    assert gradveil("export", "run", "--defense", "pkg.mod:Class")[0] == 2


def test_the_recommended_or_only_one_is_taken(gradveil, run):
    def recommend(content):
        for row in content["defenses"][1:]:
            row["verdict"], row["doubts"] = "no leak shown", []
        content["recommendation"]["defense"] = "clip:norm=0.1"
        content["recommendation"]["rejected"] = [{"spec": "gaussian:std=0.01", "reasons": ["costs-more"]}]

    change(run, recommend)
    assert gradveil("export", "run", "--quiet") == (0, "", "")
    assert gv.Protection.read("protection.json").defense == "clip:norm=0.1"
    assert gradveil("report", "run", "--quiet")[0] == 0
    page = (run / "report.html").read_text()
    section = page.partition('<h3 id="use">')[2].partition("<h3")[0]
    assert "gradveil.flower.mod(&#34;protection.json&#34;)" in section and "4 steps of sgd" in section

    def only(content):
        content["defenses"] = content["defenses"][:2]
        content["recommendation"] |= {"defense": None, "rejected": [{"spec": "clip:norm=0.1", "reasons": ["no-counter"]}]}

    change(run, only)
    assert gradveil("export", "run", "--quiet", "--out", "other.json") == (0, "", "")
    assert gv.Protection.read("other.json").defense == "clip:norm=0.1"
    assert gradveil("report", "run", "--quiet")[0] == 0
    assert "No defense is recommended." in (run / "report.html").read_text().partition('<h3 id="use">')[2]


def test_a_leak_must_be_accepted_and_the_file_says_so(gradveil, run):
    def leak(content):
        content["defenses"][1] |= {"verdict": LEAKS, "doubts": []}

    change(run, leak)
    words = ("export", "run", "--defense", "clip:norm=0.1")
    code, _, err = gradveil(*words)
    assert code == 2 and err.count("\n") == 1 and "updates leak under clip:norm=0.1" in err and "--accept-leak" in err
    assert not Path("protection.json").exists()
    assert gradveil(*words, "--accept-leak", "--quiet")[0] == 0
    content = json.loads(Path("protection.json").read_text())
    assert content["verdict"] == LEAKS and content["leak_accepted"] is True
    Path("protection.json").write_text(json.dumps(content | {"leak_accepted": False}))
    with pytest.raises(UserError, match="exported only where that was accepted"):
        gv.Protection.read("protection.json")


def test_only_an_exported_file_is_replaced(gradveil, run):
    words = ("export", "run", "--defense", "clip:norm=0.1", "--quiet")
    Path("protection.json").write_text("mine")
    code, _, err = gradveil(*words)
    assert code == 2 and "is there already" in err and Path("protection.json").read_text() == "mine"
    assert gradveil(*words, "--out", "p.json")[0] == 0
    assert gradveil(*words, "--out", "p.json")[0] == 0


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"units": {"kind": "delta", "steps": 5, "lr": 0.05}}, "units are not those of the local training"),
        ({"units": {"kind": "delta", "steps": 4, "lr": 0.5}}, "units are not those of the local training"),
        ({"schema": 2}, "schema: input should be 1"),
        ({"images": 0}, "images"),
        ({"more": 1}, "more: extra inputs are not permitted"),
        ({"verdict": 1}, "verdict"),
        ({"training": {"epochs": 0}}, "training.epochs"),
        ({"training": {"epochs": 3}}, "local training needs a learning rate"),
    ],
)
def test_a_file_that_was_changed_is_refused_in_one_line(gradveil, run, edit, says):
    assert gradveil("export", "run", "--defense", "clip:norm=0.1", "--quiet")[0] == 0
    content = json.loads(Path("protection.json").read_text())
    Path("changed.json").write_text(json.dumps(content | edit))
    with pytest.raises(UserError, match=says) as error:
        gv.Protection.read("changed.json")
    assert "\n" not in str(error.value)


def test_a_run_whose_updates_are_gone_is_refused(gradveil, run):
    for file in (run / "cells").iterdir():
        file.unlink()
    code, _, err = gradveil("export", "run", "--defense", "clip:norm=0.1")
    assert code == 2 and "does not hold the updates under clip:norm=0.1" in err


def test_lines_are_shown_for_clients_that_the_audit_covers(run):
    summary = Summary.read(run)
    row, delta = summary.defenses[1], summary.case
    one = delta.model_copy(update={"local_lr": None, "local_epochs": 1, "local_batch_size": None, "local_steps": 1})
    assert [use.title for use in usage(row, one)] == ["A loop in PyTorch"]
    assert 'gradveil.protect(model, "protection.json", data=(x, y))' in usage(row, one)[0].code
    both = row.model_copy(update={"stage": ("gradient", "update")})
    assert [use.title for use in usage(both, delta)] == ["A Flower client that trains with a guard"]
    inner = usage(row.model_copy(update={"stage": ("batch",)}), delta)
    assert "training=gradveil.LocalTraining(epochs=2, batch_size=2, lr=0.05)" in inner[0].code
    for use in (*usage(row, delta), *usage(both, delta), *inner):
        compile(f"def f():\n{use.code}".replace("\n", "\n    "), "lines", "exec")
