"""Pictures of three real reports, for people to look at, and those of the documentation.

`python benchmarks/screenshots.py OUT` audits three cases (everything leaks; something survives; the audit cannot tell) below
OUT/runs, about a quarter of an hour on two cores, and takes each page at 1400 and 400 pixels, dark, and as printed (the first
sheet, and the whole as PDF). What is audited already is not audited again. `--docs` also replaces docs/images/report.png and
docs/images/officers-file.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from gradveil import cli
from gradveil.report.browser import find_browser, run_browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NAMES = ["--organisation", "City Hospital", "--auditor", "A. Lee", "--system", "digit reader", "--system-version", "2.1"]
SMLP = ["--data", "mnist-5k", "--model", "smlp", "--attack", "linear", "--defense", "prune:ratio=0.9"]
COST = ["--utility", "--utility-seeds", "2", "--utility-rounds", "20", "--utility-lr-grid", "1", "--max-loss", "60"]
RUNS = {
    "leaks": [*SMLP, "--defense", "gaussian:std=0.0001", "--victims", "8", "--line-up", "200"],
    "survives": [
        *(*SMLP, "--attack", "noise-likelihood", "--defense", "dpsgd:noise=1", "--defense", "gaussian:std=0.3"),
        *("--victims", "16", "--line-up", "30", *COST),
    ],
    "unsure": [
        *("--data", "mnist-5k", "--model", "lenet", "--attack", "dlg:steps=1", "--defense", "prune:ratio=0.9"),
        *("--defense", "gaussian:std=0.01", "--victims", "2", "--line-up", "20"),
    ],
}
DARK = ("<html ", '<html data-theme="dark" ')
# The page as paper has it, on a screen: for people without a viewer of PDFs.
PRINT = (
    *(("@media print", "@media all"), ("@media screen", "@media speech"), ("<body ", '<body style="margin:9mm 12mm" ')),
    ("</head>", "<style>#details,#engineer,#glossary,footer{display:none}</style></head>"),  # they are on other sheets
)
VIEWS: dict[str, tuple[int, int, float, tuple[tuple[str, str], ...]]] = {  # width, height, scale, changes of the page
    "1400": (1400, 1100, 1.0, ()),
    "1400-whole": (1400, 5200, 1.0, ()),
    "400": (400, 2600, 1.0, ()),
    "dark": (1400, 1100, 1.0, (DARK,)),
    "print": (794, 1123, 1.5, PRINT),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--docs", action="store_true", help="replace the pictures of the documentation")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        sys.exit("No browser is on PATH; install Chromium.")
    for name, arguments in RUNS.items():
        run = options.out / "runs" / name
        for command in (["audit", *arguments, "--out", str(run)], ["report", str(run), *NAMES, "--pdf"]):
            if code := cli.main([*command, "--quiet"]):
                sys.exit(code)
        for view, (width, height, scale, changes) in VIEWS.items():
            shoot(browser, run / "report.html", options.out / f"{name}-{view}.png", width, height, scale, changes)
        shutil.copyfile(run / "report.pdf", options.out / f"{name}.pdf")
    if options.docs:
        for source, target in (("survives-1400", "report"), ("survives-print", "officers-file")):
            with Image.open(options.out / f"{source}.png") as picture:  # few colours: a quarter of the bytes
                picture.convert("RGB").quantize(64).save(IMAGES / f"{target}.png", optimize=True)


def shoot(
    browser: str, page: Path, file: Path, width: int, height: int, scale: float, changes: tuple[tuple[str, str], ...]
) -> None:
    """A picture of the top of a page, in a copy that is changed so."""
    text = page.read_text(encoding="utf-8")
    for old, new in changes:
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(text, encoding="utf-8")
        how = [f"--window-size={width},{height}", f"--force-device-scale-factor={scale}", "--hide-scrollbars"]
        run_browser(browser, copy, [*how, f"--screenshot={file.resolve()}"])


if __name__ == "__main__":
    main()
