"""`TuneReport`: what `gradveil.tune` returns. What was tried, what to take, and the page with the frontier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gradveil.auditing.export import requirement, usage
from gradveil.auditing.spec import PictureMode
from gradveil.auditing.tuning.results import FILE, FRESH, PAGE, Finding, TriedSetting, TuneSummary
from gradveil.auditing.tuning.run import FinishedTune
from gradveil.certification.certificate import percent as rounded_percent
from gradveil.core.errors import UserError
from gradveil.core.text import plain
from gradveil.protection import audited
from gradveil.protection.audited import Protection
from gradveil.report import words
from gradveil.report.audit_report import Report
from gradveil.report.chart import privacy_utility
from gradveil.report.fitted_table import FittedColumn, FittedTable
from gradveil.report.html import write_report
from gradveil.report.page import page
from gradveil.report.terminal import VERDICT_STYLES, print_steps
from gradveil.storage.files import write_text
from gradveil.summary import Summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False, eq=False)
class TuneReport:
    """The finding of a tune, and its folder. `searched` is the report of all settings that were tried."""

    summary: TuneSummary
    searched: Report
    folder: Path

    @classmethod
    def load(cls, folder: str | Path) -> TuneReport:
        """The report of a stored tune."""
        return cls(TuneSummary.read(Path(folder)), Report.load(folder), Path(folder))

    @classmethod
    def written(cls, run: FinishedTune, pictures: PictureMode) -> TuneReport:
        """The report of a tune that has just ended, with its pages."""
        write_report(run.folder, pictures)
        if run.fresh is not None:
            write_report(run.folder / FRESH, pictures)
        write_tune_page(run.folder, run.searched)
        return cls(run.tuned, Report(run.searched, run.folder), run.folder)

    @property
    def protection(self) -> Protection:
        """The recommended defense with its task, local training and units."""
        if self.summary.protection is None:
            raise UserError(self.summary.text)
        return Protection.read(self.folder / self.summary.protection)

    def to_frame(self) -> pd.DataFrame:
        """One row per setting that was tried; intervals and rates in columns of their own."""
        import pandas as pd

        return pd.json_normalize([setting.model_dump() for setting in self.summary.settings], sep="_")

    def plot(self, ax: Axes | None = None) -> Figure:
        """Leakage against cost of the settings whose cost was measured, with confidence intervals."""
        return self.searched.plot(ax)

    def _repr_html_(self) -> str:
        return page("tune_notebook.html.j2", tune=self.summary, rows=rows(self.summary))

    def __repr__(self) -> str:
        return f"<TuneReport: {self.summary.text}>"


# Of the terminal's table; the interval of the line-up is on the page.
_COLUMNS = {"identified": "identified", "line-up": "line_up_rate", "proved": "promised", "loss, %": "loss"}
_LEFT_OUT = {"line-up": 2, "proved": 1}  # in a narrow window


@dataclass(frozen=True)
class TuneRow:
    """One line of the table, as texts."""

    spec: str
    verdict: str
    basis: str
    p: float | None
    identified: str
    line_up: str
    line_up_rate: str
    promised: str
    loss: str
    setting: TriedSetting | None = None  # None: the control


def rows(tuned: TuneSummary) -> list[TuneRow]:
    """The control, then family by family the settings from weak to strong."""
    lines = [TuneRow("none", *_seen(tuned.control), words.NOTHING, "0")]
    for s in tuned.settings:
        promised = words.NOTHING if s.promised is None else rounded_percent(s.promised)
        loss = words.digits(s.loss, 1)
        if s.low is not None and s.high is not None:
            loss += f" ±{(s.high - s.low) / 2:.1f}"
        lines.append(TuneRow(s.spec, *_seen(s), promised, loss, s))
        if s.fresh:
            lines.append(TuneRow("… fresh victims", *_seen(s.fresh), "", ""))
    return lines


def _seen(finding: Finding) -> tuple[str, str, float | None, str, str, str]:
    rate = words.percent(finding.line_up.rate if finding.line_up else None)
    rates = words.rate_text(finding.identified), words.rate_text(finding.line_up), rate
    return finding.verdict, finding.basis, finding.p, *rates


def render(tuned: TuneSummary, searched: Summary) -> str:
    """The page as text. It depends on the two summaries alone."""
    best = next((row for row in searched.defenses if row.spec == tuned.recommended), None)
    return page(
        "tune.html.j2",
        tune=tuned,
        summary=searched,
        rows=rows(tuned),
        chart=privacy_utility(searched),
        uses=usage(best, searched.case) if best else [],
        use_requirement=requirement(searched.case),
        protection_file=audited.FILE,
        fresh=FRESH,
    )


def write_tune_page(folder: Path, searched: Summary) -> None:
    """Write `tune.html`, if the folder holds a tune."""
    if (folder / FILE).is_file():
        write_text(folder / PAGE, render(TuneSummary.read(folder), searched))


def print_tune(report: TuneReport, console: Console) -> None:
    """The table of all settings with the scope above it, and what to make of it below."""
    tuned = report.summary
    console.print(Text(plain(tuned.scope), "dim"))
    console.print()
    lines = rows(tuned)
    columns = {name: [getattr(row, field) for row in lines] for name, field in _COLUMNS.items()}
    columns = {name: texts for name, texts in columns.items() if any(text not in ("", words.NOTHING) for text in texts)}
    numbers = [FittedColumn(name, "right", left_out=_LEFT_OUT.get(name, 0)) for name in columns]
    table = FittedTable([FittedColumn("setting"), FittedColumn("verdict"), *numbers])
    for i, row in enumerate(lines):
        style = "bold" if row.setting and row.spec == tuned.recommended else ""
        verdict = Text(row.verdict, VERDICT_STYLES.get(row.verdict, ""))
        table.add_row(plain(row.spec), verdict, *(texts[i] for texts in columns.values()), style=style)
    console.print(table)
    console.print()
    for family in tuned.families:
        console.print(Text(f"{plain(family.family)}: {plain(family.text)}"))
    for note in tuned.notes:
        console.print(Text(plain(note), "dim"))
    if scope := words.training_scope(report.searched.summary):
        console.print(Text(plain(scope), "dim"))
    console.print(Text.assemble(("Recommended: ", "bold") if tuned.recommended else "", plain(tuned.text)))
    print_steps(tuned.next_steps, console)
