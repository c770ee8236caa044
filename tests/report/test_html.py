"""The page: complete, self-contained, escaped, small, and true to the folder."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import re
import shutil
import stat
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from gradveil.auditing.spec import PictureMode
from gradveil.core.errors import UserError
from gradveil.report import pictures, words, write_report
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import CaseFacts, Summary

Run = Callable[..., Path]
Store = Callable[[Path, dict[str, Any]], None]
HOSTILE = "<script>alert(1)</script>\"'></style><img src=x onerror=alert(1)>{{7*7}}"


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style and script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._raw = ""
        self.source = text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        self._raw = tag if tag in ("style", "script") else self._raw

    def handle_endtag(self, tag: str) -> None:
        self._raw = "" if tag == self._raw else self._raw

    def handle_data(self, data: str) -> None:
        if self._raw == "script":
            self.scripts.append(data)
        if not self._raw:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in attributes.items())]


def page_of(folder: Path, mode: PictureMode = "blurred") -> Page:
    return Page(write_report(folder, mode).read_text(encoding="utf-8"))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    summary = json.loads((folder / "summary.json").read_text())
    change(summary)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def tiles(page: Page, sprite: int) -> np.ndarray[Any, Any]:
    found = re.search(rf"\.s{sprite}{{background-image:url\(data:image/png;base64,([^)]*)\)}}", page.source)
    assert found
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))))


# -- what it says -----------------------------------------------------------------------------------------------------


def test_both_readers_find_their_part(run: Run) -> None:
    page = page_of(run())
    for phrase in (
        "Of 2 audited defenses, 1 leaks and 1 showed no leak.",
        "Recommended defense precode",
        "4 of 4 private images could be picked out",
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

    text = page_of(edit(run(), change)).text
    assert "failed the loss was not finite" in text and "not applicable needs labels" in text
    assert "ig against prune:ratio=0.9: failed (the loss was not finite)" in text


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


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_strips_hold_the_very_pixels_of_the_tensors(run: Run) -> None:
    folder = run(victims=3, batch=2, shape=(3, 8, 10))
    page = page_of(folder, "shown")
    wanted = load_file(folder / "tensors" / "cell-01-00.safetensors")
    label = next(a for a in page.of("span", role="img") if a["aria-label"] == "The same image as rebuilt by ig")
    assert "s" + label["class"].split(" s")[1] in page.source
    strips = {strip.tobytes() for strip in (tiles(page, i) for i in range(page.source.count("background-image:url(data")))}
    for name in ("original", "reconstruction"):
        images = (wanted[name].reshape(6, 3, 8, 10).transpose(2, 0, 3, 1).reshape(8, 60, 3) * 255).round()
        assert images.astype(np.uint8).tobytes() in strips


def test_originals_are_embedded_once_and_fed_only_where_it_differs(run: Run) -> None:
    page = page_of(run(leak={"none": 0.9, "prune": 0.5, "loda": 0.5}), "shown")
    attacks, defenses = 3, 3
    assert page.source.count("background-image:url(data") == attacks * defenses + 1 + 1  # originals, and loda's fed
    fed = [a for a in page.of("span", role="img") if a["aria-label"].startswith("Image as fed")]
    assert len(fed) == 4, "one for each victim, under loda alone"


def test_blurred_shown_and_none(run: Run) -> None:
    folder = run()
    blurred, shown, none = (page_of(folder, mode) for mode in ("blurred", "shown", "none"))
    assert "blurred to one colour" in blurred.text and "blurred" not in shown.text
    assert "data:image" not in none.source and not none.of("span", role="img")
    assert "Pictures were left out on request." in none.text and "Worst case: victim" in none.text
    assert "Private images are inside this file" in shown.text
    assert "inside this file" not in blurred.text + none.text and "its mean colour in few levels" in blurred.text


def test_every_picture_has_words(run: Run) -> None:
    spans = page_of(run(class_names=["cat", "dog", "hen"])).of("span", role="img")
    assert spans and all(a["aria-label"] for a in spans)
    assert any("class " in a["aria-label"] for a in spans)


def test_large_runs_are_cut_to_the_budget_and_keep_the_worst(
    run: Run, store_cell: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(victims=12)
    worst = json.loads((folder / "cells" / "cell-01-00.json").read_text())
    worst["victims"][11].update(identified=True, ssim=0.99, psnr=40.0)
    store_cell(folder, worst)
    monkeypatch.setattr(pictures, "BUDGET", 12_000)
    page = page_of(folder, "shown")
    uris = re.findall(r"url\((data:[^)]*)\)", page.source)
    assert 0 < sum(map(len, uris)) <= 12_000
    shown = int(re.search(r"Shown are (\d+) of 12 private images", page.text)[1])  # type: ignore[index]
    assert 3 <= shown < 12
    assert "Worst case: victim 11, rebuilt by ig: PSNR 40.0 dB" in page.text
    assert any(a["aria-label"] == "Private image, victim 11" for a in page.of("span", role="img"))


def test_large_images_are_scaled_down_and_the_page_says_so(run: Run) -> None:
    page = page_of(run(shape=(1, 160, 200), victims=2), "shown")
    assert "scaled down from 200 × 160 pixels" in page.text
    assert tiles(page, 0).shape == (102, 256)


def test_fourteen_defenses_under_twelve_attacks_stay_below_15_mb(run: Run) -> None:
    folder = run(
        leak={"none": 1.0} | {f"defense-{i}:ratio=0.{i},scope=global": 1 - i / 13 for i in range(13)},
        strength={f"attack-{i}:steps=1000": 1 - i / 13 for i in range(12)},
        victims=32,
        shape=(1, 4, 4),
        against=("original", "fed", "component"),
    )
    page = page_of(folder)
    embedded = sum(map(len, re.findall(r"url\((data:[^)]*)\)", page.source)))
    # All but the pictures does not depend on their size, and the pictures keep to their budget.
    assert len(page.source) - embedded + pictures.BUDGET < 15_000_000
    assert len([a for a in page.of("tr") if "data-defense" in a]) == 14 * 12 * 3


@pytest.mark.parametrize("channels", [2, 4])
def test_images_without_colours_of_their_own(run: Run, channels: int) -> None:
    assert tiles(page_of(run(shape=(channels, 6, 6), victims=2), "shown"), 0).shape == (6, 12)


def test_a_broken_tensor_file_is_told_not_hidden(run: Run) -> None:
    folder = run()
    (folder / "tensors" / "cell-00-00.safetensors").write_bytes(b"nonsense")
    page = page_of(folder)
    assert "cell-00-00.safetensors is damaged" in page.text and page.of("span", role="img")


def test_pictures_of_another_cell_are_told_not_shown(run: Run) -> None:
    folder = run()
    one, other = (folder / "tensors" / f"cell-00-0{i}.safetensors" for i in (0, 1))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    page = page_of(folder, "shown")
    assert page.text.count("does not hold what was written") == 2
    drawn = [a["aria-label"] for a in page.of("span", role="img")]
    assert sum(label.startswith("victim") and label.endswith("rebuilt by dlg") for label in drawn) == 8, "of 2 defenses"


def test_values_that_are_not_finite_can_be_drawn(run: Run, store_cell: Store) -> None:
    folder = run(images=np.full((4, 1, 12, 12), 0.5, np.float32))
    for file in (folder / "tensors").iterdir():
        save_file({name: np.full_like(images, np.nan) for name, images in load_file(file).items()}, file)
        store_cell(folder, json.loads((folder / "cells" / f"{file.stem}.json").read_text()))
    drawn = tiles(page_of(folder, "shown"), 0)
    assert drawn.shape == (12, 48) and set(drawn.flatten()) == {128}


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
    assert links == {"leaks", "no-leak-shown", "weak-attacks", "single-draw"}
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
