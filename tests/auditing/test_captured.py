"""An update that plain PyTorch code computed elsewhere: it is rebuilt from the file alone, or refused in one line."""

from __future__ import annotations

import copy
import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_update import KNOWN, LABEL, MEAN, SHAPE, STD, gradient, network, quality, refused
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.core.types import Update
from gradveil.data import DataSet
from gradveil.storage.updates import save_update

# -- what is rebuilt ---------------------------------------------------------------------------------------------------


def test_a_gradient_from_outside_is_rebuilt(tmp_path: Path, image: Tensor) -> None:
    module = network()
    save_file(gradient(module, image, [LABEL]), tmp_path / "u.safetensors")
    found = gv.attack_update(tmp_path / "u.safetensors", module, attacks=["linear", "rgap", "ig:steps=5"], **KNOWN)
    assert quality(found, image) >= 30
    assert found.best == "rgap"
    assert found.by_attack["rgap"].labels.tolist() == [LABEL]  # type: ignore[union-attr]
    assert found.fit["rgap"] < 1e-4 < found.fit["ig:steps=5"]
    assert "not the 144 pixels" in found.not_applicable["linear"]


def test_what_the_file_says_need_not_be_said_again(tmp_path: Path, image: Tensor) -> None:
    module = network()
    sent = Update(gradient(module, image, [LABEL]))
    save_update(tmp_path / "u.safetensors", sent, input_shape=SHAPE, num_classes=4, mean=[MEAN], std=[STD])
    assert quality(gv.attack_update(tmp_path / "u.safetensors", module, attacks=["rgap"]), image) >= 30


def test_an_update_at_hand_needs_no_file(image: Tensor) -> None:
    module = network()
    sent = Update(gradient(module, image, [LABEL]))
    assert quality(gv.attack_update(sent, module, attacks=["rgap"], **KNOWN), image) >= 30


def test_two_checkpoints_of_one_step_are_rebuilt(tmp_path: Path, image: Tensor) -> None:
    """Also where the model at hand has other weights: those of the round are in the file."""
    module = network()
    save_file(module.state_dict(), tmp_path / "before.safetensors")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gradient(module, image, [LABEL])
    optimizer.step()
    save_file(module.state_dict(), tmp_path / "after.safetensors")
    files = {"before": tmp_path / "before.safetensors", "after": tmp_path / "after.safetensors"}
    other = nn.Sequential(nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(432, 4))
    found = gv.attack_update(model=other, attacks=["rgap"], lr=0.1, **files, **KNOWN)
    assert quality(found, image) >= 30
    # A wrong learning rate only scales the gradient, which makes no difference.
    wrong = gv.attack_update(model=other, attacks=["rgap"], lr=0.3, **files, **KNOWN)
    assert found.fit["rgap"] < 1e-6 and wrong.fit["rgap"] < 1e-6
    assert quality(wrong, image) == pytest.approx(quality(found, image), abs=1)


def test_several_local_steps_are_rebuilt(tmp_path: Path, image: Tensor) -> None:
    module = network()
    start = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        gradient(module, image, [LABEL])
        optimizer.step()
    before = dict(start.named_parameters())
    delta = {n: (p - before[n]).detach() for n, p in module.named_parameters()}
    save_update(tmp_path / "u.safetensors", Update(delta, "delta", 1), lr=0.05, local_steps=3)
    found = gv.attack_update(tmp_path / "u.safetensors", start, attacks=["lbfgs-cosine:steps=150"], **KNOWN)
    assert quality(found, image) >= 25


def test_labels_can_be_given(tmp_path: Path, shapes: DataSet) -> None:
    module, x = network(), shapes.private.x[:3]
    save_update(tmp_path / "u.safetensors", Update(gradient(module, x, [1, 1, 3]), examples=3))
    found = gv.attack_update(tmp_path / "u.safetensors", module, labels=[1, 1, 3], attacks=["ig:steps=2"], **KNOWN)
    answer = found.by_attack["ig:steps=2"]
    assert answer.labels.tolist() == [1, 1, 3]  # type: ignore[union-attr]
    assert answer.images.shape == (3, *SHAPE)


def test_what_is_saved_can_be_opened(tmp_path: Path, image: Tensor) -> None:
    module = network()
    found = gv.attack_update(Update(gradient(module, image, [LABEL])), module, attacks=["linear", "rgap"], **KNOWN)
    folder = found.save(tmp_path / "out")
    assert {p.name for p in folder.iterdir()} == {"attack.json", "rgap.safetensors", "rgap.png"}
    assert torch.equal(load_file(folder / "rgap.safetensors")["images"], found.by_attack["rgap"].images)
    with Image.open(folder / "rgap.png") as picture:
        assert picture.mode == "L"
        assert picture.width == picture.height >= 12
    facts = json.loads((folder / "attack.json").read_text())
    assert facts["best"] == "rgap"
    assert facts["not_applicable"].keys() == {"linear"}


