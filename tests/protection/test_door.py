"""The door: late, broken and lying answers stay inside, and a record says what left."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.core.hashing import digest
from gradveil.core.types import Batch, Tensors
from gradveil.defenses import Defense
from gradveil.defenses.base import Step, checked_update
from gradveil.protection.audited import Audited
from gradveil.protection.door import Door, within

X, Y = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


class Answer(Defense):
    """Returns in the update stage whatever a test has it return."""

    def __init__(self, answer: Callable[[Tensors], object]):
        self.answer = answer

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return self.answer(tensors)  # type: ignore[return-value]


def refused(defense: Defense, **options: object) -> str:
    """The reason for which a shield refuses; no gradient was set."""
    model = network()
    shield = gv.protect(model, defense, data=(X, Y), **options)  # type: ignore[arg-type]
    with pytest.raises(UserError) as error:
        shield.backward(X, Y)
    assert all(p.grad is None for p in model.parameters())
    return str(error.value)


# -- lies --------------------------------------------------------------------------------------------------------------


class Liar(Tensor):
    """Says that it is finite and a copy of something else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return torch.tensor(True)

    def detach(self) -> Tensor:
        return torch.zeros(3)


class Changing(Mapping[str, Tensor]):
    """Holds other tensors every time it is asked."""

    def __init__(self, tensors: Tensors):
        self.tensors, self.times = tensors, 0

    def __getitem__(self, name: str) -> Tensor:
        self.times += 1
        return self.tensors[name] * (1 if self.times <= len(self.tensors) else float("nan"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_tensors_of_other_classes_stay_inside() -> None:
    assert "holds Liar" in refused(Answer(lambda t: {n: v.as_subclass(Liar) for n, v in t.items()}))
    assert "holds torch.float32" in refused(Answer(lambda t: {n: v.to("meta") for n, v in t.items()}))
    assert "holds torch.float32" in refused(Answer(lambda t: {n: v.to_sparse() for n, v in t.items()}))


def test_an_answer_is_read_once() -> None:
    model = network()
    gv.protect(model, Answer(Changing), data=(X, Y)).backward(X, Y)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())  # type: ignore[union-attr]


def test_what_was_checked_is_what_leaves() -> None:
    """A defense that changes its answer after the check, or answers with views of the weights."""
    kept: list[Tensor] = []

    def answer(tensors: Tensors) -> Tensors:
        kept.extend(tensors.values())
        return tensors

    model = network()
    gv.protect(model, Answer(answer), data=(X, Y)).backward(X, Y)
    for tensor in kept:
        tensor.fill_(float("nan"))
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())  # type: ignore[union-attr]

    weights = {n: p.detach() for n, p in model.named_parameters()}
    before = {n: w.clone() for n, w in weights.items()}
    model.zero_grad()
    gv.protect(model, Answer(lambda t: weights), data=(X, Y)).backward(X, Y)
    for parameter in model.parameters():
        parameter.grad.zero_()  # type: ignore[union-attr]
    assert all(torch.equal(w, before[n]) for n, w in weights.items())


def test_checked_tensors_are_whole_copies() -> None:
    wide = torch.arange(6.0).expand(4, 6).t()
    copy = checked_update({"w": torch.zeros(6, 4)}, {"w": wide.requires_grad_()})["w"]
    assert copy.is_contiguous() and not copy.requires_grad
    assert torch.equal(copy, wide)
    half = checked_update({"w": torch.zeros(2)}, {"w": torch.ones(2, dtype=torch.half)})["w"]
    assert half.dtype == torch.float32


@pytest.mark.parametrize(
    "images", [lambda b: None, lambda b: b.x, lambda b: Batch(b.x * float("nan"), b.y), lambda b: Batch(b.x[:3], b.y[:3])]
)
def test_data_that_is_broken_trains_nothing(images: Callable[[Batch], object]) -> None:
    class Encode(Defense):
        def data(self, batch: Batch, step: Step) -> Batch:
            return images(batch)  # type: ignore[return-value]

    assert "nothing is sent" in refused(Encode())


# -- errors and time ---------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Defense:
    def answer(tensors: Tensors) -> Tensors:
        raise error

    return Answer(answer)


def test_errors_become_one_line_and_ends_of_the_program_pass() -> None:
    text = refused(raising(RuntimeError("out of\nmemory")))
    assert text == "the defense raised RuntimeError: out of memory; nothing is sent."
    model = network()
    for end in (SystemExit(3), KeyboardInterrupt()):
        for options in ({}, {"deadline": 60.0}):
            with pytest.raises(type(end)):
                gv.protect(model, raising(end), data=(X, Y), **options).backward(X, Y)  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())


