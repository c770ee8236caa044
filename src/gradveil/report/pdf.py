"""A page as a PDF, printed by the browser at hand."""

from pathlib import Path

from gradveil.core.errors import UserError
from gradveil.processes.temporary import TemporaryFolder
from gradveil.report.browser import find_browser, run_browser
from gradveil.storage.files import check_replaceable, write_bytes
from gradveil.storage.reading import read_bytes

MAX_PDF = 1 << 28  # bytes
MARK = "% printed by gradveil report"  # a comment at the end: only such a file is replaced


def check_pdf(file: Path) -> None:
    """Refuse a name before any work is done."""
    if file.is_dir():
        raise UserError(f"{file} is a folder; --pdf names a file, such as report.pdf.")
    check_replaceable(file, MARK)


def write_pdf(page: Path, file: Path) -> str | None:
    """Print the page to a file. Where that is not possible: why."""
    browser = find_browser()
    if browser is None:
        return "no browser that prints is on PATH (chromium, google-chrome)"
    with TemporaryFolder() as folder:
        printed = folder / "page.pdf"
        try:
            run_browser(browser, page, ["--no-pdf-header-footer", f"--print-to-pdf={printed}"])
            content = read_bytes(printed, MAX_PDF)
        except UserError as error:
            return str(error).removesuffix(".")
    if not content.startswith(b"%PDF-"):
        return f"{browser} printed no PDF"
    write_bytes(file, content.rstrip(b"\n") + f"\n{MARK}\n".encode())
    return None
