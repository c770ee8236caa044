"""What an audit may use, and what becomes of it when there is not enough: memory, disk, devices, other processes."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from gradveil import attacks, cli
from gradveil.attacks.base import Target
from gradveil.attacks.budget import row_bytes
from gradveil.auditing.case import Case
from gradveil.auditing.device import OnDevice
from gradveil.auditing.limits import Execution, find_device, machine_memory, parse_size, share_of_memory
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.report import write_report
from gradveil.storage import files
from gradveil.storage.files import LOCK
from gradveil.storage.run_folder import MARKER

linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process table of Linux")


def audit(digits: str, folder: Path, workers: int = 0, *, memory: int | None = None, **values):
    given = {"data": digits, "defenses": "none", "attacks": "ig:steps=60", "victims": 3, **values}
    return run_audit(Case(make_spec(given)), Execution(out=folder, workers=workers, memory=memory)).summary


# -- memory ------------------------------------------------------------------------------------------------------------


@linux
def test_a_cell_that_runs_out_of_memory_is_tried_again_with_half_at_once(digits, tmp_path):
    summary = audit(digits, tmp_path / "run", 1, attacks=["audit_methods:Hungry", "ig:steps=3"], victims=2)
    rows = {r.spec: r for r in summary.defenses[0].attacks}
    assert rows["audit_methods:Hungry"].status == "ok"
    assert rows["ig:steps=3"].status == "ok"


@linux
@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_never_has_enough_fails_and_the_others_go_on(digits, tmp_path, workers):
    summary = audit(digits, tmp_path / "run", workers, attacks=["audit_methods:Insatiable", "ig:steps=3"], victims=2)
    rows = {r.spec: r for r in summary.defenses[0].attacks}
    assert rows["audit_methods:Insatiable"].status == "failed"
    assert "memory" in rows["audit_methods:Insatiable"].error
    assert rows["ig:steps=3"].status == "ok"


def mean_psnr(found, traces) -> float:
    errors = [((r.images - t.original.x) ** 2).mean(dim=(1, 2, 3)) for r, t in zip(found, traces, strict=True)]
    return float((-10 * torch.cat(errors).log10()).mean())


@pytest.mark.parametrize("spec", ["ig:steps=60,restarts=2", "dlg:steps=15,restarts=2"])
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 5), size=st.integers(1, 2))
def test_chunks_change_the_answer_by_rounding_alone(observe_victims, shapes, spec, rows, size):
    observations, traces = observe_victims(shapes, "lenet", victims=3, batch_size=size)
    attack = attacks.parse(spec)
    one = row_bytes(Target(observations, torch.zeros(3, size), torch.Generator()).workload)
    whole, parts = (mean_psnr(attack(observations, memory=m), traces) for m in (None, rows * one))
    assert parts == pytest.approx(whole, abs=0.5)


def test_a_small_memory_and_many_workers_give_the_same_verdict(digits, tmp_path, comparable):
    small = audit(digits, tmp_path / "small", 2, memory=2**20, attacks="ig:steps=60,restarts=2").defenses[0]
    large = audit(digits, tmp_path / "large", 0, attacks="ig:steps=60,restarts=2").defenses[0]
    assert small.verdict == large.verdict == "leaks"
    assert small.worst.psnr.mean == pytest.approx(large.worst.psnr.mean, abs=0.5)


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workers=st.integers(0, 3), order=st.permutations(["gaussian:std=0.1", "prune:ratio=0.9"]))
def test_neither_workers_nor_their_order_change_a_number(digits, tmp_path_factory, comparable, workers, order):
    folders = [tmp_path_factory.mktemp("order") / "run" for _ in range(2)]
    audit(digits, folders[0], workers, defenses=order, attacks="ig:steps=20", victims=2)
    audit(digits, folders[1], 0, defenses=sorted(order), attacks="ig:steps=20", victims=2)
    one, other = (sorted(comparable(f)["defenses"], key=lambda d: d["spec"]) for f in folders)
    assert one == other


def test_sizes_are_read_as_people_write_them():
    assert [parse_size(t) for t in ("4G", "512m", "1.5 GiB", "2000000")] == [2**32, 2**29, 3 * 2**29, 2_000_000]
    for text in ("", "lots", "-1G", "0", "10k", "1e9", "nan"):
        with pytest.raises(UserError, match="not a size"):
            parse_size(text)
    assert share_of_memory(2**30, 4) == 2**28
    assert 2**27 < share_of_memory(None, 1) < machine_memory()


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_here_is_refused_before_anything_is_written(digits, tmp_path, capsys):
    assert find_device("cpu") == torch.device("cpu")
    for name in ("cuda:99", "vulkan", "toaster"):
        assert cli.main(["audit", "--data", digits, "--device", name, "--out", str(tmp_path / "run")]) == 2
        assert name in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_on_a_device_new_tensors_are_made_there_and_random_ones_moved_there():
    meta = torch.device("meta")  # a device that every machine has, if one without numbers
    with OnDevice(meta):
        assert torch.zeros(3).device == meta
        assert torch.randn(3, generator=torch.Generator()).device == meta
        assert torch.arange(3, device="cpu").device.type == "cpu"
    assert torch.zeros(3).device.type == "cpu"


# -- disk --------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_in_one_line_and_what_is_finished_stays(digits, tmp_path, monkeypatch, capsys, comparable):
    command = ["audit", "--data", digits, "--defense", "none", "--attack", "ig:steps=20", "--victims", "2", "--workers"]
    command += ["0", "--quiet", "--out", str(tmp_path / "run")]
    real, room = os.fsync, [7]

    def fsync(handle: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no space left" in said
    done = list((tmp_path / "run" / "cells").glob("*.json"))
    assert done and all(json.loads(p.read_text())["status"] == "ok" for p in done)
    assert not [p for p in (tmp_path / "run").rglob(".*") if p.name not in (LOCK, MARKER)]
    monkeypatch.setattr(files.os, "fsync", real)
    assert cli.main(command) == 0
    audit(digits, tmp_path / "other", attacks="ig:steps=20", victims=2)
    assert comparable(tmp_path / "run") == comparable(tmp_path / "other")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("workers", ["0", "1"])
def test_on_a_disk_that_is_really_full(digits, tmp_path, command_environment, workers):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], check=False, timeout=60).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        words = ["audit", "--data", digits, "--model", "cnn", "--attack", "ig:steps=3", "--defense", "clip"]
        words += ["--workers", workers, "--quiet", "--out", str(disk / "run")]
        command = [sys.executable, "-m", "gradveil", *words]
        done = subprocess.run(command, env=command_environment, capture_output=True, text=True, check=False, timeout=200)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "no space left" in done.stderr
        for path in (disk / "run" / "tensors").glob("*.safetensors"):
            load_file(path)
    finally:
        subprocess.run(["umount", disk], check=True, timeout=60)


# -- privacy -----------------------------------------------------------------------------------------------------------


def test_without_pictures_no_image_is_written_at_all_and_the_numbers_are_the_same(digits, tmp_path, comparable):
    case = Case(make_spec({"data": digits, "victims": 2}))
    private = [case.batch(v).x.flatten() for v in range(2)]
    values = {"defenses": "audit_methods:Darkened", "attacks": "ig:steps=40", "victims": 2}
    audit(digits, tmp_path / "none", pictures="none", **values)
    audit(digits, tmp_path / "shown", pictures="shown", **values)
    stored = {}
    for mode in ("none", "shown"):
        found = [t for p in (tmp_path / mode / "tensors").iterdir() for t in load_file(p).values()]
        stored[mode] = [t for t in found if t.ndim >= 3 and tuple(t.shape[-2:]) == (12, 12)]
    assert not stored["none"] and len(stored["shown"]) > len(private)
    assert "data:image" not in write_report(tmp_path / "none", "none").read_text()
    assert comparable(tmp_path / "none")["defenses"] == comparable(tmp_path / "shown")["defenses"]


def test_a_folder_that_holds_images_is_not_used_where_none_are_to_be_stored(digits, tmp_path):
    values = {"attacks": "ig:steps=3", "victims": 2}
    audit(digits, tmp_path / "run", **values)
    with pytest.raises(UserError, match="holds images that were stored without --pictures none"):
        audit(digits, tmp_path / "run", pictures="none", **values)
    audit(digits, tmp_path / "none", pictures="none", **values)
    audit(digits, tmp_path / "none", pictures="none", **values)  # resumes


def test_files_with_private_images_are_their_owners_alone(digits, tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    audit(digits, tmp_path / "run", attacks="ig:steps=3")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    for path in (tmp_path / "run" / "tensors").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
