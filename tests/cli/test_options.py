"""One field of a typed class is an option, a YAML key, a Python argument, a word of the printed command, and a term."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from gradveil import api
from gradveil.auditing.case import Case
from gradveil.auditing.spec import OUTSIDE_CASE, AuditSpec, UtilityTraining, make_spec, read_spec
from gradveil.cli import COMMANDS
from gradveil.cli.options import Given, parser_of, with_options
from gradveil.core.errors import UserError
from gradveil.core.options import Option
from gradveil.core.settings import settings


class Extended(AuditSpec):
    """An audit with one field more of each kind."""

    camera: int = Field(3, ge=1, description="Cameras that took the pictures.")
    colour: Annotated[Literal["grey", "rgb"], OUTSIDE_CASE] = "grey"
    lenses: Annotated[tuple[str, ...], Option("lens"), OUTSIDE_CASE] = Field((), description="Lenses; repeat.")
    flash: Annotated[bool, OUTSIDE_CASE] = Field(False, description="With a flash.")


def app_with(kind: object, taken: dict[str, Any] | None = None) -> typer.Typer:
    """A command whose only parameter has this type."""

    def command(spec: Any) -> int:
        (taken if taken is not None else {}).update(spec)
        return 0

    command.__annotations__["spec"] = kind
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_options(command))
    return app


def given(words: str, kind: type = Extended) -> dict[str, Any]:
    """What a command gets from these words for a class."""
    taken: dict[str, Any] = {}
    result = CliRunner().invoke(app_with(Given[kind], taken), words.split())  # type: ignore[valid-type]
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return taken


NEW = "--camera 5 --colour rgb --lens wide --lens long --flash"


def test_a_new_field_is_an_option_with_help_and_default() -> None:
    assert given(NEW) == {"camera": 5, "colour": "rgb", "lenses": ["wide", "long"], "flash": True}
    assert given("") == {}
    text = " ".join(CliRunner().invoke(app_with(Given[Extended]), ["--help"]).output.split())
    assert "--camera N Cameras that took the pictures. [3]" in text
    assert "--colour TEXT grey or rgb. [grey]" in text
    assert "--lens TEXT Lenses; repeat." in text and "--flash / --no-flash With a flash." in text


def test_a_new_field_is_a_key_in_yaml_and_options_replace_it(tmp_path: Path) -> None:
    file = tmp_path / "audit.yaml"
    file.write_text("camera: 7\nlenses: [wide]\n")
    spec = read_spec(file, Extended)
    assert isinstance(spec, Extended) and (spec.camera, spec.lenses) == (7, ("wide",))
    above = read_spec(file, Extended, **given("--camera 9"))
    assert isinstance(above, Extended) and (above.camera, above.lenses) == (9, ("wide",))
    with pytest.raises(UserError, match="camera=0: input should be greater than or equal to 1"):
        make_spec({"camera": 0}, Extended)
    with pytest.raises(UserError, match="did you mean 'camera'"):
        make_spec({"camerra": 3}, Extended)


def test_a_new_field_is_an_argument_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        pass

    def stop(spec: AuditSpec) -> Case:
        raise Seen(spec)

    monkeypatch.setattr(api, "make_spec", lambda values, _: make_spec(values, Extended))
    monkeypatch.setattr(api, "Case", stop)
    with pytest.raises(Seen) as seen:
        api.audit("mnist-5k", camera=4, flash=True)
    spec = seen.value.args[0]
    assert (spec.camera, spec.flash) == (4, True)


def test_a_new_field_is_printed_in_the_command_and_read_back() -> None:
    spec = make_spec(given(NEW), Extended)
    command = spec.command()
    assert command == f"gradveil audit {NEW}"
    assert make_spec(given(command.removeprefix("gradveil audit ")), Extended) == spec


def test_a_new_field_makes_another_case_unless_it_is_marked() -> None:
    spec = make_spec(given(NEW), Extended)
    assert set(spec.terms()) - set(AuditSpec().terms()) == {"camera"}
    assert spec.terms()["camera"] == 5


def test_the_terms_of_a_case() -> None:
    assert set(AuditSpec().terms()) == {
        *("data", "model", "num_classes", "victims", "batch_size", "local_steps", "local_lr"),
        *("weights", "mode", "local_epochs", "local_batch_size", "local_optimizer", "local_accumulate", "frozen"),
        "sends_statistics",
        *("trained_rounds", "trained_epochs", "updates", "knowledge", "budget", "seed"),
    }


# -- settings inside settings ------------------------------------------------------------------------------------------


def test_the_settings_of_the_utility_are_options_and_are_printed() -> None:
    values = given("--utility-rounds 30 --utility-lr 0.1 --utility-defended 2", AuditSpec)
    spec = make_spec(values)
    assert spec.utility == UtilityTraining(rounds=30, lr=0.1, defended=2)
    assert spec.command() == "gradveil audit --utility --utility-rounds 30 --utility-lr 0.1 --utility-defended 2"
    assert make_spec(given("--utility", AuditSpec)).utility == UtilityTraining()
    assert make_spec(given("--no-utility", AuditSpec)).utility is None
    assert make_spec({"utility": True}).command() == "gradveil audit --utility"
    with pytest.raises(UserError, match="--no-utility leaves nothing for --utility-lr to set"):
        given("--no-utility --utility-lr 0.1", AuditSpec)


def test_settings_of_the_utility_are_merged_with_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "audit.yaml"
    file.write_text("utility: {rounds: 30, lr: 0.1}\n")
    for words, utility in {
        "": UtilityTraining(rounds=30, lr=0.1),
        "--utility": UtilityTraining(rounds=30, lr=0.1),
        "--utility-lr 0.2": UtilityTraining(rounds=30, lr=0.2),
        "--no-utility": None,
    }.items():
        assert read_spec(file, **given(words, AuditSpec)).utility == utility, words


# -- every kind of field -----------------------------------------------------------------------------------------------


@settings
class Kinds:
    shape: tuple[int, int, int] | None = Field(default=None, description="Sizes.")
    mean: tuple[float, ...] | None = Field(default=None, description="Numbers.")
    file: Path = Field(default=Path("runs/x"), description="A file.")
    count: int | Literal["all"] = Field(default="all", description="How many.")


def test_numbers_stand_in_one_option() -> None:
    values = given("--shape 1,28,28 --mean 0.5,1 --file a.txt --count 3", Kinds)
    assert values == {"shape": [1, 28, 28], "mean": [0.5, 1], "file": Path("a.txt"), "count": "3"}
    assert given("--shape 3x32x32", Kinds) == {"shape": [3, 32, 32]}
    with pytest.raises(UserError, match="--shape 1,b: write numbers"):
        given("--shape 1,b", Kinds)


def test_a_class_is_checked_before_the_command_runs() -> None:
    taken: dict[str, Any] = {}
    result = CliRunner().invoke(app_with(Kinds, taken), ["--count", "many"])
    assert isinstance(result.exception, UserError) and "count" in str(result.exception) and taken == {}


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_tells_every_option(gradveil, name, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = gradveil(name, "--help")
    assert code == 0 and err == ""
    assert "\\" not in out
    assert max(len(line) for line in out.splitlines()) <= 80
    module = __import__(f"gradveil.cli.{name}", fromlist=["command"])
    for parameter in parser_of(module.command).params:
        assert getattr(parameter, "help", ""), f"{parameter.name} has no help"
        listed = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []
        assert all(option in out for option in listed)


def test_defaults_stand_in_brackets(gradveil) -> None:
    for name, lines in {
        "audit": ["--victims N Private batches that are attacked. [8]", "--seed N Seed of all randomness. [0]"],
        "train": ["--rounds N Rounds of training. [20]", "--engine TEXT inline (this process), flower (simulation). [inline]"],
        "attack": ["--attack TEXT Repeat for several. [linear, rgap, swift]"],
        "search": ["--candidates N Random policies to score. [100]"],
        "tune": ["--utility / --no-utility Train under the settings that hold, to see their cost. [on] --utility-model"],
    }.items():
        out = " ".join(gradveil(name, "--help")[1].split())
        for line in lines:
            assert line in out


def test_help_of_the_root_needs_no_torch() -> None:
    code = "import sys; from gradveil.cli import main; main(['--help']); assert not {'torch', 'pydantic'} & set(sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(name in shown for name in COMMANDS)


def test_a_command_keeps_its_docstring_and_takes_few_parameters() -> None:
    from gradveil.cli.audit import command

    assert with_options(command).__doc__ == command.__doc__
    assert len(inspect.signature(command).parameters) == 8
    assert {"victims", "utility_rounds", "out", "fail_if", "quiet"} <= set(inspect.signature(with_options(command)).parameters)


def test_an_encoding_without_our_characters_will_do() -> None:
    command = [sys.executable, "-m", "gradveil", "list", "defenses"]
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}  # as where Windows writes to a file
    done = subprocess.run(command, check=False, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert b"gaussian" in done.stdout and b"?" in done.stdout
