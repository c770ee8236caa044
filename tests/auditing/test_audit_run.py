"""Whole audits on small settings: numbers, workers, failures, folders."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from gradveil import cli
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.report import Report
from gradveil.storage.files import LOCK
from gradveil.storage.run_folder import MARKER
from gradveil.summary import Summary


def audit(digits: str, folder: Path, workers: int = 0, **values):
    given = {"data": digits, "defenses": "gaussian:std=3.0", "attacks": "ig:steps=60", "victims": 3, **values}
    case = Case(make_spec(given))
    return Report.written(*run_audit(case, Execution(out=folder, workers=workers)), case.spec.picture_mode).summary


def cells(folder: Path, kind: str) -> list[dict]:
    found = (json.loads(p.read_text()) for p in sorted((folder / "cells").glob("*.json")))
    return [c for c in found if c["kind"] == kind]


def tensors_of(folder: Path, cell: dict) -> dict[str, torch.Tensor]:
    return load_file(folder / "tensors" / f"{cell['key']}.safetensors")


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "plain"
    return audit(digits, folder), folder


def test_the_attack_works_undefended_and_fails_under_strong_noise(run):
    summary, _ = run
    none, noise = summary.defenses
    assert none.verdict == "leaks" and none.worst.identified.rate == 1.0
    assert noise.worst.psnr.max < none.worst.psnr.min
    assert (none.gradient.cosine, none.gradient.noise_ratio) == pytest.approx((1.0, 0.0))
    assert none.gradient.norm > 0
    assert noise.gradient.noise_ratio > 1
    assert summary.baseline.psnr.mean < none.worst.psnr.mean
    assert summary.case.input_shape == (1, 12, 12) and summary.case.num_classes == 3


def test_the_folder_holds_what_it_should_and_is_closed_to_others(run):
    summary, folder = run
    for name in ("audit.yaml", "environment.json", "summary.json", "report.html"):
        assert (folder / name).is_file()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Summary.read(folder) == summary
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["seed"] == 0 and environment["seconds"] > 0 and environment["packages"]["torch"]


def test_a_cell_stores_its_scores_and_what_was_rebuilt(run, digits):
    _, folder = run
    cell = next(c for c in cells(folder, "attack") if c["defense"] == "none")
    tensors = tensors_of(folder, cell)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == dict.fromkeys(
        ("original", "fed", "reconstruction"), (3, 1, 1, 12, 12)
    )
    case = Case(make_spec({"data": digits, "victims": 3}))
    for v, image in enumerate(cell["victims"]):
        assert torch.equal(tensors["original"][v], case.batch(v).x)
        error = (tensors["original"][v].double() - tensors["reconstruction"][v].double()).square().mean()
        assert image["psnr"] == pytest.approx(-10 * float(error.log10()), abs=1e-4)
        assert image["label"] == int(case.batch(v).y)
    assert [r["against"] for r in cell["rows"]] == ["original"]


def test_numbers_do_not_depend_on_who_does_the_work(run, digits, tmp_path, comparable):
    _, folder = run
    audit(digits, tmp_path / "two", workers=2)
    assert comparable(tmp_path / "two") == comparable(folder)


def test_what_is_done_is_not_done_again_by_an_audit_with_more_attacks(run, digits):
    _, folder = run
    before = {p.name: p.stat().st_mtime_ns for p in (folder / "cells").iterdir()}
    summary = audit(digits, folder, attacks=["ig:steps=60", "audit_methods:Picky"])
    after = {p.name: p.stat().st_mtime_ns for p in (folder / "cells").iterdir()}
    assert before.items() <= after.items() and len(after) == len(before) + 2
    rows = summary.defenses[0].attacks
    assert [(r.spec, r.status) for r in rows] == [("ig:steps=60", "ok"), ("audit_methods:Picky", "not applicable")]
    assert "it never does" in rows[1].error
    audit(digits, folder)  # as it was, for the other tests


@pytest.mark.parametrize(
    ("values", "says"), [({"victims": 2}, "victims 3, now 2"), ({"seed": 5}, "seed 0, now 5"), ({"model": "lenet4"}, "model")]
)
def test_the_folder_of_another_audit_is_refused(run, digits, values, says):
    _, folder = run
    with pytest.raises(UserError, match=f"another audit.*{says}"):
        audit(digits, folder, **values)


def test_a_folder_that_is_no_run_is_refused_and_left_alone(digits, tmp_path):
    (tmp_path / "letter.txt").write_text("text")
    with pytest.raises(UserError, match="not empty"):
        audit(digits, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(UserError, match="is a file"):
        audit(digits, tmp_path / "letter.txt")


@pytest.mark.parametrize(
    "files",
    [
        {".env.local": "KEY=1", ".pre-commit-config.yaml": "repos: []", ".git/.keep": "", ".git/config": "[core]"},
        {".env.local": "KEY=1"},
        {".lock": "another program's"},
        {"environment.json": '{"name": "mine"}', ".keep": ""},
        {"environment.json": '{"name": "mine"}'},
        {"environment.json": "[1, 2]"},
        {"environment.json": "no JSON"},
        {"audit.yaml": "data: digits\n"},
        {"environment.json": '{"case": "x", "gradveil": "1"}', ".env.local": "KEY=1"},
        {"cells/.notes.txt": "mine"},
    ],
)
def test_files_of_the_user_are_refused_and_left_byte_for_byte(digits, tmp_path, capsys, files):
    folder = tmp_path / "project"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    folder.chmod(0o755)
    before = everything(folder)
    assert cli.main(["audit", "--data", digits, "--defense", "none", "--attack", "linear", "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "choose another --out" in said
    assert everything(folder) == before


def everything(folder):
    """Every path below a folder, and the folder itself, with mode, time of change and bytes."""
    return {
        str(p): (p.stat().st_mode, p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
        for p in [folder, *folder.rglob("*")]
    }


def test_a_run_killed_as_it_began_is_taken_up(digits, tmp_path, killed_writer):
    folder = tmp_path / "run"
    killed_writer(folder / "environment.json")
    (folder / LOCK).touch()
    assert audit(digits, folder, attacks="linear").defenses
    for name in ("audit.yaml", "summary.json", "report.html"):
        (folder / name).unlink()
    for part in ("cells", "tensors"):
        shutil.rmtree(folder / part)
    assert {p.name for p in folder.iterdir()} <= {LOCK, MARKER, "environment.json"}
    assert audit(digits, folder, attacks="linear").defenses


def test_a_resumed_run_removes_what_killed_writers_left_and_keeps_what_the_user_put_there(digits, tmp_path, killed_writer):
    folder = tmp_path / "run"
    audit(digits, folder, attacks="linear")
    left = [killed_writer(folder / name) for name in ("summary.json", "cells/a.json", "tensors/a.safetensors")]
    left += [killed_writer(folder / "cache" / "net.safetensors")]
    mine = [folder / part / name for part in (".", "cells", "cache", "own") for name in (".notes.txt", ".a.json.x1y2")]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    audit(digits, folder, attacks="linear")
    assert not any(file.exists() for file in left)
    assert all(file.read_text() == "mine" for file in mine)


@pytest.mark.parametrize(("part", "workers"), [("cells", 0), ("tensors", 1)])
def test_swapped_and_cut_files_are_computed_again_and_the_log_says_so(digits, tmp_path, capsys, comparable, part, workers):
    folder = tmp_path / "run"
    words = ["audit", "--data", digits, "--defense", "gaussian:std=3.0", "--attack", "ig:steps=20", "--victims", "2"]
    words += ["--workers", str(workers), "--out", str(folder)]
    assert cli.main(words) == 0
    before = comparable(folder)
    capsys.readouterr()
    ending = {"cells": ".json", "tensors": ".safetensors"}[part]
    attacks = [folder / part / f"{cell['key']}{ending}" for cell in cells(folder, "attack")]
    observed = folder / part / f"{cells(folder, 'observe')[0]['key']}{ending}"
    first, second = (file.read_bytes() for file in attacks)
    attacks[0].write_bytes(second)
    attacks[1].write_bytes(first)
    observed.write_bytes(observed.read_bytes()[:-2])
    assert cli.main(words) == 0
    said = capsys.readouterr().err.splitlines()
    again = [line for line in said if line.startswith("computed again: ")]
    assert len(again) == 3 and all(any(str(file) in line for line in again) for file in (*attacks, observed))
    assert comparable(folder) == before
    assert part == "cells" or [file.read_bytes() for file in attacks] == [first, second]
    assert cli.main(words) == 0
    assert "computed again" not in capsys.readouterr().err


def test_every_file_that_a_command_writes_is_open_to_its_owner_alone(digits, tmp_path, capsys):
    before = os.umask(0)
    try:
        for name, seed in (("a", "0"), ("b", "1")):
            words = [
                "audit",
                "--data",
                digits,
                "--defense",
                "prune",
                "--attack",
                "ig:steps=2",
                "--victims",
                "1",
                "--seed",
                seed,
            ]
            out = tmp_path / "made" / name
            assert cli.main([*words, "--workers", "0", "--junit", f"{out}.xml", "--out", str(out)]) == 3  # with one victim
            for mode in ("shown", "none"):
                assert cli.main(["report", str(out), "--pictures", mode]) == 0
        a, b = (str(tmp_path / "made" / name) for name in "ab")
        assert cli.main(["compare", a, b, "--out", str(tmp_path / "made" / "compare.html")]) == 0
        Report.load(a).save(tmp_path / "made" / "copy")
    finally:
        os.umask(before)
    paths = [tmp_path / "made", *(tmp_path / "made").rglob("*")]
    assert {"a.xml", "compare.html", "report.html", "summary.json", "cells", MARKER, LOCK} <= {p.name for p in paths}
    assert [p for p in paths if stat.S_IMODE(p.stat().st_mode) != (0o700 if p.is_dir() else 0o600)] == []


def test_a_second_process_is_kept_out(run, digits):
    _, folder = run
    with FileLock(folder / LOCK), pytest.raises(UserError, match="another audit is writing"):
        audit(digits, folder)


def test_a_defense_that_breaks_is_recorded_and_the_others_go_on(digits, tmp_path):
    defenses = ["audit_methods:Broken", "audit_methods:Silent"]
    summary = audit(digits, tmp_path / "run", defenses=defenses, attacks="ig:steps=5")
    none, broken, silent = summary.defenses
    assert none.attacks[0].status == "ok"
    assert broken.attacks[0].status == "failed" and broken.verdict == "cannot tell"
    assert broken.attacks[0].error == "RuntimeError: this defense is broken"
    assert any("could not be computed" in w.text for w in broken.warnings)
    assert any("all zero" in w.text for w in silent.warnings)
    assert (silent.gradient.cosine, silent.gradient.noise_ratio) == pytest.approx((0.0, 1.0))
    kept = {p: p.stat().st_ino for p in (tmp_path / "run" / "cells").iterdir()}
    audit(digits, tmp_path / "run", defenses=defenses, attacks="ig:steps=5")  # only what raised is tried again
    assert sum(p.stat().st_ino == inode for p, inode in kept.items()) == len(kept) - 2


def test_a_worker_that_dies_takes_only_its_cell_with_it(digits, tmp_path):
    summary = audit(digits, tmp_path / "run", 1, defenses="audit_methods:Deadly", attacks="ig:steps=5")
    none, deadly = summary.defenses
    assert none.attacks[0].status == "ok"
    assert "SIGKILL" in deadly.attacks[0].error


def test_answers_that_are_not_finite_stay_in_the_average_and_are_counted(digits, tmp_path):
    row = audit(digits, tmp_path / "run", defenses="none", attacks="audit_methods:Lost").defenses[0].attacks[0]
    assert (row.status, row.scored, row.failed) == ("ok", 3, 1)


def test_a_method_that_draws_from_the_global_stream_still_gives_the_same_numbers(digits, tmp_path, comparable):
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            audit(digits, tmp_path / str(seed), defenses="none", attacks="audit_methods:Careless")
    assert comparable(tmp_path / "1") == comparable(tmp_path / "2")


def test_a_malicious_server_has_its_own_model_and_stands_in_the_scope(digits, tmp_path):
    values = {"defenses": "none", "attacks": ["ig:steps=5", "audit_methods:Crooked"]}
    none = audit(digits, tmp_path / "run", **values).defenses[0]
    assert "a malicious server in audit_methods:Crooked" in none.scope
    honest, crooked = sorted(cells(tmp_path / "run", "observe"), key=lambda c: c["attack"] or "")
    one, other = (tensors_of(tmp_path / "run", c) for c in (honest, crooked))
    assert one.keys() == other.keys() and not torch.equal(one["0/0/update/fc.bias"], other["0/0/update/fc.bias"])


def test_images_that_a_defense_changed_are_scored_beside_the_originals(digits, tmp_path):
    values = {"defenses": "audit_methods:Darkened", "attacks": "ig:steps=60"}
    rows = audit(digits, tmp_path / "run", **values).defenses[1].attacks
    assert [r.against for r in rows] == ["original", "fed"]
    assert rows[1].psnr.mean > rows[0].psnr.mean
    cell = next(c for c in cells(tmp_path / "run", "attack") if c["defense"] == "audit_methods:Darkened")
    tensors = tensors_of(tmp_path / "run", cell)
    assert torch.equal(tensors["fed"], tensors["original"] * 0.5)


def test_batches_local_steps_repeated_updates_and_granted_secrets(digits, tmp_path):
    values = {"batch_size": 2, "local_steps": 3, "local_lr": 0.1, "updates": 2, "knowledge": "upper-bound"}
    summary = audit(digits, tmp_path / "run", defenses="none", attacks="ig:steps=5", victims=2, **values)
    none = summary.defenses[0]
    row = none.attacks[0]
    assert (row.scored, row.updates, row.knowledge) == (4, 2, "upper-bound")
    assert [(v.victim, v.image) for v in none.worst.by_victim] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert row.label_accuracy == 1.0 and "labels" in summary.granted
    observed = tensors_of(tmp_path / "run", cells(tmp_path / "run", "observe")[0])
    assert torch.equal(observed["0/0/update/fc.bias"], observed["0/1/update/fc.bias"])  # nothing random here


def test_a_trained_state_and_the_cost_in_accuracy(digits, tmp_path):
    how = {"rounds": 2, "clients": 2, "images": 40, "model": "cnn", "seeds": 2, "fedsgd": False}
    values = {"defenses": "clip:norm=0.1", "attacks": "ig:steps=3", "trained_rounds": 1, "utility": how}
    none, clip = audit(digits, tmp_path / "run", **values).defenses
    assert none.utility.pdm == 0.0 and none.utility.overhead == 1.0
    assert 0 <= clip.utility.acc_test <= 1
    expected = 100 * (1 - clip.utility.acc_test / none.utility.acc_test)
    assert clip.utility.pdm == pytest.approx(expected)
    states = [tensors_of(tmp_path / "run", c) for c in cells(tmp_path / "run", "train")]
    assert not torch.equal(states[0]["fc.weight"], states[1]["fc.weight"])  # each is trained under itself
    curves = [c["history"]["acc_test"] for c in cells(tmp_path / "run", "utility")]
    assert [len(c) for c in curves] == [2, 2]
    for cell in cells(tmp_path / "run", "utility"):
        assert {"acc_test@1", "acc_validation@0.25", f"acc_validation@{cell['server_lr']:g}"} <= cell["history"].keys()