def test_texts_of_errors_stay_on_the_client(caplog: pytest.LogCaptureFixture) -> None:
    """Flower sends the text of an exception to the server; it may quote the gradient."""
    door = Door("guard", Audited(raising(ValueError("pixel 0.25"))))
    with pytest.raises(UserError) as error:
        door.checked.update({"w": torch.ones(2)}, None)  # type: ignore[arg-type]
    assert str(error.value) == "the defense raised ValueError; nothing is sent."
    assert "pixel 0.25" in caplog.text


@pytest.mark.parametrize("hang", [lambda: time.sleep(30), lambda: threading.Event().wait(30)])
def test_a_defense_that_hangs_sends_nothing(hang: Callable[[], object]) -> None:
    def answer(tensors: Tensors) -> Tensors:
        hang()
        return tensors

    began = time.monotonic()
    assert "took more than the 0.3 s it had" in refused(Answer(answer), deadline=0.3)
    assert time.monotonic() - began < 10


def test_in_time_nothing_changes() -> None:
    models = [network() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, options in zip(models, ({}, {"deadline": 60.0}), strict=True):
        gv.protect(model, "prune:ratio=0.5", data=(X, Y), **options).backward(X, Y)  # type: ignore[arg-type]
    for one, two in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    with torch.no_grad():
        assert within(60, torch.is_grad_enabled) is False
    assert within(60, torch.is_grad_enabled) is True


@pytest.mark.parametrize("options", [{"deadline": 0}, {"deadline": float("nan")}, {"evidense": "x"}, {"buffers": "send"}])
def test_options_that_do_not_exist_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        gv.protect(network(), "none", data=(X, Y), **options)  # type: ignore[arg-type]


def test_a_defense_that_changes_weights_in_place_changes_copies() -> None:
    class InPlace(Defense):
        def gradient(self, tensors: Tensors, step: Step) -> Tensors:
            for name, gradient in tensors.items():
                step.state[name].sub_(gradient)  # the weights would give the plain gradient away
            return {name: torch.zeros_like(t) for name, t in tensors.items()}

    model = network()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gv.protect(model, InPlace(), data=(X, Y)).backward(X, Y)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


# -- evidence ----------------------------------------------------------------------------------------------------------


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_round_leaves_a_record(tmp_path: Path) -> None:
    path, model = tmp_path / "new" / "evidence.jsonl", network()
    shield = gv.protect(model, "prune:ratio=0.5+gaussian", data=(X, Y), evidence=path)
    for _ in range(2):
        model.zero_grad()
        shield.backward(X, Y)
    one, two = records(path)
    assert (one["round"], two["round"], two["door"], two["defense"]) == (1, 2, "shield", "prune:ratio=0.5+gaussian")
    assert (two["protected"], two["withheld"], two["unprotected"]) == (2, [], [])
    assert set(two["versions"]) == {"gradveil", "torch", "prune", "gaussian"}  # type: ignore[call-overload]
    sent = {n: p.grad for n, p in model.named_parameters()}
    assert two["sha256"] == digest("", sent) != one["sha256"]  # type: ignore[arg-type]
    assert two["norm"] == pytest.approx(float(torch.cat([g.flatten() for g in sent.values()]).norm()))  # type: ignore[union-attr]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not {"secret", "seed", "key"} & set(two)


def test_a_refusal_leaves_a_record_too(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    reason = refused(Answer(lambda t: {}), evidence=path)
    (record,) = records(path)
    assert record["refused"] == reason and "sha256" not in record


def test_without_its_evidence_nothing_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evidence.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda handle, content: 3)
        assert "written whole" in refused(Answer(lambda t: t), evidence=path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "notes").write_text("mine\n")
    (tmp_path / "settings.json").write_text('{"mine": 1}\n')
    for name in ("pipe", "link", "notes", "settings.json", "."):
        with pytest.raises(UserError, match="evidence"):
            gv.protect(network(), "none", data=(X, Y), evidence=tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "notes").read_text() == "mine\n"
    assert (tmp_path / "settings.json").read_text() == '{"mine": 1}\n'


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    path.write_text('{"time": "2026-')
    gv.protect(network(), "none", data=(X, Y), evidence=path).backward(X, Y)
    lines = path.read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["protected"] == 2


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    doors = [Door("shield", Audited(Answer(lambda t: t)), evidence=path) for _ in range(4)]

    def write(door: Door) -> None:
        for number in range(20):
            door.let_out(number, {"w": torch.ones(3)}, ["w"])

    threads = [threading.Thread(target=write, args=(door,)) for door in doors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(str(r["round"])) for r in records(path)) == sorted(4 * list(range(20)))
