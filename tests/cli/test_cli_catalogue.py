"""`gradveil list`, `show` and the root command."""

from __future__ import annotations

import pytest

from gradveil.attacks import registry as attacks
from gradveil.defenses import registry as defenses


@pytest.mark.parametrize(("kind", "registry"), [("attacks", attacks), ("defenses", defenses)])
def test_every_method_is_listed_with_a_line(gradveil, kind, registry):
    code, out, _ = gradveil("list", kind)
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and list(lines) == registry.names()


def test_models_and_data_are_listed(gradveil):
    assert "lenet " in gradveil("list", "models")[1]
    assert "mnist-5k " in gradveil("list", "data")[1]
    assert gradveil("list", "recipes")[0] == 0


@pytest.mark.parametrize("name", [*defenses.names(), *attacks.names(), "lenet", "mnist-5k"])
def test_every_method_has_a_card(gradveil, name):
    code, out, _ = gradveil("show", name)
    assert code == 0 and out.startswith(f"{name} (")


def test_a_card_names_settings_with_their_defaults_and_counters(gradveil):
    out = gradveil("show", "gaussian")[1]
    assert "std: float = 0.01" in out and "countered by: noise-likelihood" in out and "stage: update" in out
    assert "countered by: no attack of this project" in gradveil("show", "quantize")[1]
    assert "built against: gaussian, laplace, dpsgd, graddefense" in gradveil("show", "noise-likelihood")[1]


@pytest.mark.parametrize("words", [("list", "attack"), ("show", "gausian"), ("lisst",), ("show",), ("--nothing",)])
def test_slips_are_one_line(gradveil, words):
    code, out, err = gradveil(*words)
    assert code == 2 and out == "" and err.startswith("gradveil: ") and err.count("\n") == 1


def test_version_and_help(gradveil):
    assert gradveil("--version") == (0, "gradveil 0.2.0\n", "")
    for words in ((), ("--help",)):
        code, out, err = gradveil(*words)
        assert code == 0 and err == "" and "audit" in out
