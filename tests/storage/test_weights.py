"""A user's weights: what a trainer saved is read, anything else is refused in one line."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.core.errors import UserError
from gradveil.storage import weights
from gradveil.storage.weights import load_weights


def network(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width * 36, 3))


@pytest.mark.parametrize("inside", [None, "state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_what_a_trainer_saved_is_loaded(tmp_path: Path, inside: str | None, prefix: str) -> None:
    source, target = network(), network()
    state = OrderedDict((prefix + name, t) for name, t in source.state_dict().items())
    torch.save({inside: state, "epoch": 3} if inside else state, tmp_path / "net.pt")
    load_weights(target, tmp_path / "net.pt")
    assert all(torch.equal(t, target.state_dict()[n]) for n, t in source.state_dict().items())


def test_a_safetensors_file_is_loaded(tmp_path: Path) -> None:
    source, target = network(), network()
    save_file(source.state_dict(), tmp_path / "net.safetensors")
    load_weights(target, tmp_path / "net.safetensors")
    assert all(torch.equal(t, target.state_dict()[n]) for n, t in source.state_dict().items())


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("harmed"),)  # type: ignore[return-value]


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Harmful()}, tmp_path / "net.pt")
    with pytest.raises(UserError, match="no checkpoint of tensors alone") as refused:
        load_weights(network(), tmp_path / "net.pt")
    assert not (tmp_path / "harmed").exists() and "\n" not in str(refused.value)


def test_other_networks_are_named(tmp_path: Path) -> None:
    torch.save(network(5).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(UserError, match="'0.weight' is 5×1×3×3, the model's is 4×1×3×3"):
        load_weights(network(), tmp_path / "wide.pt")
    torch.save({n: t for n, t in network().state_dict().items() if n != "3.bias"}, tmp_path / "short.pt")
    with pytest.raises(UserError, match="has no '3.bias'"):
        load_weights(network(), tmp_path / "short.pt")
    torch.save({**network().state_dict(), "4.bias": torch.zeros(3)}, tmp_path / "long.pt")
    with pytest.raises(UserError, match="has '4.bias', which the model lacks"):
        load_weights(network(), tmp_path / "long.pt")


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    (tmp_path / "text.pt").write_text("weights")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 22))
    monkeypatch.setattr(weights, "MAX_BYTES", 1 << 20)
    broken = network().state_dict()
    broken["3.bias"][0] = torch.nan
    torch.save(broken, tmp_path / "broken.pt")
    for name in ("list.pt", "numbers.pt", "text.pt", "bomb.pt", "broken.pt", "nowhere.pt"):
        with pytest.raises(UserError) as refused:
            load_weights(network(), tmp_path / name)
        assert "\n" not in str(refused.value)
        assert name != "bomb.pt" or "when unpacked" in str(refused.value)