def test_saving_again_replaces_what_was_saved_and_nothing_else(tmp_path: Path, image: Tensor) -> None:
    module, folder = network(), tmp_path / "out"
    rebuilt = gv.attack_update(Update(gradient(module, image, [LABEL])), module, attacks=["rgap"], **KNOWN)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for _ in range(2):
        rebuilt.save(folder)
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir() if p.name != "notes.txt"} == dict.fromkeys(
        ("attack.json", "rgap.safetensors", "rgap.png"), 0o600
    )
    (folder / "rgap.png").write_text("my own picture")
    assert "rgap.png is there already" in refused(lambda: rebuilt.save(folder))
    assert (folder / "rgap.png").read_text() == "my own picture" and (folder / "notes.txt").read_text() == "mine"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    for name, text in (
        ("attack.json", '{"best": "mine"}'),
        ("attack.json", "[]"),
        ("rgap.safetensors", ""),
        ("rgap.png", None),
    ):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).symlink_to(elsewhere) if text is None else (folder / name).write_text(text)
        assert "choose another folder" in refused(lambda: rebuilt.save(folder))
        assert [p.name for p in folder.iterdir()] == [name] and (folder / name).read_text() == (
            "mine" if text is None else text
        )
    assert elsewhere.read_text() == "mine"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input_shape": None}, "--input-shape"),
        ({"input_shape": (1, 12)}, "not channels, height, width"),
        ({"input_shape": (1, 12, 0)}, "not channels, height, width"),
        ({"mean": [0.1, 0.2]}, "2 values of mean or std for 1 channels"),
        ({"labels": [1, 2]}, "2 labels for a batch of 1"),
        ({"labels": [4]}, "below 4"),
        ({"attacks": ["swfit"]}, "did you mean 'swift'"),
        ({"attacks": ["linear"]}, "no attack applies"),
        ({"model": "lenet", "num_classes": None}, "--classes"),
        ({"model": "lenet", "num_classes": 4}, "of the model is missing"),
        ({"model": "lenett", "num_classes": 4}, "did you mean 'lenet'"),
        ({"before": "absent.safetensors"}, "no such file"),
        ({"attacks": ["dcs2-average-start"]}, "needs public"),
    ],
)
def test_a_wrong_question_is_told(options: dict[str, Any], words: str, image: Tensor) -> None:
    module = network()
    asked: dict[str, Any] = {"model": module, "attacks": ["rgap"], **KNOWN, **options}
    assert words in refused(lambda: gv.attack_update(Update(gradient(module, image, [LABEL])), **asked))


def test_nothing_to_attack_is_told() -> None:
    for options in ({}, {"before": "a"}, {"after": "a"}):
        assert "--before and --after" in refused(lambda o=options: gv.attack_update(model=network(), **o, **KNOWN))  # type: ignore[misc]


def test_a_delta_without_its_learning_rate_is_told(image: Tensor) -> None:
    module = network()
    delta = Update({n: -0.1 * g for n, g in gradient(module, image, [LABEL]).items()}, "delta")
    assert "--lr" in refused(lambda: gv.attack_update(delta, module, attacks=["rgap"], **KNOWN))


@pytest.mark.parametrize(
    "facts",
    [
        {"input_shape": "large"},
        {"input_shape": [1, 12]},
        {"input_shape": [1, 12, "x"]},
        {"input_shape": [1, 10**9, 10**9]},
        {"input_shape": 7},
        {"mean": "dark"},
        {"mean": [0.1, 0.2, 0.3]},
        {"std": [0.0]},
        {"num_classes": "four"},
        {"num_classes": 9},
        {"input_shape": [3, 12, 12]},
        {"input_shape": [1, 13, 40]},
    ],
)
def test_metadata_that_lies_is_told(facts: dict[str, Any], tmp_path: Path, image: Tensor) -> None:
    module = network()
    path = tmp_path / "u.safetensors"
    save_update(path, Update(gradient(module, image, [LABEL])), **{"input_shape": SHAPE, **facts})
    refused(lambda: gv.attack_update(path, module, attacks=["rgap"]))


@pytest.mark.parametrize("facts", [{"lr": "fast"}, {"lr": 0.1, "local_steps": "x"}])
def test_metadata_of_a_delta_that_lies_is_told(facts: dict[str, Any], tmp_path: Path, image: Tensor) -> None:
    module = network()
    path = tmp_path / "u.safetensors"
    save_update(path, Update(gradient(module, image, [LABEL]), "delta"), input_shape=SHAPE, **facts)
    refused(lambda: gv.attack_update(path, module, attacks=["ig:steps=1"]))


class Recurrent(nn.Module):
    """A part of it gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(144, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(torch.sigmoid(self.first(x.flatten(1)))[:, None])[0][:, 0])  # type: ignore[no-any-return]


def test_a_closed_form_that_does_not_know_a_part_leaves_it_to_the_others(image: Tensor) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Recurrent()
    sent = Update(gradient(module, image, [LABEL]))
    found = gv.attack_update(sent, module, attacks=["linear", "rgap"], **KNOWN)
    assert list(found.by_attack) == ["linear"] and "straight line" in found.not_applicable["rgap"]
    swift = gv.attack_update(sent, module, attacks=["swift:restarts=0,cycles=0,adam_steps=2"], budget="quick", **KNOWN)
    assert quality(swift, image) > 15 and not swift.not_applicable


def test_layers_without_weights_are_told(image: Tensor) -> None:
    module = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    with pytest.raises(UserError, match="call it on some images once"):
        gv.attack_update(Update({"1.weight": torch.zeros(4, 144)}), module, **KNOWN)
    module(image)
    assert gv.attack_update(Update(gradient(module, image, [LABEL])), module, attacks=["linear"], **KNOWN).by_attack
