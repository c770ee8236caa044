"""Accessibility of pages, checked by axe-core in the browser at hand: `python benchmarks/accessibility.py PAGE.html …`.

Each page is looked at wide and narrow, light and dark, with all folded parts open. Prints every finding and ends with code 1
where one is serious or critical. axe-core comes from the npm registry into a temporary folder; `--axe FILE` takes a file that
is here already.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from gradveil.report.browser import find_browser, run_browser

AXE = "axe-core@4.10.3"
VIEWS = [(width, theme) for width in (1400, 400) for theme in ("light", "dark")]
BAD = ("serious", "critical")
# Answers stand in an attribute of the page, which the browser prints when it is done.
PROBE = """
for (const part of document.querySelectorAll("details")) part.open = true;
document.documentElement.dataset.theme = "%s";
axe.run(document, { resultTypes: ["violations", "incomplete"] }).then(
  answer => answer.violations.map(v => [v.impact, v.id, v.help, v.nodes.map(n => [n.target.join(" "), n.failureSummary])]),
  error => [["critical", "axe", String(error), []]],
).then(answer => { document.documentElement.dataset.axe = JSON.stringify(answer); });
"""

Finding = tuple[str, str, str, list[tuple[str, str]]]  # impact, rule, help, and where with why


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--axe", type=Path, help="axe.min.js")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        sys.exit("No browser is on PATH; install Chromium.")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        script = (options.axe or downloaded(Path(folder))).read_text(encoding="utf-8")
        for page in options.pages:
            for width, theme in VIEWS:
                findings = check(browser, page, script, width, theme, Path(folder))
                print(f"{page}, {width} px, {theme}: {len(findings)} findings")
                for impact, rule, text, places in findings:
                    bad += impact in BAD
                    print(f"  {impact}: {rule}: {text} ({len(places)} places)")
                    for where, why in places[:5]:
                        print(f"    {where}: {' '.join(why.split())}")
    print(f"{bad} serious or critical findings.")
    return int(bad > 0)


def downloaded(folder: Path) -> Path:
    """axe.min.js of the package."""
    packed = subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, check=True)
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        archive.extract("package/axe.min.js", folder, filter="data")
    return folder / "package" / "axe.min.js"


def check(browser: str, page: Path, script: str, width: int, theme: str, folder: Path) -> list[Finding]:
    """What axe finds in a copy of the page whose policy lets axe run."""
    text = page.read_text(encoding="utf-8").replace('http-equiv="Content-Security-Policy"', 'name="policy"')
    copy = folder / "page.html"
    copy.write_text(
        text.replace("</body>", f"<script>{script}</script><script>{PROBE % theme}</script></body>"), encoding="utf-8"
    )
    options = [f"--window-size={width},1000", "--virtual-time-budget=30000", "--dump-dom"]
    answer = re.search(r'data-axe="([^"]*)"', run_browser(browser, copy, options))
    if answer is None:
        sys.exit(f"{page}: axe did not answer.")
    findings: list[Finding] = json.loads(html.unescape(answer[1]))
    return findings


if __name__ == "__main__":
    sys.exit(main())
