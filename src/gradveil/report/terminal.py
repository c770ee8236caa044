"""The summary as a table for a terminal. It fits the width of the console; rich honours NO_COLOR."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from gradveil.core.text import plain
from gradveil.report import words
from gradveil.report.fitted_table import FittedColumn, FittedTable
from gradveil.summary import CANNOT_TELL, LEAKS, UNREFUTED, NextStep, Summary

VERDICT_STYLES = {LEAKS: "bold red", CANNOT_TELL: "yellow", UNREFUTED: "yellow"}  # what needs attention; the rest stays plain


def table(summary: Summary) -> FittedTable:
    """One line per defense: the verdict, what the worst attacks got, what it costs; below them the baseline."""
    costs = any(d.accuracy is not None for d in summary.defenses)
    cosines = not costs and any(d.cosine is not None for d in summary.defenses)
    columns = [FittedColumn("defense"), FittedColumn("verdict"), FittedColumn("best attack", left_out=1)]
    columns += [FittedColumn("PSNR", "right", 2), FittedColumn("SSIM", "right", 6), FittedColumn("ASR", "right", 5)]
    columns += [FittedColumn("identified", "right")]
    columns += [FittedColumn("accuracy", "right", 3), FittedColumn("PDM", "right", 4)] if costs else []
    columns += [FittedColumn("cosine", "right", 7)] if cosines else []
    out = FittedTable(columns)
    for defense in summary.defenses:
        extra = []
        if costs:
            extra = [words.percent(defense.accuracy, 1), words.digits(defense.loss, 1)]
        if cosines:
            extra = [words.digits(defense.cosine)]
        verdict = Text(defense.verdict, VERDICT_STYLES.get(defense.verdict, ""))
        best = plain(defense.best.spec) if defense.best else words.NOTHING
        out.add_row(plain(defense.spec), verdict, best, *words.figures(defense.worst), *extra)
    if summary.baseline:
        out.add_section()
        out.add_row("baseline", "", "no update", *words.figures(summary.baseline), style="dim")
    return out


def print_summary(summary: Summary, console: Console) -> None:
    """The table with its scope above it, and what to make of it below."""
    console.print(Text(plain(summary.scope), "dim"))
    console.print()
    console.print(table(summary))
    console.print()
    rows = [row for defense in summary.defenses for row in defense.attacks if row.status == "not applicable"]
    for reason in dict.fromkeys(row.error or row.spec for row in rows):  # most are the same under every defense
        console.print(Text(f"Not applicable: {plain(reason)}", "dim"))
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
