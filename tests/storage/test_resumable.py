"""Trainings that are kept: one that is interrupted anywhere ends as one that was left in peace, bit by bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.attacks.generative import gan, polish
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Setup
from gradveil.defenses.batch.refiner import evaluator as refiner_evaluator
from gradveil.defenses.data.ats import search as ats_search
from gradveil.defenses.data.loda import extractors
from gradveil.storage import resumable as trained
from gradveil.storage.resumable import Shuffled, resumable, trained_once


class Stop(Exception):
    pass


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is stored, and nothing is remembered by this process."""
    monkeypatch.setattr(trained, "EVERY", 0.0)
    for module in (gan, extractors):
        monkeypatch.setattr(module, "_KEPT", {})


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int | None) -> None:
    """The process ends, as it were, as soon as the checkpoint of that step is written."""
    save = trained._save

    def saving(checkpoint: Path, parts: object, done: int) -> None:
        save(checkpoint, parts, done)  # type: ignore[arg-type]
        if done == step:
            raise Stop

    monkeypatch.setattr(trained, "_save", saving)


def images(n: int = 100) -> Batch:
    return Batch(torch.rand(n, 1, 12, 12, generator=generator("trained", n)), torch.arange(n) % 3)


def train_gan(cache: Path | None) -> Tensors:
    return dict(gan.generator_for(images(10), 3, cache).state_dict())


def train_extractor(cache: Path | None) -> Tensors:
    found = extractors.extractor("trained", images(150), cache)
    assert isinstance(found, extractors.Trained)
    return found.weights


def train_evaluator(cache: Path | None) -> Tensors:
    function = ModelFunction(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)))
    setup = Setup(Task(function, (1, 12, 12), 3, torch.zeros(1), torch.ones(1)), function.state(), images(), cache=cache)
    return refiner_evaluator.evaluator_for(setup, 12).state_dict()


def train_polish(cache: Path | None) -> Tensors:
    x = images().x
    return {"x": polish.polish(x, x / 2, x.roll(1, 0), x, x / 2, cache=cache)}


