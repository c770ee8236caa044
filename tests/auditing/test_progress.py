"""What a person sees while an audit runs."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from gradveil.auditing.plan import Cell
from gradveil.auditing.progress import Bars, Forecast, LogLines, clock_text
from gradveil.core.results import ImageScores, ScoreRow, Statistic
from gradveil.storage.run_folder import StoredCell


def stored(cell: Cell, identified: int, psnr: float) -> StoredCell:
    images = tuple(
        ImageScores(victim=i, image=0, psnr=psnr, ssim=0.5, mse=0.1, lpips=None, identified=i < identified, rank=1,
                    failed=False)
        for i in range(4)
    )  # fmt: skip
    row = ScoreRow(psnr=Statistic.of([psnr] * 4), scored=4)
    return StoredCell(key=cell.key, kind=cell.kind, defense=cell.defense, attack=cell.attack, tensors=None,
                      tensors_sha256=None, seconds=1.0, rows=(row,), victims=images)  # fmt: skip


def test_the_bar_names_the_strongest_attack_so_far() -> None:
    written = io.StringIO()
    bars = Bars(Console(file=written, force_terminal=True, width=150))
    bars.start(3, {"a": 1.0, "b": 1.0, "c": 1.0})
    for cell, identified, psnr in (
        (Cell("a", "attack", "none", "rgap"), 4, 99.0),  # the control is no news
        (Cell("b", "attack", "prune", "prune-mask"), 3, 20.0),
        (Cell("c", "attack", "prune", "swift"), 1, 30.0),
    ):
        bars.begin(cell)
        bars.progress(cell, 1, 2)
        bars.end(cell, stored(cell, identified, psnr))
    bars.stop()
    text = written.getvalue()
    assert "most so far 75% identified, 20 dB: prune-mask under prune" in text
    assert "99 dB" not in text
    assert "swift under prune: 1 of 4 images identified" in text


class Clock:
    """Time that goes on only when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_from_the_work_that_is_done() -> None:
    clock = Clock()
    forecast = Forecast({"a": 10.0, "b": 30.0, "c": 60.0}, clock)
    assert forecast.left() is None
    forecast.begin("a")
    clock.now += 20
    forecast.progress("a", 0.5)
    assert forecast.cell("a") == (0.5, 20, 20)
    assert forecast.left() == 20 * 95 / 5
    clock.now += 20
    forecast.end("a", worked=True)
    forecast.begin("b")
    forecast.end("b", worked=False)  # it did not apply: neither work nor time
    assert forecast.left() == 40 * 60 / 10
    forecast.begin("c")
    clock.now += 300
    forecast.progress("c", 0.1)  # slower than its weight said
    assert forecast.cell("c") == (0.1, 300, pytest.approx(2700)) and forecast.left() == pytest.approx(2700)
    assert [clock_text(s) for s in (None, 65.2, 7210)] == ["unknown", "1:05", "2:00:10"]


def test_a_log_tells_how_far_the_cells_at_work_are() -> None:
    written, clock = io.StringIO(), Clock()
    lines = LogLines(Console(file=written, width=200), clock)
    swift, look = Cell("a", "attack", "none", "swift"), Cell("b", "look", "none")
    lines.start(4, {"a": 300.0, "b": 100.0, "c": 100.0})
    lines.begin(swift)
    lines.begin(look)
    clock.now += 60
    lines.progress(swift, 250, 1000)
    lines.tell()
    lines.end(swift, stored(swift, 1, 20.0))
    lines.tell()
    lines.stop()
    assert written.getvalue().splitlines() == [
        "1 of 4 cells are done already",
        "swift under none: 25% after 1:00, 3:00 left; the audit: 5:40 left",
        "direct look under none: 0% after 1:00, unknown left; the audit: 5:40 left",
        "[2/4] swift under none: 1 of 4 images identified, PSNR 20.0 dB (1.0 s)",
        "direct look under none: 0% after 1:00, unknown left; the audit: 0:40 left",
    ]


def test_a_log_tells_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.auditing.progress.EVERY", 0.05)
    written = io.StringIO()
    lines = LogLines(Console(file=written, width=200))
    lines.start(1, {"a": 1.0})
    lines.begin(Cell("a", "attack", "none", "swift"))
    end = time.monotonic() + 10
    while "swift under none: 0% after" not in written.getvalue() and time.monotonic() < end:
        time.sleep(0.02)
    lines.stop()
    assert "swift under none: 0% after" in written.getvalue()
