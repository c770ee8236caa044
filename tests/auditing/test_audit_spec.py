"""The terms of an audit: defaults, files, and one line for whatever does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from gradveil.auditing.spec import make_spec, read_spec
from gradveil.core.errors import UserError
from gradveil.defenses import parse
from gradveil.defenses.base import Defense


def test_two_methods_of_one_name_are_refused_and_none_is_left_out():
    class Mine(Defense):
        """A defense of a user, which calls itself what it likes."""

        def __init__(self, spec: str):
            self.text = spec

        @property
        def spec(self) -> str:
            return self.text

    assert len(make_spec({"defenses": [mine := Mine("a"), mine, Mine("b")]}).defenses) == 3
    for wrong in ([Mine("none")], [Mine("prune"), "prune"], [Mine("a"), Mine("a")]):
        with pytest.raises(UserError, match="two different methods are written"):
            make_spec({"defenses": wrong})


def test_the_control_comes_first_and_no_method_twice_however_it_is_written():
    spec = make_spec({"defenses": ["prune:ratio=0.9", "prune", "none", " gaussian:std=1.0 "]})
    assert spec.defenses == ("none", "prune:ratio=0.9", "gaussian:std=1.0")


def test_without_defenses_there_is_a_first_picture_of_registered_ones():
    defenses = make_spec({}).defenses
    assert defenses[0] == "none"
    assert {"gaussian:std=1.0", "prune:ratio=0.9"} <= set(defenses)
    for defense in defenses:
        parse(defense)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"victims": 0}, "victims=0"),
        ({"victims": "many"}, "victims='many'"),
        ({"knowledge": "all"}, "knowledge='all'"),
        ({"budget": "huge"}, "budget='huge'"),
        ({"seed": -1}, "seed=-1"),
        ({"trained_rounds": 1, "trained_epochs": 1}, "not both"),
        ({"victim": 3}, "did you mean 'victims'"),
        ({"defenses": ["gausian"]}, "did you mean 'gaussian'"),
        ({"defenses": ["gaussian:std=-1"]}, "std='-1'"),
        ({"defenses": [3]}, "3 is no method"),
        ({"attacks": ["igg"]}, "did you mean 'ig'"),
        ({"attacks": ["ig:stepps=3"]}, "no setting 'stepps'"),
        ({"utility": {"round": 3}}, "utility.round"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(values, says):
    with pytest.raises(UserError) as error:
        make_spec(values)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_is_read_back_as_it_was_written_and_options_go_before_it(tmp_path):
    spec = make_spec({"defenses": ["clip+prune:ratio=0.7"], "attacks": "ig:steps=3", "utility": True, "victims": 2})
    file = tmp_path / "audit.yaml"
    file.write_text(yaml.safe_dump(spec.plain()))
    assert read_spec(file) == spec
    assert read_spec(file, victims=5).victims == 5
    assert read_spec(file, victims=5).attacks == ("ig:steps=3",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("victims: [", "not YAML"),
        ("- victims", "key: value"),
        ("victimz: 3", "did you mean 'victims'"),
        ("data: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, text, says):
    file = tmp_path / "audit.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        read_spec(file)
    assert says in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_spec(tmp_path / "none.yaml")


def test_the_command_says_what_differs_from_the_defaults():
    assert make_spec({}).command() == "gradveil audit"
    spec = make_spec({"data": "my set.npz", "defenses": ["clip"], "batch_size": 4, "num_classes": 3, "utility": True})
    assert spec.command() == (
        "gradveil audit --data 'my set.npz' --defense none --defense clip --batch-size 4 --classes 3 --utility"
    )


def test_only_public_sets_are_shown_unasked(tmp_path: Path) -> None:
    assert make_spec({"data": "mnist-5k"}).picture_mode == "shown"
    assert make_spec({"data": "mnist-5k:size=14"}).picture_mode == "shown"
    assert make_spec({"data": "mnist-5k", "pictures": "blurred"}).picture_mode == "blurred"
    for private in (tmp_path / "mnist-5k", str(tmp_path / "cifar10"), (torch.rand(4, 1, 6, 6), torch.arange(4)), "mine:data"):
        assert make_spec({"data": private}).picture_mode == "none"