def train_half(cache: Path | None) -> Tensors:
    """With dropout, which draws from the global stream."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    task = Task(ModelFunction(module), images().image_shape, 3, torch.zeros(1), torch.ones(1))
    return ats_search.half_trained(task, images(), ats_search.Search(epochs=6, share=0.9), cache)


ALL = [train_gan, train_extractor, train_evaluator, train_polish, train_half]


@pytest.mark.parametrize("train", ALL)
def test_an_interrupted_training_ends_as_an_undisturbed_one(
    train: Callable[[Path | None], Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "STEPS", 15)
    whole = train(None)
    gan._KEPT.clear(), extractors._KEPT.clear()
    for step in (3, 10):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(Stop):
                train(tmp_path)
        assert [p.name.endswith(".partial.safetensors") for p in tmp_path.glob("*.safetensors")] == [True]
    begun: list[int] = []
    restore = trained._restore
    monkeypatch.setattr(trained, "_restore", lambda *given: begun.append(restore(*given)) or begun[-1])
    torch.manual_seed(99)  # the global stream has no part in it
    resumed = train(tmp_path)
    assert begun == [10]
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[name], whole[name]) for name in whole)
    (stored,) = tmp_path.glob("*.safetensors")  # and no checkpoint
    assert "partial" not in stored.name
    gan._KEPT.clear(), extractors._KEPT.clear()
    again = train(tmp_path)
    assert begun == [10] and all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_killed_process_loses_no_more_than_since_its_last_checkpoint(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
import torch
from gradveil.storage import resumable as trained
from gradveil.attacks.generative import gan
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
torch.set_num_threads(1)
trained.EVERY = 0.0
def progress(done, total):
    if done == 7:
        os.kill(os.getpid(), signal.SIGKILL)
x = torch.rand(10, 1, 12, 12, generator=generator("trained", 10))
gan.generator_for(Batch(x, torch.arange(10) % 3), 3, Path({str(tmp_path)!r}), progress)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    steps: list[int] = []
    found = gan.generator_for(images(10), 3, tmp_path, lambda done, total: steps.append(done)).state_dict()
    assert steps == list(range(7, 21))  # the sixth was the last that was stored
    whole = gan.train(images(10), 3)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


# -- checkpoints that do not fit -----------------------------------------------------------------------------------------


def tiny(checkpoint: Path | None, width: int = 4, steps: int = 20, begun: list[int] | None = None) -> Tensors:
    """A training with everything that has a state."""
    rng = generator("tiny")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    shuffled = Shuffled(10, 4, rng)
    x = torch.rand(10, 3, generator=generator("x"))
    for step in resumable(steps, checkpoint, (module, optimizer, schedule, shuffled, rng)):
        if begun is not None:
            begun.append(step)
        noise = torch.rand(1, generator=rng)
        optimizer.zero_grad()
        (module(x[shuffled.draw()]) - noise).square().mean().backward()
        optimizer.step()
        schedule.step()
    return {name: t.clone() for name, t in module.state_dict().items()}


def interrupted(file: Path, monkeypatch: pytest.MonkeyPatch, **more: int) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        with pytest.raises(Stop):
            tiny(file, **more)


def flipped(content: bytes) -> bytes:
    """One bit of a weight, where no reader of the format would notice."""
    return content[:-20] + bytes([content[-20] ^ 64]) + content[-19:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a bit": flipped,
    "no file of tensors": lambda content: b"\x80\x04K\x01." * 50,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_ignored(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, file = tiny(None), tmp_path / "net.partial.safetensors"
    interrupted(file, monkeypatch)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    begun: list[int] = []
    found = tiny(file, begun=begun)
    assert begun[0] == 0 and all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_checkpoint_of_other_code_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, file = tiny(None), tmp_path / "net.partial.safetensors"
    interrupted(file, monkeypatch, width=5)  # its first parts fit and are set before the others are found not to
    begun: list[int] = []
    found = tiny(file, begun=begun)
    assert begun[0] == 0 and all(torch.equal(found[name], whole[name]) for name in whole)
    file.unlink()
    interrupted(file, monkeypatch)
    short = tiny(None, steps=5)
    found = tiny(file, steps=5)
    assert all(torch.equal(found[name], short[name]) for name in short)
    save_file({"x": torch.zeros(1)}, file)
    found = tiny(file)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_checkpoints_are_written_as_time_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trained, "EVERY", 10.0)
    monkeypatch.setattr(trained.time, "monotonic", lambda: now[0])
    written: list[int] = []
    monkeypatch.setattr(trained, "_save", lambda checkpoint, parts, done: written.append(done))
    for _ in resumable(20, tmp_path / "p", ()):
        now[0] += 4
    assert written == [3, 6, 9, 12, 15, 18]


def test_leftovers_go_and_a_damaged_result_is_told(tmp_path: Path, killed_writer: Callable[[Path], Path]) -> None:
    file = tmp_path / "net.safetensors"
    for name in ("net.safetensors", "net.partial.safetensors"):
        killed_writer(tmp_path / name)
    others = killed_writer(tmp_path / "other.safetensors")  # in a shared cache its writer may still be at work
    (tmp_path / ".net.partial.safetensors.mine").write_bytes(b"a user's")
    made = trained_once(file, lambda checkpoint: {"w": torch.ones(2)})
    names = {others.name, ".net.partial.safetensors.mine", "net.safetensors", "net.safetensors.lock"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert torch.equal(trained_once(file, lambda checkpoint: pytest.fail("again"))["w"], made["w"])
    file.write_bytes(b"broken")
    with pytest.raises(UserError, match="damaged"):
        trained_once(file, lambda checkpoint: {})


@pytest.mark.parametrize("how", ["swapped", "changed", "without a hash"])
def test_a_network_that_was_exchanged_is_trained_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    for file, value in ((one, 1.0), (two, 2.0)):
        trained_once(file, lambda checkpoint, value=value: {"w": torch.full((2,), value)})
    if how == "swapped":
        one.write_bytes(two.read_bytes())
    elif how == "changed":
        content = bytearray(one.read_bytes())
        content[-1] ^= 1
        one.write_bytes(content)
    else:
        save_file({"w": torch.full((2,), 2.0)}, one)
    for _ in range(2):  # the second time it is only read
        assert torch.equal(trained_once(one, lambda checkpoint: {"w": torch.ones(2)})["w"], torch.ones(2))
    (logged,) = caplog.messages
    assert logged == f"{one} does not hold what was written; it is trained again."
    assert torch.equal(trained_once(two, lambda checkpoint: pytest.fail("again"))["w"], torch.full((2,), 2.0))
