"""`gradveil attack`: the images behind an update from elsewhere, or one line that says why not."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest
import torch
from captured_update import FACTORY, LABEL, MEAN, SHAPE, STD, gradient, network, refused
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradveil as gv
from gradveil.auditing.captured import Rebuilt
from gradveil.cli import main
from gradveil.core.observation import Reconstruction
from gradveil.metrics import psnr


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: Tensor) -> Path:
    """A folder with the user's model and an update of it; the command runs there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "captured_network.py").write_text(FACTORY)
    save_file(gradient(network(), image, [LABEL]), tmp_path / "u.safetensors")
    return tmp_path


COMMAND = ["attack", "u.safetensors", "--model", "captured_network:network", "--classes", "4", "--attack", "rgap"]
SPACE = ["--input-shape", "1,12,12", "--mean", str(MEAN), "--std", str(STD)]


def test_the_command_rebuilds(elsewhere: Path, image: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *SPACE, "--out", "rebuilt"]) == 0
    out = capsys.readouterr().out
    assert "Best fit: rgap" in out
    assert "This update was made from something very like this picture: its update explains 100%" in " ".join(out.split())
    assert out.rstrip().endswith("rebuilt/rgap.png") and max(map(len, out.splitlines())) <= 100
    assert f"labels {LABEL}" in out
    found = load_file(elsewhere / "rebuilt" / "rgap.safetensors")["images"]
    assert float(psnr(image, found).min()) >= 30
    assert (elsewhere / "rebuilt" / "rgap.png").is_file()
    assert main([*COMMAND, *SPACE, "--out", "again", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_says_where_nothing_was_recovered(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(p.shape, generator=rng) for name, p in network().named_parameters()}
    save_file(noise, elsewhere / "u.safetensors")
    assert main([*COMMAND[:-1], "ig:steps=20", *SPACE, "--labels", str(LABEL), "--out", "rebuilt"]) == 0
    verdict = json.loads((elsewhere / "rebuilt" / "attack.json").read_text())["verdict"]
    assert verdict in " ".join(capsys.readouterr().out.split())
    assert verdict.startswith("Nothing was recovered") and "That is no protection" in verdict


@pytest.mark.parametrize(
    ("fit", "images", "verdict"),
    [
        (1e-5, 1, "This update was made from something very like this picture: its update explains 100% "),
        (1e-5, 3, "This update was made from something very like these 3 pictures: their update explains 100% "),
        (0.2, 1, "This update may have been made from something like this picture: its update explains 80% "),
        (0.9, 1, "Nothing was recovered: the best pictures' update explains only 10% "),
        (math.inf, 1, "Nothing can be told: "),
    ],
)
def test_the_verdict_says_how_much_of_the_update_the_best_pictures_explain(fit: float, images: int, verdict: str) -> None:
    answers = {name: Reconstruction(torch.zeros(images, 1, 2, 2), None, 0.0) for name in "ab"}
    rebuilt = Rebuilt(answers, fit={"a": math.inf, "b": fit})
    assert rebuilt.verdict.startswith(verdict)


@pytest.mark.parametrize(
    "words",
    [
        [*COMMAND],  # no shape
        [*COMMAND, "--input-shape", "1,12"],
        [*COMMAND, "--input-shape", "one,12,12"],
        [*COMMAND, *SPACE, "--knowledge", "everything"],
        [*COMMAND, *SPACE, "--budget", "huge"],
        [*COMMAND, *SPACE, "--attack", "rgpa"],
        [*COMMAND, *SPACE, "--labels", "9"],
        ["attack", "absent.safetensors", *COMMAND[2:], *SPACE],
        ["attack", "captured_network.py", *COMMAND[2:], *SPACE],
        [*COMMAND[:3], "captured_network:absent", *SPACE, "--classes", "4"],
        [*COMMAND[:3], "captured_network:network", *SPACE, "--classes", "5"],
        ["attack", *COMMAND[2:], *SPACE],  # nothing to attack
        ["attack", "u.safetensors", *SPACE],  # no model
    ],
)
def test_the_command_refuses_with_one_line_and_leaves_nothing(
    words: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p.name for p in elsewhere.iterdir()} | {"__pycache__"}
    assert main([*words, "--out", "rebuilt"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("gradveil: ")
    assert told.err.count("\n") == 1
    assert {p.name for p in elsewhere.iterdir()} <= before


def test_the_command_takes_two_checkpoints(elsewhere: Path, image: Tensor) -> None:
    module = network()
    save_file(module.state_dict(), elsewhere / "before.safetensors")
    step = gradient(module, image, [LABEL])
    moved = {n: t - 0.1 * step[n] for n, t in module.state_dict().items()}
    save_file(moved, elsewhere / "after.safetensors")
    files = ["--before", "before.safetensors", "--after", "after.safetensors", "--lr", "0.1"]
    assert main(["attack", *COMMAND[2:], *SPACE, *files, "--out", "rebuilt", "--quiet"]) == 0
    found = load_file(elsewhere / "rebuilt" / "rgap.safetensors")["images"]
    assert float(psnr(image, found).min()) >= 30


HOSTILE: dict[str, dict[str, str]] = {
    "forty million classes": {"num_classes": "40000000"},
    "a text": {"num_classes": '"10"'},
    "a float": {"num_classes": "10.0"},
    "negative classes": {"num_classes": "-5"},
    "a list": {"num_classes": "[10]"},
    "a truth value": {"num_classes": "true"},
    "thousands of digits": {"num_classes": "1" * 5000},
    "5,000 digits of examples": {"examples": "9" * 5000},
    "examples in other digits": {"examples": "\u0665"},
    "nested": {"num_classes": "[" * 100_000},
    "nested mappings": {"mean": '{"a":' * 100_000},
    "a mean of 401 digits": {"mean": f"[1{'0' * 400}]"},
    "an infinite mean": {"mean": "[1e400]"},
    "no mean": {"mean": "[NaN]"},
    "a mean of truth values": {"mean": "[true]"},
    "a mean per pixel": {"mean": "[" + "0.5," * 20_000 + "0.5]"},
    "a tiny deviation": {"std": "[1e-300]"},
    "a truth value as channels": {"input_shape": "[true, 28, 28]"},
    "large images": {"input_shape": "[64, 1024, 1024]"},
    "images that fill memory": {"input_shape": "[64, 100000, 100000]"},
    "many large images": {"input_shape": "[1, 1024, 1024]", "examples": "4000"},
    "no learning rate": {"kind": "delta", "lr": '"0.1"'},
    "many steps": {"kind": "delta", "lr": "0.1", "local_steps": "1000000000"},
    "many facts": {f"fact {i}": "1" for i in range(1000)},
}


@pytest.mark.parametrize("model", ["lenet", "smlp", "network"])
@pytest.mark.parametrize("case", HOSTILE)
def test_metadata_is_checked_before_memory_is_taken(case: str, model: str, tmp_path: Path, image: Tensor) -> None:
    """A model with a name is built from the numbers of the file, so its size is compared with the file's first."""
    metadata = {"input_shape": json.dumps(SHAPE), "num_classes": "4", **HOSTILE[case]}
    save_file(gradient(network(), image, [LABEL]), tmp_path / "u.safetensors", metadata=metadata)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chosen = network() if model == "network" else model
    refused(lambda: gv.attack_update(tmp_path / "u.safetensors", chosen, attacks=["rgap"]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes


def test_normalisation_is_given_by_channel(elsewhere: Path) -> None:
    assert main([*COMMAND, "--input-shape", "1,12,12", "--mean", "0.5,0.4", "--std", "0.2"]) == 2
    assert main([*COMMAND, "--input-shape", "1x12x12", "--mean", "0.5", "--std", "0.25", "--quiet"]) == 0
