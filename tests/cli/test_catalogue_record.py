"""catalogue.json is what the registries, recipes and commands say; what reads it needs no torch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import record_catalogue
import typer

from gradveil.cli import COMMANDS, loading
from gradveil.cli.catalogue import KINDS, catalogue
from gradveil.cli.described import described_parser
from gradveil.cli.options import parser_of

REMEDY = "run `python tests/record_catalogue.py` and commit src/gradveil/cli/catalogue.json"


@pytest.fixture(scope="module")
def recorded():
    return record_catalogue.current()


@pytest.mark.parametrize("part", ["methods", "data", "presets", "recipes", "commands"])
def test_the_record_is_what_the_project_says(recorded, part: str) -> None:
    assert getattr(catalogue(), part) == getattr(recorded, part), REMEDY


@pytest.mark.parametrize("name", COMMANDS)
def test_help_from_the_record_is_that_of_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = importlib.import_module(f"gradveil.cli.{name}").command
    texts = [parser.get_help(typer.Context(parser, info_name=name)) for parser in (parser_of(command), described_parser(name))]
    assert texts[0] == texts[1], REMEDY
    assert max(map(len, texts[0].splitlines())) <= 80 and "\\" not in texts[0]


def test_every_setting_of_every_method_has_a_meaning() -> None:
    settings = [(card.name, s.name, s.meaning) for card in catalogue().methods for s in card.settings]
    assert len(settings) > 100 and not [s for s in settings if not s[2]]


def test_the_parts_of_args_are_read() -> None:
    text = "Args:\n    a, b: two settings,\n        on two lines: with a colon.\n    c: a third one.\n\nExample:\n    >>> x\n"
    assert record_catalogue.meanings(text) == {
        "a": "two settings, on two lines: with a colon.",
        "b": "two settings, on two lines: with a colon.",
        "c": "a third one.",
    }
    short = record_catalogue.meanings("Args: a (1 by default), b as for `x`; c: one; or two.")
    assert short == {"a": "as for `x`", "b": "as for `x`", "c": "one; or two."}


def torch_free(code: str, **environment: str) -> str:
    """What a new process prints, which must end without torch."""
    check = f"import sys\ntry:\n    {code}\nfinally:\n    assert not {{'torch', 'numpy', 'scipy'}} & set(sys.modules)"
    values = {**os.environ, **environment, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", check], env=values, capture_output=True, text=True, timeout=120, check=False)
    assert "Error" not in done.stderr, done.stderr
    return done.stdout


def test_help_lists_and_cards_load_no_torch() -> None:
    words = [["--help"], ["--version"], ["list"], ["reproduce", "--list"], ["show", "prune"], ["show", "ig"], ["show", "lenet"]]
    words += [["list", kind] for kind in KINDS] + [[name, "--help"] for name in COMMANDS]
    out = torch_free(f"from gradveil.cli import main; assert not any([main(words) for words in {words}])")
    assert "ratio: float = 0.9" in out and "--defense TEXT" in out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("au", "audit"),
        ("audit --def", "--defense"),
        ("audit --defense pr", "precode\nprune"),
        ("show lene", "lenet\nlenet4"),
        ("list de", "defenses"),
        ("reproduce loda/table1", "loda/table1"),
    ],
)
def test_completion_loads_no_torch(typed: str, offered: str) -> None:
    words = f"gradveil {typed}"
    position = str(len(words.split()) - 1)
    code = "from gradveil.cli import main; sys.argv = ['gradveil']; main()"
    out = torch_free(code, _GRADVEIL_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    assert out.split() == offered.split()


def test_help_in_the_place_of_a_value_is_told(gradveil) -> None:
    code, _, err = gradveil("audit", "--out", "--help")
    assert code == 2 and err == "gradveil: --help stands where audit expects a value; give the value first.\n"


def test_a_line_is_shown_while_a_command_is_loaded(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with loading("audit"):
        assert capsys.readouterr().err == "gradveil audit: loading PyTorch …\n", "the first line of a log"
    for words in ({"name": "certify"}, {"name": "audit", "quiet": True}):
        with loading(**words):
            pass
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading("audit", quiet=True):
        pass
    assert capsys.readouterr().err == ""
    with loading("certify"):
        shown = capsys.readouterr().err
        assert shown.startswith("gradveil certify: loading") and "\n" not in shown
    assert capsys.readouterr().err == f"\r{' ' * len(shown)}\r"


def test_the_log_of_an_audit_begins_before_torch_is_loaded(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gradveil.cli import main; main(['audit', '--plan'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (7, "gradveil audit: loading PyTorch …\n")
