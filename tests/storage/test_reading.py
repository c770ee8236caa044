"""Files that others wrote: only regular ones are opened, and limits are checked before memory or time is spent."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile import refused
from safetensors.torch import save_file

from gradveil.core.errors import UserError
from gradveil.storage import reading
from gradveil.storage.reading import open_regular, parse_json, parse_yaml, read_bytes, read_json, read_text, read_yaml
from gradveil.storage.tensor_file import DTYPES, open_tensors, read_tensors

# -- files -------------------------------------------------------------------------------------------------------------


def special(kind: str, path: Path) -> Path:
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # a name of a socket has at most 107 characters
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "too many levels of symbolic links":
        path.symlink_to(path)
    elif kind == "no such file or directory":
        path.symlink_to("nowhere")
    return path


SPECIAL = (
    *("a named pipe", "a socket", "a folder", "a device"),
    *("too many levels of symbolic links", "no such file or directory"),
)


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json, read_yaml, read_tensors])
@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(kind: str, read: Callable[[Path], object], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(kind):
        read(special(kind, tmp_path / "x.npz"))


def test_a_file_that_becomes_a_pipe_after_the_first_look_is_refused(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"1")
    open_file = os.open

    def replaced(path: Path, flags: int) -> int:
        file.unlink()
        os.mkfifo(file)
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", replaced)
    with refused("a named pipe"):
        read_bytes(file)


def test_no_handle_stays_open(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"1")
    before = len(os.listdir("/proc/self/fd"))
    for limit in (1, 0):
        with pytest.raises(ZeroDivisionError if limit else UserError), open_regular(file, limit):
            raise ZeroDivisionError
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_size_is_read_before_the_content(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    with file.open("wb") as handle:
        handle.truncate(1 << 42)  # sparse: no disk is used
    for read in (read_bytes, read_json, read_yaml, read_tensors):
        with refused("4,398,046,511,104 bytes"):
            read(file)


@pytest.mark.parametrize("name", ["/proc/self/status", "/proc/self/pagemap"])
def test_a_file_without_an_honest_size_is_refused(name: str) -> None:
    with refused("its size changes while it is read"):
        read_bytes(Path(name))


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"])
def test_a_name_that_no_file_can_have_is_one_line(name: str, tmp_path: Path) -> None:
    with refused(""):
        read_bytes(tmp_path / name)


def test_text_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with refused("not UTF-8"):
        read_text(tmp_path / "x")


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "deeper than 64"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "deeper than 64"),
        ("[" + "0," * 600_000 + "0]", "more than 500,000 items"),
        ("[" + "[]," * 400_000 + "0]", "more than 500,000 items"),
        ("1" + "0" * 400, "more than 40 digits"),
        ("9" * 5000, "more than 40 digits"),
        ("1e999", "is not a number"),
        ("NaN", "is not a number"),
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ('"' + '\\"' * 1_000_000, "not JSON"),  # a string that does not end
        ('"' + '\\"' * 1_000_000 + "\\", "not JSON"),  # nor does its last escape
        ('"' * 1_000_001, "not JSON"),
        ('"' + "x" * (1 << 24) + '"', "more than 16,777,216 bytes"),
        ("{", "not JSON"),
        (b'\xff\xfe"\0a\0"\0', "not JSON"),  # UTF-16, which hides the structure
        (b"\xef\xbb\xbf1", "not JSON"),
    ],
)
def test_json_has_limits(text: str | bytes, words: str) -> None:
    with refused(words):
        parse_json(text, "x")


@pytest.mark.parametrize("value", [None, 1.5, "[[{", {"a": [1, -2, {"b": '\\"'}]}, [[[]]] * 9, "é\ud800"])
def test_json_within_the_limits_is_read(value: object) -> None:
    assert parse_json(json.dumps(value), "x") == value
    assert parse_json("[" * 64 + "]" * 64, "x") is not None


# -- YAML --------------------------------------------------------------------------------------------------------------

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGED = "a0: &a0 {k0: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 900))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "repeated ones included"),
        (MERGED, "repeated ones included"),
        (CHAIN, "nested deeper than 64"),
        ("!<" + "%41" * 300_000 + "> x", "could not determine a constructor"),
        ("[" * 5000, "nested deeper than 64"),
        ("- " * 5000 + "x", "nested deeper than 64"),
        ("? " * 5000 + "x", "nested deeper than 64"),
        ("&a [*a]", "it contains itself"),
        ("x: &a {b: *a}", "it contains itself"),
        ("[" + "1," * 30_000 + "]", "more than 20,000 values"),
        ("x: " + "9" * 5000, "more than 40 characters"),
        ("x: 1" + ":1" * 5000, "more than 40 characters"),  # a number of base sixty
        ("x: !!python/object/apply:os.system [ls]", "not YAML"),
        ("x: 2001-99-99", "not YAML"),
        ("!!timestamp x", "not YAML"),
        ("!!bool x", "not YAML"),
        ("!!int ''", "not YAML"),
        ("{[a]: 1}", "not YAML"),
        ("*a", "not YAML"),
        ("\0", "not YAML"),
        ("a: 1\n---\nb: 1", "not YAML"),
    ],
)
def test_yaml_has_limits(text: str, words: str) -> None:
    with refused(words):
        parse_yaml(text, "x.yaml")


def test_yaml_within_the_limits_is_read(tmp_path: Path) -> None:
    text = "a: &a [1, 2.5, {b: text}]\nc: *a\nd: &d {x: 1}\ne: {<<: *d, y: 2}\n"
    (tmp_path / "x.yaml").write_text(text)
    assert read_yaml(tmp_path / "x.yaml") == {
        **{"a": [1, 2.5, {"b": "text"}], "c": [1, 2.5, {"b": "text"}]},
        **{"d": {"x": 1}, "e": {"x": 1, "y": 2}},
    }
    assert parse_yaml("", "x") is None


def test_a_yaml_file_is_no_longer_than_people_write(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("#" * (reading.MAX_TEXT + 1))
    with refused("at most 1,048,576 are read"):
        read_yaml(tmp_path / "x.yaml")


# -- tensors -----------------------------------------------------------------------------------------------------------


def written(path: Path, header: object, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(shape: object, start: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "body", "words"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "does not begin where"),  # overlap
        ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, 8, "does not begin where"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "does not begin where"),  # a gap
        ({"a": entry([2], 4, 12)}, 12, "does not begin where"),
        ({"a": entry([2], 0, 8)}, 9, "do not end where the file ends"),
        ({"a": entry([2], 0, 8)}, 7, "do not end where the file ends"),
        ({"a": entry([-2], 0, -8)}, 8, "has the entry"),
        ({"a": entry([True], 0, 4)}, 4, "has the entry"),
        ({"a": entry([1.0], 0, 4)}, 4, "has the entry"),
        ({"a": entry(["1"], 0, 4)}, 4, "has the entry"),
        ({"a": entry([1] * 17, 0, 4)}, 4, "has the entry"),
        ({"a": entry([1], 0, 4, "PICKLE")}, 4, "has the entry"),
        ({"a": entry([1], 0, 4, ["F32"])}, 4, "has the entry"),
        ({"a": {**entry([1], 0, 4), "more": 1}}, 4, "has the entry"),
        ({"a": [1]}, 4, "has the entry"),
        ({"a": entry([2**40, 2**40], 0, 8)}, 8, "has the shape"),
        ({"a": entry([0, 2**60, 2**60], 0, 0)}, 0, "has the shape"),
        ({"a": entry([2], 8, 0)}, 8, "which is not its shape"),
        ({"x" * 1_000_000: entry([1], 0, 4)}, 4, "a name of 1,000,000 characters"),
        ({"__metadata__": {"a": 1}}, 0, "its metadata is not text"),
        ({"__metadata__": ["a"]}, 0, "its metadata is not text"),
        ([1], 0, "no mapping"),
        (b'{"a": {}, "a": {}}', 0, "a key occurs twice"),
        (b'{"a": ' * 1000, 0, "deeper than 64"),
    ],
)
def test_a_header_that_lies_is_refused(header: object, body: int, words: str, tmp_path: Path) -> None:
    with refused(words):
        read_tensors(written(tmp_path / "x", header, bytes(body)))


@pytest.mark.parametrize("length", [2**63, 2**62, 2**32, 3, 1, 0])
def test_the_length_of_the_header_is_not_believed(length: int, tmp_path: Path) -> None:
    with refused("its header is not whole"):
        read_tensors(written(tmp_path / "x", b"{}", length=length))


def test_a_million_tiny_tensors_are_refused_at_once(tmp_path: Path) -> None:
    """Two ways: a header of many bytes, and many names in few bytes."""
    place = b'{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}'
    many = b"{" + b",".join(b'"%d":' % i + place % (i, i + 1) for i in range(300_000)) + b"}"
    with refused("at most 16,777,216 are read", 1):
        read_tensors(written(tmp_path / "x", many, bytes(300_000)))
    empty = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    few = b"{" + b",".join(b'"%x":' % i + empty for i in range(60_000)) + b"}"
    with refused("60,000 tensors"):
        read_tensors(written(tmp_path / "x", few))


def test_a_sparse_header_takes_no_memory(tmp_path: Path) -> None:
    file = written(tmp_path / "x", b"{}", length=3 << 30)
    with file.open("r+b") as handle:
        handle.truncate((3 << 30) + 8)
    with refused("its header has 3,221,225,472 bytes", 1):
        read_tensors(file)


def test_every_type_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 100, (3, 2), generator=rng)
    tensors = {str(dtype): numbers.to(dtype) for dtype in DTYPES.values()}
    tensors |= {"empty": torch.empty(0, 3), "one": torch.tensor(7.0)}
    save_file(tensors, tmp_path / "x", metadata={"a": "b"})
    with open_tensors(tmp_path / "x") as file:
        assert file.metadata == {"a": "b"}
        loaded = file.tensors()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    whole = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    save_file({"before": torch.ones(7), "x": whole}, tmp_path / "x")
    with open_tensors(tmp_path / "x") as file:
        for index in [(), (1,), (0, 2), (1, 1, 3), (1, 2, 3, 4)]:
            assert file.read("x", *index).equal(whole[index])
        for outside in [(2,), (0, 3), (-1,)]:
            with pytest.raises(IndexError):
                file.read("x", *outside)


def test_a_file_that_is_cut_off_while_it_is_read_is_one_line(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1 << 20)}, tmp_path / "x")
    with refused("cut off while it was read"), open_tensors(tmp_path / "x") as file:
        os.truncate(tmp_path / "x", 1000)
        file.read("x")


def test_bytes_that_are_no_truth_values_become_true(tmp_path: Path) -> None:
    file = written(tmp_path / "x", {"x": entry([3], 0, 3, "BOOL")}, b"\0\1\7")
    assert read_tensors(file)["x"].tolist() == [False, True, True]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="this system has no /proc/self/mem")
def test_a_file_that_fails_when_it_is_read_is_one_line() -> None:
    with (
        pytest.raises(UserError, match="/proc/self/mem: input/output error"),
        open_regular(Path("/proc/self/mem"), 100) as file,
    ):
        file.read(8)
