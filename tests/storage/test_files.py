"""Files that are whole or not there, folders with one writer, and input that cannot steer a terminal or leave its place."""

from __future__ import annotations

import errno
import os
import re
import stat
from importlib import resources
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from torch import nn

import gradveil
import gradveil as gv
from gradveil import cli
from gradveil.auditing.spec import read_spec
from gradveil.core.errors import UserError
from gradveil.models import build
from gradveil.storage.files import (
    LOCK,
    DiskFull,
    alone_in,
    check_replaceable,
    no_space,
    remove_leftovers,
    write_atomic,
    write_tensors,
    write_text,
)

SHAPE = {"input_shape": (1, 4, 4), "num_classes": 2}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "x.txt"
    file.write_text("old")

    def broken(path):
        path.write_text("ne")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_atomic(file, broken)
    assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path, killed_writer):
    kept = [".env.local", ".x.txt.abc123", ".gradveil-notes.part", ".gradveil-0123abcd-short.part", "x.part"]
    for name in kept:
        (tmp_path / name).write_text(name)
    (tmp_path / ".gradveil-0123abcd-abcdefgh.part").mkdir()
    first, second = killed_writer(tmp_path / "x.txt"), killed_writer(tmp_path / "y.txt")
    remove_leftovers(tmp_path, "x.txt")
    assert not first.exists() and second.exists()
    with alone_in(tmp_path, "search"):
        assert not second.exists()
    assert {p.name for p in tmp_path.iterdir()} == {*kept, ".gradveil-0123abcd-abcdefgh.part", LOCK}
    assert all((tmp_path / name).read_text() == name for name in kept)


def test_a_name_may_be_as_long_as_names_can_be(tmp_path):
    write_text(tmp_path / ("x" * 255), "whole")
    assert (tmp_path / ("x" * 255)).read_text() == "whole"


def test_a_full_disk_is_one_line_whoever_notices_it(tmp_path, monkeypatch):
    assert no_space(OSError(errno.ENOSPC, "x")) and no_space(OSError(errno.EDQUOT, "x"))
    assert no_space(SafetensorError(f'Io(Os {{ message: "No space left on device" }}, os error {errno.ENOSPC})'))
    assert not no_space(OSError(errno.EACCES, "x")) and not no_space(SafetensorError("bad header"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gradveil.storage.files.os.fsync", full)
    with pytest.raises(DiskFull, match="no space left"):
        write_tensors(tmp_path / "t.safetensors", {"x": torch.ones(2)})
    assert not list(tmp_path.iterdir())


def test_files_are_private(tmp_path):
    write_tensors(tmp_path / "t.safetensors", {"x": torch.ones(2)})
    assert stat.S_IMODE((tmp_path / "t.safetensors").stat().st_mode) == 0o600


def test_a_second_writer_is_refused_and_may_come_later(tmp_path):
    with FileLock(tmp_path / LOCK), pytest.raises(UserError, match="another search is writing"), alone_in(tmp_path, "search"):
        pass
    with alone_in(tmp_path / "new" / "folder", "search"):
        assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize(
    ("command", "lock", "says"),
    [
        (["search", "--candidates", "2", "--images", "2", "--out", "{}/p.json"], "p.search", "another search"),
        (["train", "--rounds", "1", "--clients", "2", "--out", "{}/t"], "t", "another training"),
    ],
)
def test_commands_keep_each_other_out(tmp_path, capsys, command, lock, says):
    (tmp_path / lock).mkdir()
    with FileLock(tmp_path / lock / LOCK):
        assert cli.main([w.format(tmp_path) for w in command]) == 2
    assert says in capsys.readouterr().err


def test_messages_cannot_steer_a_terminal(capsys):
    assert cli._refuse("a\n\tb\x1b[31mred\x07\ud800") == 2
    assert capsys.readouterr().err == "gradveil: a b\ufffd[31mred\ufffd\ufffd\n"
    assert cli.main(["audit", "--defense", "evil\x1b[2Jname"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "\x1b" not in said


def test_a_config_cannot_name_where_to_write(tmp_path):
    file = tmp_path / "audit.yaml"
    file.write_text("out: ../../elsewhere\n")
    with pytest.raises(UserError, match="no setting 'out'"):
        read_spec(file)


def test_the_package_says_that_it_is_typed():
    assert (resources.files("gradveil") / "py.typed").is_file()


# -- models as people bring them --------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, change=lambda x: x, kind=torch.float32):
        super().__init__()
        self.layer = nn.Linear(16, 2, dtype=kind)
        self.change = change

    def forward(self, x):
        return self.change(self.layer(x.flatten(1)))


def leave(_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Own(leave), "does not take images"),
        (Own(lambda x: x.argmax(1)), "floating-point"),
        (Own(kind=torch.complex64), "complex"),
        (Own().to("meta"), "meta"),
        (Own(lambda x: None), "NoneType"),
    ],
)
def test_models_that_cannot_be_audited_are_refused_in_one_line(model, says):
    with pytest.raises(UserError, match=says) as caught:
        build(model, **SHAPE)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_copied_is_refused(shapes):
    model = Own()
    model.layer = nn.Linear(144, 3)
    model.generator = (i for i in range(3))
    with pytest.raises(UserError, match="cannot be copied"):
        gv.audit(shapes, model, "none", "linear", victims=1, quiet=True)


@pytest.mark.parametrize("kind", [torch.half, torch.bfloat16, torch.double])
def test_other_precisions_are_audited_in_single(shapes, kind):
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).to(kind)
    report = gv.audit(shapes, model, "none", "linear", victims=1, quiet=True)
    assert report.summary.defenses[0].attacks[0].status == "ok"


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def test_a_function_that_is_differentiable_once_is_attacked_as_far_as_torch_can(shapes):
    """Torch leaves out the part of the second derivative that is missing, and says nothing; the rest leads to images."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3), Apply())
    row = gv.audit(shapes, model, "none", "ig:steps=2", victims=1, quiet=True).summary.defenses[0].attacks[0]
    assert row.status == "ok" and row.error is None and row.scored == 1


class Apply(nn.Module):
    def forward(self, x):
        return OnceOnly.apply(x)


def test_no_tensor_file_is_written_under_a_name_that_is_not_ours() -> None:
    """Given a path, safetensors makes a temporary file of its own, which would stay after a kill."""
    for file in Path(gradveil.__file__).parent.rglob("*.py"):
        assert not re.search(r"\b(save_file|serialize_file)\b", file.read_text(encoding="utf-8")), file


def test_only_files_with_the_mark_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "page"
    check_replaceable(file, "<ours>")
    for text in ("", "a <ours> b"):
        file.write_text(text)
        check_replaceable(file, "<ours>")
    link = tmp_path / "link"
    link.symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "other").write_text("<theirs>")
    for name in ("link", "pipe", "other"):
        with pytest.raises(UserError, match=f"{name} is there already, and gradveil did not write it"):
            check_replaceable(tmp_path / name, "<ours>")
