"""`gradveil list`, `show` and the root command."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.attacks import registry as attacks
from gradveil.defenses import registry as defenses
from gradveil.recipes.recipe import all_names

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "stored"


@pytest.mark.parametrize(("kind", "registry"), [("attacks", attacks), ("defenses", defenses)])
def test_every_method_is_listed_with_a_line(gradveil, kind, registry):
    code, out, _ = gradveil("list", kind)
    heads = [line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(" ")]
    assert code == 0 and [name for name, _ in heads] == registry.names()


def test_models_and_data_are_listed(gradveil):
    assert "lenet " in gradveil("list", "models")[1]
    assert "mnist-5k " in gradveil("list", "data")[1]
    assert gradveil("list", "recipes")[0] == 0


def test_a_defense_is_listed_with_stage_paper_counter_and_strength(gradveil):
    out = " ".join(gradveil("list", "defenses")[1].split())
    assert "update stage; Zhu et al. 2019; countered by prune-mask; made stronger by ratio" in out
    assert "model stage; Scheliga, Mäder, Seeland, WACV 2022; countered by precode-ignore, precode-latent" in out


def test_a_recipe_is_listed_with_its_time_and_data(gradveil):
    out = gradveil("list", "recipes")[1]
    assert "minutes; data: cifar10" in out
    stored = {str(file.relative_to(RESULTS).with_suffix("")) for file in RESULTS.rglob("*.json")}
    assert out.count("time not measured") == len(set(all_names()) - stored)
    assert gradveil("reproduce", "--list")[1] == out


def test_data_without_a_folder_is_marked(gradveil, monkeypatch, tmp_path):
    (tmp_path / "fashion_mnist").mkdir()
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    here = gradveil("list", "data")[1]
    monkeypatch.delenv("GRADVEIL_DATA")
    nowhere = gradveil("list", "data")[1]
    assert (here.count("files not here"), nowhere.count("files not here")) == (8, 9), "mnist-5k is built in"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lists_and_cards_fit_the_terminal_and_break_no_name(gradveil, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", "1000")
    whole = [gradveil("list")[1], *(gradveil("show", name)[1] for name in ("dcs2", "svt", "loda"))]
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = [gradveil("list")[1], *(gradveil("show", name)[1] for name in ("dcs2", "svt", "loda"))]
    assert [text.split() for text in whole] == [text.split() for text in narrow]
    lines = [line for text in narrow for line in text.splitlines() if "gv.protect" not in line and "gradveil audit" not in line]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("name", [*defenses.names(), *attacks.names(), "lenet", "mnist-5k"])
def test_every_method_has_a_card(gradveil, name):
    code, out, _ = gradveil("show", name)
    assert code == 0 and out.startswith(f"{name} (")


def test_a_card_names_settings_with_their_defaults_and_counters(gradveil):
    out = gradveil("show", "gaussian")[1]
    assert "std: float = 0.01" in out and "standard deviation, in units of the update." in out
    assert "countered by: noise-likelihood" in out and "stage: update" in out
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
