"""The summary as a table for a terminal. It fits the width of the console; rich honours NO_COLOR."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradveil.core.text import plain
from gradveil.report import words
from gradveil.summary import CANNOT_TELL, LEAKS, UNREFUTED, NextStep, Summary

VERDICT_STYLES = {LEAKS: "bold red", CANNOT_TELL: "yellow", UNREFUTED: "yellow"}  # what needs attention; the rest stays plain


def table(summary: Summary) -> Table:
    """One line per defense: the verdict, what the worst attacks got, what it costs; below them the baseline."""
    costs = any(d.accuracy is not None for d in summary.defenses)
    cosines = not costs and any(d.cosine is not None for d in summary.defenses)
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    out.add_column("defense", overflow="fold", min_width=8)
    out.add_column("verdict", min_width=6)  # so far left that no narrow window hides it
    out.add_column("best attack", overflow="fold", min_width=6)
    for name in ("PSNR", "SSIM", "ASR"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("identified", justify="right", min_width=4)
    for name in ("accuracy", "PDM") if costs else ("cosine",) if cosines else ():
        out.add_column(name, justify="right", no_wrap=True)
    for defense in summary.defenses:
        extra = []
        if costs:
            extra = [words.percent(defense.accuracy, 1), words.digits(defense.loss, 1)]
        if cosines:
            extra = [words.digits(defense.cosine)]
        # Text, not strings: brackets in a spec are no markup.
        verdict = Text(defense.verdict, VERDICT_STYLES.get(defense.verdict, ""))
        best = Text(plain(defense.best.spec) if defense.best else words.NOTHING)
        out.add_row(Text(plain(defense.spec)), verdict, best, *words.figures(defense.worst), *extra)
    if summary.baseline:
        blanks = [""] * (2 * costs + cosines)
        out.add_section()
        out.add_row("baseline", "", "no update", *words.figures(summary.baseline), *blanks, style="dim")
    return out


def print_summary(summary: Summary, console: Console) -> None:
    """The table with its scope above it, and what to make of it below."""
    console.print(Text(plain(summary.scope), "dim"))
    console.print()
    console.print(table(summary))
    console.print()
    for caveat in words.caveats(summary):
        console.print(Text(f"Warning: {plain(caveat.text)}", "yellow"))
    for defense in summary.defenses:
        for warning in defense.warnings:
            console.print(Text(f"Warning ({plain(defense.spec)}): {plain(warning.text)}", "yellow"))
    for defense in summary.defenses:
        if defense.test:
            console.print(Text(f"Test of {plain(defense.spec)}: {words.evidence_line(defense.test)}.", "dim"))
    for defense in summary.defenses:
        if defense.line_up:
            console.print(Text(f"Line-up under {plain(defense.spec)}: {words.line_up_sentence(defense)}"))
    if scope := words.training_scope(summary):
        console.print(Text(plain(scope), "dim"))
    if summary.victims_needed:
        console.print(Text(words.needed_sentence(summary.victims_needed), "dim"))
    advice = summary.recommendation
    console.print(Text(plain(words.overall(summary))))
    console.print(Text.assemble(("Recommended: ", "bold") if advice.defense else "", plain(words.recommendation(summary))))
    for rejected in advice.rejected:
        console.print(Text(f"Not recommended: {plain(words.rejection(summary, rejected))}"))
    print_steps(advice.next_steps, console)


def print_steps(steps: Iterable[NextStep], console: Console) -> None:
    """What to do next, each with its command on one line."""
    for step in steps:
        console.print(Text.assemble(("Next: ", "bold"), plain(step.reason)))
        if step.command:
            console.print(Text(f"  {plain(step.command)}"), soft_wrap=True)  # to be copied as one line
