"""The pictures of the page: the very pixels of the run, blurred unless shown, within a budget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parsed_page import page_of, tiles
from safetensors.numpy import load_file, save_file

from gradveil.report import pictures

Run = Callable[..., Path]
Store = Callable[[Path, dict[str, Any]], None]
HOSTILE = "<script>alert(1)</script>\"'></style><img src=x onerror=alert(1)>{{7*7}}"


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
    assert "This page has no pictures." in none.text and "Worst case: victim" in none.text
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
