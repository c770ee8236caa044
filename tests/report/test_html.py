"""The page: complete, self-contained, escaped, small, and true to the folder."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parsed_page import edit, page_of

from gradveil.core.errors import UserError
from gradveil.report import words, write_report
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import CaseFacts, Summary

Run = Callable[..., Path]
Store = Callable[[Path, dict[str, Any]], None]
HOSTILE = "<script>alert(1)</script>\"'></style><img src=x onerror=alert(1)>{{7*7}}"


# -- what it says -----------------------------------------------------------------------------------------------------


def test_both_readers_find_their_part(run: Run) -> None:
    page = page_of(run(victims=16))
    for phrase in (
        "Of 2 audited defenses, 1 leaks and 1 showed no leak.",
        "Recommended defense precode",
        "Not recommended prune:ratio=0.9 – it leaks.",
        "16 of 16 private images could be picked out",
        "What the adversary was granted",
        "What was not tested",
        "For a data-protection impact assessment",
        "no update at all",
        "gradveil audit --data mnist-5k --model lenet --seed 0",
        "packages.torch 2.13.0",
        "data: mnist-5k",
    ):
        assert phrase in page.text
    assert not re.search(r"\bsafe\b", page.text, re.IGNORECASE)


def test_table_holds_every_row_and_the_baseline(run: Run) -> None:
    page = page_of(run(against=("original", "fed")))
    rows = [a for a in page.of("tr") if "data-defense" in a]
    assert len(rows) == 3 * 3 * 2
    assert {a["data-against"] for a in rows} == {"original", "fed"}
    assert "baseline no update at all" in page.text


def test_failed_and_inapplicable_rows_stay_visible_with_their_reason(run: Run) -> None:
    def change(summary: dict[str, Any]) -> None:
        first, second, _ = summary["defenses"][1]["attacks"]
        first.update(status="failed", error="the loss was not finite", identified=None, psnr=None, ssim=None, mse=None)
        second.update(status="not applicable", error="needs labels", identified=None, psnr=None, seconds=None)
        summary["defenses"][2]["attacks"][0].update(status="not applicable", error="needs labels", identified=None)

    page = page_of(edit(run(), change))
    rows = [(a["data-defense"], a["data-attack"]) for a in page.of("tr") if "data-defense" in a]
    assert ("prune:ratio=0.9", "ig") in rows and len(rows) == 9 - 2, "only what does not apply is folded away"
    assert "Failed (ig under prune:ratio=0.9): the loss was not finite" in page.text
    assert page.text.count("needs labels dlg under prune:ratio=0.9 and ig under precode") == 1, "each reason once"
    assert "ig against prune:ratio=0.9: failed (the loss was not finite)" in page.text


def test_only_the_summary_must_be_there(run: Run, tmp_path: Path) -> None:
    def change(summary: dict[str, Any]) -> None:
        summary["defenses"] = summary["defenses"][1:]
        summary["defenses"][0].update(verdict="cannot tell", test=None, worst=None, utility=None)

    file = edit(run(), change) / "summary.json"
    (tmp_path / "bare").mkdir()
    text = page_of(file.rename(tmp_path / "bare" / "summary.json").parent).text
    assert "cannot tell" in text and "This run stored no pictures." in text and "no undefended control" in text
    assert "This run stored no environment." in text


def test_what_was_not_measured_is_no_error(run: Run) -> None:
    def change(summary: dict[str, Any]) -> None:
        for defense in summary["defenses"]:
            defense.update(utility=None, gradient=None, worst=None, test=None, verdict="cannot tell")
            for row in defense["attacks"]:
                row.update(dict.fromkeys(("psnr", "ssim", "mse", "lpips", "asr", "identified", "label_accuracy")))
                row.update(seconds=None, iterations=None)
        summary.update(baseline=None, command=None)

    assert "Neither accuracy nor gradient cosine was measured" in page_of(edit(run(), change)).text


def test_only_its_owner_can_read_the_page(run: Run) -> None:
    assert stat.S_IMODE(write_report(run()).stat().st_mode) == 0o600


def test_cells_of_other_audits_in_the_folder_are_ignored(run: Run, store_cell: Store) -> None:
    folder = run()
    store_cell(
        folder,
        {"key": "old", "kind": "attack", "defense": "none", "attack": "forgotten",
         "victims": [{"victim": 9, "image": 0, "psnr": 99.0, "ssim": 1.0, "mse": 0.0, "lpips": None,
                      "identified": True, "rank": 1, "failed": False}]},
    )  # fmt: skip
    text = page_of(folder).text
    assert "forgotten" not in text and "victim 9" not in text


def test_the_same_run_gives_the_same_page(run: Run) -> None:
    folder = run()
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()


# -- self-contained and escaped ---------------------------------------------------------------------------------------


def test_nothing_is_fetched_and_only_our_script_may_run(run: Run) -> None:
    page = page_of(run())
    links = [value for _, a in page.tags for key, value in a.items() if key == "href"]
    assert all(link.startswith(("#", f"{words.GUIDE}#")) for link in links), "a link to the guide is followed, not fetched"
    assert not [a for _, a in page.tags if "src" in a or "srcset" in a or any(k.startswith("on") for k in a)]
    assert not page.of("link") and not page.of("iframe") and len(page.scripts) == 1
    assert all(url.startswith("data:image/png") for url in re.findall(r"url\(([^)]{0,20})", page.source))
    assert "@import" not in page.source and "http" not in "".join(page.scripts)
    policy = next(a["content"] for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_hostile_words_are_shown_as_words(run: Run) -> None:
    folder = run(
        leak={"none": 1.0, HOSTILE: 0.5, "loda": 0.0},
        strength={"ig": 1.0, HOSTILE: 0.8},
        class_names=[HOSTILE] * 3,
        case={"data": HOSTILE, "model": HOSTILE, "knowledge": HOSTILE},
        extra=dict.fromkeys(("suite", "gradveil", "command", "scope"), HOSTILE)
        | {key: [HOSTILE] for key in ("granted", "not_tested")}
        | {"warnings": [{"code": "no-classes", "text": HOSTILE}]},
    )

    def change(summary: dict[str, Any]) -> None:
        for defense in summary["defenses"]:
            defense.update(
                warnings=[{"code": "single-draw", "text": HOSTILE}], scope=HOSTILE, stage=[HOSTILE], counter=[HOSTILE]
            )
            defense["attacks"][0].update(error=HOSTILE, knowledge=HOSTILE)

    edit(folder, change)
    (folder / "audit.yaml").write_text(HOSTILE)
    environment = json.loads((folder / "environment.json").read_text())
    hostile = {"platform": HOSTILE, "packages": {HOSTILE: HOSTILE}}
    (folder / "environment.json").write_text(json.dumps(environment | hostile))
    page = page_of(folder)
    assert len(page.scripts) == 1 and not page.of("img")
    assert len(re.findall(r"</style>", page.source)) == 2 and page.source.count("</script>") == 1
    assert page.text.count("<script>alert(1)</script>") > 20 and "{{7*7}}" in page.text


def test_a_lone_surrogate_in_a_name_does_not_cost_the_page(run: Run) -> None:
    """A path may hold bytes that are no UTF-8; Python keeps them as surrogates."""
    folder = run()
    summary = Summary.read(folder)
    case = CaseFacts.model_validate({**dict(summary.case), "data": "a\ud800", "class_names": ("b\udcff",)})
    RunFolder(folder).finish(summary.model_copy(update={"case": case}), 1.0)
    assert "on a?" in page_of(folder).text and Summary.read(folder).case.class_names == ("b?",)


def test_links_out_of_the_folder_are_not_followed(run: Run) -> None:
    folder, other = run(victims=2), run(victims=2)
    for file in (folder / "tensors").iterdir():
        file.unlink()
        file.symlink_to(other / "tensors" / file.name)
    text = page_of(folder).text
    assert "This run stored no pictures." in text and "is a link, which is not followed" in text
    shutil.rmtree(folder / "tensors")
    (folder / "tensors").symlink_to(other / "tensors")
    assert "This run stored no pictures." in page_of(folder).text
    for name in ("cells/cell-00-00.json", "environment.json", "audit.yaml", "summary.json"):
        folder = run(victims=2)
        (folder / name).unlink()
        (folder / name).symlink_to(other / name)
        with pytest.raises(UserError, match="is a link, which is not followed"):
            write_report(folder)


# -- writing and reading ----------------------------------------------------------------------------------------------


def test_a_failing_write_leaves_the_old_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run()
    before = write_report(folder).read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(folder, "none")
    assert (folder / "report.html").read_bytes() == before
    assert {p.name for p in folder.iterdir() if p.is_file()} == {
        "audit.yaml", "environment.json", "report.html", "summary.json"
    }  # fmt: skip


def test_wrong_input_is_one_clear_line(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose one of none, blurred, shown"):
        write_report(run(), "hidden")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not a finished run"):
        write_report(tmp_path / "nowhere")


def test_every_verdict_and_warning_links_to_its_explanation(run: Run) -> None:
    def change(summary: dict[str, Any]) -> None:
        summary["warnings"] = [{"code": "weak-attacks", "text": "dlg does not show the leak"}]
        summary["defenses"][1]["warnings"] = [{"code": "single-draw", "text": "random"}]

    page = page_of(edit(run(), change))
    links = {a["href"].removeprefix(f"{words.GUIDE}#") for a in page.of("a") if a["href"].startswith(words.GUIDE)}
    assert links == {"leaks", "no-leak-shown", "weak-attacks", "single-draw", "recommendation"}
    assert "Test: p = 0.600 against 160 strangers" in page.text and "15 for 10%" in page.text


# -- accessibility ----------------------------------------------------------------------------------------------------


def test_structure_for_screen_readers(run: Run) -> None:
    page = page_of(run())
    assert page.of("html", lang="en") and len(page.of("h1")) == 1 and page.of("main") and page.of("nav")
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for _, a in page.tags for key, value in a.items() if key == "href" and value.startswith("#")}
    targets |= {a[key] for _, a in page.tags for key in ("aria-labelledby", "data-copy") if key in a}
    assert targets <= set(ids)
    assert all(a.get("type") == "button" for a in page.of("button"))
    assert all("scope" in a for a in page.of("th"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), "no heading level is skipped"


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_have_contrast_in_light_and_dark(run: Run, theme: int) -> None:
    blocks = re.findall(r"\{(--paper:[^}]*)\}", page_of(run()).source)
    colours = dict(re.findall(r"--(\w+):(#[0-9a-f]{6})", blocks[theme]))

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for text in ("ink", "soft", "link", "leak", "open", "held"):
        for ground in ("paper", "box"):
            dark, light = sorted((luminance(colours[text]), luminance(colours[ground])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {ground}"
