"""Updates as files: what is written comes back, and what others wrote is believed only after it was checked."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.types import Update
from gradveil.storage.updates import difference, fit_to_model, load_tensors, load_update, save_update

EXPECTED = {"conv.weight": torch.zeros(4, 1, 3, 3), "fc.weight": torch.zeros(2, 8), "fc.bias": torch.zeros(2)}


def filled(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=rng) for name, t in EXPECTED.items()}


def refused(work: Callable[[], Any]) -> str:
    """The one line that says why."""
    with pytest.raises(UserError) as told:
        work()
    text = str(told.value)
    assert text.strip()
    assert "\n" not in text
    return text


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    update = Update(filled(), "delta", 7)
    facts = {"input_shape": [1, 8, 8], "num_classes": 2, "mean": [0.5], "lr": 0.01, "note": "from a round"}
    save_update(tmp_path / "u.safetensors", update, **facts)
    again, said = load_update(tmp_path / "u.safetensors")
    assert (again.kind, again.examples) == ("delta", 7)
    assert said == facts
    assert set(again.tensors) == set(update.tensors)
    assert all(torch.equal(again.tensors[n], t) for n, t in update.tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["u.safetensors"]  # no temporary file is left


def test_a_plain_safetensors_file_is_a_gradient_of_one_image(tmp_path: Path) -> None:
    save_file(filled(), tmp_path / "u.safetensors")
    update, facts = load_update(tmp_path / "u.safetensors")
    assert (update.kind, update.examples, facts) == ("gradient", 1, {})


def test_tensors_that_share_memory_can_be_written(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save_update(tmp_path / "u.safetensors", Update({"a": whole[:3], "b": whole[::2], "c": whole.view(2, 3).T}))
    again, _ = load_update(tmp_path / "u.safetensors")
    assert torch.equal(again.tensors["c"], whole.view(2, 3).T)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_must_be_finite(tmp_path: Path, value: float) -> None:
    tensors = filled()
    tensors["fc.weight"][1, 3] = value
    save_file(tensors, tmp_path / "u.safetensors")
    assert "'fc.weight' holds NaN or infinite" in refused(lambda: load_update(tmp_path / "u.safetensors"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.bias"), "tensor 'fc.bias' of the model is missing"),
        (lambda t: t.update(other=torch.zeros(1)), "'other' is not a trainable parameter"),
        (lambda t: t.update({"fc.bias2": t.pop("fc.bias")}), "It has 'fc.bias2'"),
        (lambda t: t.update({"fc.weight": torch.zeros(8, 2)}), "'fc.weight' is 8×2, the model's is 2×8"),
        (lambda t: t.update({"fc.bias": torch.zeros(())}), "a single number"),
    ],
)
def test_it_must_fit_the_model(tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: str) -> None:
    tensors = filled()
    change(tensors)
    save_file(tensors, tmp_path / "u.safetensors")
    update, _ = load_update(tmp_path / "u.safetensors")
    assert words in refused(lambda: fit_to_model("u.safetensors", update.tensors, EXPECTED))


def test_what_fits_comes_in_the_models_order_and_precision() -> None:
    given = dict(reversed(filled().items()))
    expected = {n: t.double() for n, t in EXPECTED.items()}
    found = fit_to_model("u", given, expected)
    assert list(found) == list(EXPECTED)
    assert all(t.dtype == torch.float64 for t in found.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {n: t.to(dtype) for n, t in filled().items()}
    save_file(tensors, tmp_path / "u.safetensors")
    found = fit_to_model("u", load_update(tmp_path / "u.safetensors")[0].tensors, EXPECTED)
    assert all(t.dtype == torch.float32 for t in found.values())
    assert all(torch.equal(t, tensors[n].float()) for n, t in found.items())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_gradient_is_made_of_floating_point_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = filled()
    tensors["fc.bias"] = torch.zeros(2).to(dtype)
    save_file(tensors, tmp_path / "u.safetensors")

    def read() -> None:
        fit_to_model("u.safetensors", load_update(tmp_path / "u.safetensors")[0].tensors, EXPECTED)

    assert "fc.bias" in refused(read)


def raw(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"PK\x03\x04 a zip such as torch.save writes",
        b"\x80\x04\x95 a pickle",
        struct.pack("<Q", 2**62) + b"{}",  # a header longer than the world
        raw(b"{not json"),
        raw([1, 2, 3]),
        raw({"a": entry([2], 0, 8)}, b"\0" * 4),  # says more bytes than there are
        raw({"a": entry([2], 0, 4)}, b"\0" * 4),  # shape and bytes disagree
        raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12),  # tensors overlap
        raw({"a": entry([2], 0, 8, "PICKLE")}, b"\0" * 8),
        raw({"a": entry([2**40, 2**40], 0, 8)}, b"\0" * 8),
        raw({}),
        raw({"__metadata__": {"kind": "gradient"}}),
        raw({"__metadata__": {"examples": 3}, "a": entry([2], 0, 8)}, b"\0" * 8),  # metadata that is not text
    ],
)
def test_a_file_that_is_no_update_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "u.safetensors"
    path.write_bytes(content)
    assert str(path) in refused(lambda: load_update(path))


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "u.safetensors"
    save_update(path, Update(filled()))
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:length])
        assert "not a safetensors file" in refused(lambda: load_update(path))


def test_no_file_and_a_folder_are_told(tmp_path: Path) -> None:
    assert "no such file" in refused(lambda: load_tensors(tmp_path / "absent"))
    assert "a folder, not a regular file" in refused(lambda: load_tensors(tmp_path))


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"kind": "weights"}, "neither 'gradient' nor 'delta'"),
        ({"kind": "gradient\nx"}, "neither"),
        ({"examples": "0"}, "not a number of images"),
        ({"examples": "-1"}, "not a number of images"),
        ({"examples": "many"}, "not a number of images"),
        ({"examples": "1.5"}, "not a number of images"),
        ({"examples": "99999999999999999999"}, "not a number of images"),
        ({"examples": "²"}, "not a number of images"),
    ],
)
def test_metadata_that_cannot_be_true_is_refused(tmp_path: Path, meta: dict[str, str], words: str) -> None:
    save_file(filled(), tmp_path / "u.safetensors", metadata=meta)
    assert words in refused(lambda: load_update(tmp_path / "u.safetensors"))


def test_two_checkpoints_differ_by_an_update(tmp_path: Path) -> None:
    before, step = filled(0), filled(1)
    counter = {"bn.num_batches_tracked": torch.tensor(3), "bn.running_mean": torch.ones(2)}
    save_file({**before, **counter}, tmp_path / "before.safetensors")
    save_file({**{n: t + step[n] for n, t in before.items()}, **counter}, tmp_path / "after.safetensors")
    start, update = difference(tmp_path / "before.safetensors", tmp_path / "after.safetensors", EXPECTED)
    assert update.kind == "delta"
    assert set(update.tensors) == set(EXPECTED)
    assert all(torch.allclose(update.tensors[n], step[n], atol=1e-6) for n in EXPECTED)
    assert torch.equal(start["bn.running_mean"], torch.ones(2))  # what is not trained belongs to the state


def test_two_equal_checkpoints_hold_no_update(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file(filled(), tmp_path / name)
    assert "same weights" in refused(lambda: difference(tmp_path / "a", tmp_path / "b", EXPECTED))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file(filled(), tmp_path / "a")
    save_file({**filled(), "fc.bias": torch.zeros(3)}, tmp_path / "b")
    assert "'fc.bias' is 3, the model's is 2" in refused(lambda: difference(tmp_path / "a", tmp_path / "b", EXPECTED))
