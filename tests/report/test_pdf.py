"""The printed report: one sheet that answers everything, printed by a browser that is ended in any case."""

from __future__ import annotations

import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_browser import ask

from gradveil.core.errors import UserError
from gradveil.report import browser, pdf, write_report
from gradveil.report.about import MAX_NAME, About

Run = Callable[..., Path]
needs_browser = pytest.mark.skipif(browser.find_browser() is None, reason="needs Chromium (Debian: apt install chromium)")
LONG = "prune:ratio=0.9,scope=global+gaussian:std=0.001"
SHEET = (186, 279)  # millimetres inside the margins of the first page


@needs_browser
def test_the_first_printed_page_answers_every_question(run: Run, tmp_path: Path) -> None:
    if shutil.which("pdftotext") is None:
        pytest.skip("needs pdftotext (Debian: apt install poppler-utils)")
    file = tmp_path / "report.pdf"
    assert pdf.write_pdf(write_report(run()), file) is None
    done = subprocess.run(["pdftotext", "-l", "1", str(file), "-"], capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.split())
    for question in (
        "leaks as pictures?",
        "promised?",
        "do next?",
        "cost?",
        "was tested?",
        "How sure",
        "not tested?",
        "audit again?",
    ):
        assert question in text
    assert "SHA-256" in text and "Signature" in text and "For the decision" not in text.lower()


@needs_browser
def test_a_pdf_is_private_and_only_our_own_is_replaced(run: Run, tmp_path: Path) -> None:
    page, file = write_report(run(victims=1), "none"), tmp_path / "report.pdf"
    file.write_bytes(b"")
    for _ in range(2):
        pdf.check_pdf(file)
        assert pdf.write_pdf(page, file) is None
    assert file.read_bytes().startswith(b"%PDF-") and stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"%PDF-1.4 mine")
    with pytest.raises(UserError, match="gradveil did not write it"):
        pdf.check_pdf(file)
    with pytest.raises(UserError, match="is a folder"):
        pdf.check_pdf(tmp_path)


@needs_browser
@pytest.mark.parametrize("defenses", [1, 3, 40])
def test_the_cover_fits_on_one_sheet(run: Run, tmp_path: Path, defenses: int) -> None:
    leak = {"none": 1.0} | {f"{LONG}{i}": 0.5 * (i % 2) for i in range(defenses)}
    verdict = {spec: ("unrefuted", "cannot tell")[i % 2] for i, spec in enumerate(leak) if i % 3 == 2}
    folder = run(leak=leak, verdict=verdict, extra={"command": "gradveil audit --defense " + LONG})
    About(**dict.fromkeys(About.model_fields, "W" * MAX_NAME)).store(folder)
    found = ask(
        folder,
        tmp_path / "profile",
        f"""
        for (const style of all("style")) {{
          const css = style.textContent.replaceAll("@media print", "@media all");
          style.textContent = css.replaceAll("@media screen", "@media speech");
        }}
        document.body.style.width = "{SHEET[0]}mm";
        const last = document.getElementById("evidence").getBoundingClientRect();
        found.bottom = (last.bottom + scrollY) / 96 * 25.4;
        found.top = document.getElementById("decision").getBoundingClientRect().top / 96 * 25.4;
        found.type = document.getElementById("decision").style.cssText;
        """,
    )
    assert found["bottom"] <= SHEET[1], found


def test_without_a_browser_the_reason_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "find_browser", lambda: None)
    assert "no browser that prints is on PATH" in (pdf.write_pdf(write_report(run()), tmp_path / "a.pdf") or "")
    assert not (tmp_path / "a.pdf").exists()


def program(folder: Path, text: str) -> str:
    file = folder / "browser"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o700)
    return str(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit 0", "page.pdf"),
        ("echo broken >&2; exit 3", "ended with code 3 (broken)"),
        ("exec nothing-of-this-name", "ended with code"),
    ],
)
def test_a_browser_that_fails_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setattr(pdf, "find_browser", lambda: program(tmp_path, text))
    problem = pdf.write_pdf(write_report(run()), tmp_path / "a.pdf")
    assert problem is not None and says in problem and "\n" not in problem
    assert not (tmp_path / "a.pdf").exists()


def test_a_browser_that_hangs_is_ended_with_its_children(run: Run, tmp_path: Path) -> None:
    child = tmp_path / "child"
    hangs = program(tmp_path, f"sleep 600 & echo $! > {child}; wait")
    begun = time.monotonic()
    with pytest.raises(UserError, match="did not end within 1 s"):
        browser.run_browser(hangs, write_report(run()), [], seconds=1)
    assert time.monotonic() - begun < 30
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z", "its child is ended too"


def test_nothing_that_cannot_be_started_costs_a_traceback(run: Run) -> None:
    with pytest.raises(UserError, match="cannot be started"):
        browser.run_browser("/nowhere/chromium", write_report(run()), [])
