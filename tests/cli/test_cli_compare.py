"""`gradveil compare`, and what `gradveil audit` writes for a build server."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

QUICK = ("--attack", "ig:steps=3", "--defense", "clip", "--workers", "0", "--quiet")


@pytest.fixture
def audits(gradveil, archive, tmp_path):
    """Three small runs: two seeds, and one with other batches."""
    for name, options in {"a": (), "b": ("--seed", "1"), "c": ("--batch-size", "2")}.items():
        code, *_ = gradveil("audit", "--data", archive, "--victims", "3", *QUICK, "--out", str(tmp_path / name), *options)
        assert code == 0
    return tmp_path


def test_table_and_page(gradveil, audits):
    a, b, page = (str(audits / n) for n in ("a", "b", "page.html"))
    code, out, err = gradveil("compare", a, b, "--out", page)
    assert (code, err) == (0, "")
    out = " ".join(out.split())
    assert "clip" in out and "two groups" in out and "differ in seed: 0 and 1" in out and "Page: " in out
    assert "<h1>What changed" in (audits / "page.html").read_text()
    code, out, _ = gradveil("compare", a, a, "--all")
    assert code == 0 and "ig:steps=3" in out and "the same" in out and "each with itself" in " ".join(out.split())
    assert gradveil("compare", a, b, "--quiet") == (0, "", "")


def test_two_defenses_of_one_run(gradveil, audits):
    run = str(audits / "a")
    code, out, err = gradveil("compare", run, "--defense", "none", "--defense", "clip", "--all")
    assert (code, err) == (0, "") and "none → clip: " in out and "ig:steps=3" in out
    code, out, err = gradveil("compare", run, "--defense", "clip")
    assert code == 2 and out == "" and err.count("\n") == 1 and "it has none and clip" in err


def test_other_cases_are_one_line_that_names_the_terms(gradveil, audits):
    code, out, err = gradveil("compare", str(audits / "a"), str(audits / "c"))
    assert code == 2 and out == "" and err.count("\n") == 1 and "batch_size (1 and 2)" in err
    assert gradveil("compare", str(audits / "a"), str(audits / "c"), "--across", "batch_size")[0] == 0
    code, _, err = gradveil("compare", str(audits / "a"), str(audits))
    assert code == 2 and "no summary.json" in err and err.count("\n") == 1


def test_junit_and_annotations_agree_with_the_exit_code(gradveil, archive, tmp_path):
    words = ("audit", "--data", archive, "--victims", "2", *QUICK, "--out", str(tmp_path / "run"))
    gates = ("--fail-if", "worst.psnr.max > 200", "--fail-if", 'worst.psnr.max > 0 and spec != "none"')
    code, out, err = gradveil(*words, *gates, "--junit", str(tmp_path / "junit.xml"), "--annotations", "github")
    root = ET.parse(tmp_path / "junit.xml").getroot()
    assert code == 1 and root.get("failures") == "1" and "holds for clip" in err
    failing = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert [(c.get("classname"), c.get("name")) for c in failing] == [
        ("gradveil.clip", 'not: worst.psnr.max > 0 and spec != "none"')
    ]
    assert [line for line in out.splitlines() if line.startswith("::error")] and out.count("::error") == 1
    code, out, err = gradveil(*words, "--fail-if", "worst.psnr.max > 200", "--junit", str(tmp_path / "junit.xml"))
    root = ET.parse(tmp_path / "junit.xml").getroot()
    assert code == 3 and out == "" and root.get("failures") == "0" and root.get("errors") == "2"


@pytest.mark.parametrize(("option", "value", "says"), [("--annotations", "gitlab", "github"), ("--junit", ".", "folder")])
def test_slips_show_before_the_audit(gradveil, archive, tmp_path, monkeypatch, option, value, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = gradveil("audit", "--data", archive, *QUICK, "--out", "run", option, value)
    assert code == 2 and out == "" and err.count("\n") == 1 and says in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_user_is_refused_before_the_audit(gradveil, archive, tmp_path):
    file = tmp_path / "junit.xml"
    file.write_text("notes")
    code, out, err = gradveil("audit", "--data", archive, *QUICK, "--out", str(tmp_path / "run"), "--junit", str(file))
    assert code == 2 and out == "" and err.count("\n") == 1 and "gradveil did not write it" in err
    assert file.read_text() == "notes" and list(tmp_path.iterdir()) == [file]


def test_list_without_a_kind_is_a_map_of_everything(gradveil):
    code, out, _ = gradveil("list")
    heads = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert code == 0 and heads == ["attacks", "defenses", "models", "data", "presets", "recipes"]
    assert "  precode" in out and "  mnist-5k" in out


@pytest.mark.parametrize(("words", "wanted"), [("gradveil comp", "compare"), ("gradveil audit --juni", "--junit")])
def test_the_shell_completes_commands_and_options(gradveil, monkeypatch, capfd, words, wanted):
    monkeypatch.setenv("_GRADVEIL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as done:
        gradveil()
    assert done.value.code == 0 and capfd.readouterr().out == f"{wanted}\n"
