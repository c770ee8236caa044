"""`gradveil report`: the same pictures as the audit's own page, names for the first page, the PDF, and the check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradveil as gv
from gradveil import cli
from gradveil.report import pdf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on private data: tensors that no public set has."""
    x, y = torch.rand(40, 1, 6, 6), torch.arange(40) % 2
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    out = tmp_path_factory.mktemp("report") / "run"
    gv.audit((x, y), model, ["prune:ratio=0.5"], ["linear"], victims=2, out=out, quiet=True)
    return out


def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_private_images_are_in_no_page_unless_asked_for(folder: Path) -> None:
    audited = page(folder)
    assert "data:image" not in audited and 'content="pictures=none' in audited
    assert cli.main(["report", str(folder), "--quiet"]) == 0
    assert page(folder) == audited, "the same choice as the audit's own page"
    assert cli.main(["report", str(folder), "--pictures", "shown", "--quiet"]) == 0
    assert "data:image" in page(folder), "the run has them"
    assert cli.main(["report", str(folder), "--quiet"]) == 0 and page(folder) == audited


def test_public_images_are_shown_by_both(tmp_path: Path) -> None:
    run = tmp_path / "run"
    audit = ["audit", "--model", "smlp", "--attack", "linear", "--defense", "none", "--victims", "2", "--workers", "0"]
    assert cli.main([*audit, "--out", str(run), "--quiet"]) == 0
    audited = page(run)
    assert 'content="pictures=shown' in audited
    assert cli.main(["report", str(run), "--quiet"]) == 0 and page(run) == audited
    blurred = tmp_path / "blurred"
    assert cli.main([*audit, "--pictures", "blurred", "--out", str(blurred), "--quiet"]) == 0
    assert cli.main(["report", str(blurred), "--quiet"]) == 0 and 'content="pictures=blurred' in page(blurred)


def test_names_come_from_options_and_a_file_and_are_kept(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "about.yaml"
    file.write_text("organisation: City Hospital\nsystem: Screening\nsystem_version: '2.1'\n")
    assert cli.main(["report", str(folder), "--about", str(file), "--auditor", "A. Lee", "--system", "X-rays", "--quiet"]) == 0
    assert cli.main(["report", str(folder), "--quiet"]) == 0
    for name in ("City Hospital", "A. Lee", "X-rays", "2.1"):
        assert f"<dd>{name}</dd>" in page(folder)
    assert "Do the model updates of X-rays give away" in page(folder) and "Screening" not in page(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "a mapping is needed"),
        ("colour: red", "no other keys than organisation, auditor, system, system_version"),
        ("system_version: 2.1", "system_version=2.1: input should be a valid string"),
        (f"auditor: {'x' * 81}", "at most 80 characters"),
        ('auditor: "a\\nb"', "one line without control characters"),
        ("auditor: ''", "at least 1 character"),
        ("x" * 20_000, "about.yaml"),
        ("a: &a [*a]", "about.yaml"),
    ],
)
def test_a_wrong_file_of_names_is_one_line_and_changes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    file, before = tmp_path / "about.yaml", page(folder)
    file.write_text(text)
    assert cli.main(["report", str(folder), "--about", str(file)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and page(folder) == before


def test_the_check_is_one_line_with_an_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder), "--quiet"]) == 0
    assert cli.main(["report", str(folder), "--verify"]) == 0
    assert capsys.readouterr().out.startswith("Page and run agree. SHA-256 of the evidence: ")
    file = folder / "report.html"
    file.write_text(page(folder).replace("leaks", "keeps"), encoding="utf-8")
    assert cli.main(["report", str(folder), "--verify"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("gradveil: page and run do not agree: ") and said.err.count("\n") == 1
    file.unlink()
    assert cli.main(["report", str(folder), "--verify"]) == 2
    assert "there is no" in capsys.readouterr().err
    assert cli.main(["report", str(folder), "--quiet"]) == 0


def test_without_a_browser_the_page_is_written_and_one_line_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf, "find_browser", lambda: None)
    (folder / "report.html").unlink()
    assert cli.main(["report", str(folder), "--pdf", "--quiet"]) == 0
    error = capsys.readouterr().err
    assert "no PDF was written" in error and "ready for print (A4)" in error and error.count("\n") == 1
    assert page(folder) and not (folder / "report.pdf").exists()


def test_a_file_needs_the_option(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder), str(tmp_path / "a.pdf")]) == 2
    assert "only with --pdf" in capsys.readouterr().err


@pytest.mark.skipif(pdf.find_browser() is None, reason="needs Chromium (Debian: apt install chromium)")
def test_a_pdf_is_printed_where_it_was_asked_for(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.pdf"
    assert cli.main(["report", str(folder), "--pdf", str(file)]) == 0
    assert file.read_bytes().startswith(b"%PDF-") and f"PDF: {file}" in capsys.readouterr().out
