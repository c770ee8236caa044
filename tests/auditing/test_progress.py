"""What a person sees while an audit runs."""

from __future__ import annotations

import io

from rich.console import Console

from gradveil.auditing.plan import Cell
from gradveil.auditing.progress import Bars
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
    bars.start(3, 0)
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
