"""The summary as a table for a terminal. It fits the width it is given; rich honours NO_COLOR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.core.text import plain
from gradveil.report import words
from gradveil.report.view import LEAKS, UNREFUTED, DefenseView, SummaryView

_STYLES = {LEAKS: "bold red", UNREFUTED: "yellow"}  # what needs attention; the rest stays plain


def table(summary: Mapping[str, Any]) -> Table:
    """One line a defense: the verdict, what the worst attacks got, what it costs; below them the baseline."""
    view = SummaryView.read(summary)
    costs = any(d.accuracy is not None for d in view.defenses)
    cosines = not costs and any(d.cosine is not None for d in view.defenses)
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    out.add_column("defense", overflow="fold", min_width=8)
    out.add_column("verdict", min_width=6)  # so far left that no narrow window hides it
    out.add_column("best attack", overflow="fold", min_width=6)
    for name in ("PSNR", "SSIM", "ASR"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("identified", justify="right", min_width=4)
    if costs:
        out.add_column("accuracy", justify="right", no_wrap=True)
        out.add_column("PDM", justify="right", no_wrap=True)
    if cosines:
        out.add_column("cosine", justify="right", no_wrap=True)
    for defense in view.defenses:
        extra = []
        if costs:
            extra = [words.percent(defense.accuracy, 1), words.digits(defense.loss, 1)]
        if cosines:
            extra = [words.digits(defense.cosine)]
        verdict = Text(defense.verdict, _STYLES.get(defense.verdict, ""))
        out.add_row(Text(plain(defense.spec)), verdict, *_scores(defense), *extra)
    if view.baseline:
        base = view.baseline
        figures = (words.digits(base.psnr.mean, 1), words.digits(base.ssim.mean), words.percent(base.asr))
        blanks = [""] * (2 * costs + cosines)
        out.add_section()
        out.add_row("baseline", "", "no update", *figures, words.rate_text(base.identified), *blanks, style="dim")
    return out


def _scores(defense: DefenseView) -> list[Text]:
    # Text, not strings: brackets in a spec are no markup.
    best = plain(defense.best.attack) if defense.best else words.NOTHING
    figures = (words.digits(defense.psnr.mean, 1), words.digits(defense.ssim.mean), words.percent(defense.asr))
    return [Text(t) for t in (best, *figures, words.rate_text(defense.identified))]


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """The table with its scope above it, and what to make of it below."""
    view = SummaryView.read(summary)
    console.print(Text(plain(words.scope(view)), "dim"))
    console.print()
    console.print(table(summary))
    console.print()
    for caveat in words.caveats(view):
        console.print(Text(f"Warning: {plain(caveat)}", "yellow"))
    for defense in view.defenses:
        for warning in defense.warnings:
            console.print(Text(f"Warning ({plain(defense.spec)}): {plain(warning)}", "yellow"))
    overall, choice = plain(words.overall(view)), words.recommend(view)
    if not choice.text.startswith(overall):
        console.print(Text(overall))
    start = ("Recommended: ", "bold") if choice.defense else ""
    console.print(Text.assemble(start, plain(choice.text)))
