"""What a person sees while an audit runs."""

from __future__ import annotations

import io

from rich.console import Console

from gradveil.auditing.plan import Cell
from gradveil.auditing.progress import Bars


def _content(known: int, psnr: float) -> dict:
    victims = [{"identified": i < known} for i in range(4)]
    return {"status": "ok", "victims": victims, "rows": [{"psnr": {"mean": psnr}, "scored": 4}], "seconds": 1.0}


def test_the_bar_names_the_strongest_attack_so_far() -> None:
    written = io.StringIO()
    bars = Bars(Console(file=written, force_terminal=True, width=150))
    bars.start(3, 0)
    for cell, content in (
        (Cell("a", "attack", "none", "rgap"), _content(4, 99.0)),  # the control is no news
        (Cell("b", "attack", "prune", "prune-mask"), _content(3, 20.0)),
        (Cell("c", "attack", "prune", "swift"), _content(1, 30.0)),
    ):
        bars.begin(cell)
        bars.progress(cell, 1, 2)
        bars.end(cell, content)
    bars.stop()
    text = written.getvalue()
    assert "most so far 75% identified, 20 dB: prune-mask under prune" in text
    assert "99 dB" not in text
    assert "swift under prune: 1 of 4 images identified" in text
