"""What only a browser can tell: that the page's script runs under its own policy, and what the controls do."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradveil.report import write_report
from gradveil.report.browser import find_browser

CHROMIUM = find_browser()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")

QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
]
OPTIONS = [*QUIET, "--virtual-time-budget=3000", "--dump-dom"]


def browse(page: Path, profile: Path, width: int = 1280) -> tuple[str, str]:
    """The page after its script has run, and what the browser logged."""
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},900", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def ask(folder: Path, profile: Path, script: str, width: int = 1280) -> dict[str, Any]:
    """Run `script` in a copy of the page whose policy allows it; it fills the object `found`."""
    page = write_report(folder).read_text(encoding="utf-8")
    page = page.replace('http-equiv="Content-Security-Policy"', 'name="policy"')
    probe = f"const found = {{}}; {script}; document.body.dataset.found = JSON.stringify(found);"
    copy = folder / "probe.html"
    copy.write_text(page.replace("</body>", f"<script>{{{probe}}}</script></body>"), encoding="utf-8")
    dom, log = browse(copy, profile, width)
    answer = re.search(r'data-found="([^"]*)"', dom)
    assert answer, log
    found: dict[str, Any] = json.loads(html.unescape(answer[1]))
    return found


def test_the_script_runs_under_the_policy_and_nothing_is_refused(run: Callable[..., Path], tmp_path: Path) -> None:
    dom, log = browse(write_report(run(against=("original", "fed"))), tmp_path / "profile")
    assert "9 of 18 rows" in dom, "filtered to the originals by the page's own script"
    assert 'aria-sort="none"' in dom and "Dark page" in dom
    assert "CONSOLE" not in log


def test_controls(run: Callable[..., Path], tmp_path: Path) -> None:
    found = ask(
        run(),
        tmp_path / "profile",
        """
        const heads = all("#results thead th"), column = heads.findIndex(h => h.textContent === "PSNR, dB");
        const rows = () => all("#results tbody tr").filter(r => !r.hidden);
        const values = () => rows().map(r => Number(r.cells[column].dataset.v));
        heads[column].firstChild.click();
        found.down = values(); found.sort = heads[column].getAttribute("aria-sort");
        heads[column].firstChild.click();
        found.up = values();
        const choice = document.querySelector("[data-filter=attack]");
        choice.value = "dlg"; choice.dispatchEvent(new Event("change"));
        found.filtered = values().length; found.count = document.getElementById("count").textContent;
        found.filters = all(".t").map(p => getComputedStyle(p).filter);
        const point = document.querySelector(".point"); point.dispatchEvent(new Event("focus"));
        found.tip = document.getElementById("tip").hidden ? null : document.getElementById("tip").textContent;
        const paper = () => getComputedStyle(document.body).backgroundColor;
        found.light = paper(); document.getElementById("theme").click(); found.dark = paper();
        """,
    )
    assert found["sort"] == "descending" and len(found["down"]) == 9
    assert found["down"] == sorted(found["down"], reverse=True) and found["up"] == sorted(found["up"])
    assert found["filtered"] == 3 and found["count"] == "3 of 9 rows"
    assert set(found["filters"]) == {"none"}, "what a browser hides is in the file all the same"
    assert found["tip"].startswith("none: leaks; identified 100%")
    assert found["light"] != found["dark"]


def test_filters_and_sorting_stand_in_the_address_and_are_taken_from_it(run: Callable[..., Path], tmp_path: Path) -> None:
    folder = run(against=("original", "fed"))
    script = """
        const heads = all("#results thead th"), column = heads.findIndex(h => h.textContent === "PSNR, dB");
        const rows = () => all("#results tbody tr").filter(r => !r.hidden);
        const values = () => rows().map(r => Number(r.cells[column].dataset.v));
        const choose = (name, value) => {
          const choice = document.querySelector(`[data-filter=${name}]`);
          choice.value = value; choice.dispatchEvent(new Event("change"));
        };
        found.before = location.hash;
        choose("attack", "dlg"); choose("against", "");
        heads[column].firstChild.click(); heads[column].firstChild.click();
        found.kept = location.hash; found.values = values();
        history.replaceState(null, "", "#table&attack=ig&sort=SSIM&order=descending&against=nonsense");
        dispatchEvent(new Event("hashchange"));
        found.taken = rows().map(r => r.dataset.attack + " " + r.dataset.against);
        found.sorted = heads.filter(h => h.getAttribute("aria-sort") === "descending").map(h => h.textContent);
        history.replaceState(null, "", found.kept); dispatchEvent(new Event("hashchange"));
        found.again = values();
        history.replaceState(null, "", "#gallery"); dispatchEvent(new Event("hashchange"));
        found.elsewhere = values();
        """
    found = ask(folder, tmp_path / "profile", script)
    assert found["before"] == "" and found["values"] == sorted(found["values"]) and len(found["values"]) == 6
    assert found["kept"] == "#table&attack=dlg&against=&sort=PSNR%2C+dB&order=ascending"
    assert found["taken"] == ["ig original"] * 3 and found["sorted"] == ["SSIM"]
    assert found["again"] == found["values"] == found["elsewhere"], "another place in the page changes nothing"


def test_words_are_explained_on_focus(run: Callable[..., Path], tmp_path: Path) -> None:
    found = ask(
        run(),
        tmp_path / "profile",
        """
        const tip = document.getElementById("tip"), term = document.querySelector("a.term");
        term.dispatchEvent(new Event("focus"));
        found.tip = tip.hidden ? null : tip.textContent; found.wanted = term.dataset.tip;
        found.target = document.querySelector(term.getAttribute("href")) !== null;
        const head = all("#results thead button").find(b => b.textContent === "SSIM");
        head.dispatchEvent(new Event("focus")); found.head = tip.textContent;
        """,
    )
    assert found["tip"] == found["wanted"] and found["target"] and found["head"].startswith("Structural likeness")


def test_the_chart_of_a_phone_is_shown_in_its_true_size(run: Callable[..., Path], tmp_path: Path) -> None:
    script = """
        found.shown = all("svg.chart").filter(c => c.querySelector(".point") && getComputedStyle(c).display !== "none")
          .map(c => [c.getAttribute("class"), c.getBoundingClientRect().width / c.viewBox.baseVal.width]);
        """
    ((name, size),) = ask(run(), tmp_path / "profile", script, width=400)["shown"]
    assert "narrow" in name and size > 0.9
    ((name, size),) = ask(run(), tmp_path / "profile", script)["shown"]
    assert "wide" in name and size > 0.9


def test_a_phone_does_not_scroll_sideways(run: Callable[..., Path], tmp_path: Path) -> None:
    long = "prune:ratio=0.9,scope=global+gaussian:std=0.001+averyveryverylongnamewithoutanybreakinit"
    found = ask(
        run(leak={"none": 1.0, long: 0.2}, extra={"command": "gradveil audit --defense " + long}),
        tmp_path / "profile",
        "all('details').forEach(d => { d.open = true; });"
        "found.page = document.documentElement.scrollWidth; found.window = innerWidth",
        width=390,
    )
    assert found["window"] <= 500 and found["page"] <= found["window"]


def test_opening_the_page_from_disk_asks_the_network_for_nothing(run: Callable[..., Path], tmp_path: Path) -> None:
    page, log = write_report(run()), tmp_path / "net.json"
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    asked = set(re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8", errors="replace")))
    assert not [url for url in asked if url.startswith(("http:", "https:", "ws:", "wss:")) and "google" not in url], asked


@pytest.mark.parametrize(("name", "width"), [("desktop", 1280), ("phone", 390)])
def test_pictures_of_the_page_are_kept(name: str, width: int, run: Callable[..., Path], tmp_path: Path) -> None:
    """In the folder named by GRADVEIL_ARTIFACTS, for people to look at."""
    folder = Path(os.environ.get("GRADVEIL_ARTIFACTS") or tmp_path).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shot = folder / f"report-{name}.png"
    shot.unlink(missing_ok=True)
    page = write_report(run()).as_uri()
    how = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2400", "--hide-scrollbars"]
    subprocess.run([str(CHROMIUM), *QUIET, *how, f"--screenshot={shot}", page], capture_output=True, timeout=120, check=True)
    from PIL import Image

    with Image.open(shot) as picture:
        assert picture.height == 2400
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20, "a page, not an empty sheet"
