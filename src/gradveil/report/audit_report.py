"""`Report`: what `gradveil.audit` returns. The summary of a run, and a few ways to look at it."""

from __future__ import annotations

import math
import os
import shutil
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradveil.auditing.export import choose_defense, export
from gradveil.auditing.spec import PictureMode
from gradveil.core.errors import UserError
from gradveil.core.results import Rate, Statistic
from gradveil.core.text import plain
from gradveil.processes.ending import orderly
from gradveil.processes.temporary import TemporaryFolder
from gradveil.protection.audited import Protection
from gradveil.report import words
from gradveil.report.chart import privacy_utility
from gradveil.report.html import write_report
from gradveil.report.page import page
from gradveil.storage.files import make_private, write_atomic, write_text
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import CANNOT_TELL, LEAKS, NO_LEAK, UNREFUTED, Summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = tuple(Statistic.model_fields)
_NESTED = {**dict.fromkeys(("psnr", "ssim", "mse", "lpips"), _PARTS), "identified": tuple(Rate.model_fields)}
_FIRST = ("defense", "attack", "against", "knowledge", "status", "adaptive", "claimed", "updates", "scored", "failed")


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """The finding of an audit, and the folder of its run if it has one."""

    summary: Summary
    folder: Path | None = None

    @classmethod
    def load(cls, folder: str | Path) -> Report:
        """The report of a stored run."""
        return cls(Summary.read(Path(folder)), Path(folder))

    @classmethod
    def written(cls, folder: Path, summary: Summary, pictures: PictureMode) -> Report:
        """The report of a run that has just ended, with its page."""
        write_report(folder, pictures)
        return cls(summary, folder)

    def to_frame(self) -> pd.DataFrame:
        """One row per defense, attack and truth it is scored against; `psnr.mean` becomes `psnr_mean`."""
        import pandas as pd

        rows = []
        for defense in self.summary.defenses:
            shared: dict[str, object] = {"verdict": defense.verdict, "stage": "+".join(defense.stage)}
            for group, costs in (("utility", defense.utility), ("gradient", defense.gradient)):
                shared |= {f"{group}_{name}": value for name, value in (costs or ())}
            for attack in defense.attacks:
                row: dict[str, object] = {"defense": defense.spec, "attack": attack.spec}
                for name, value in (*attack, *attack.others.items()):
                    parts = _NESTED.get(name, _PARTS if isinstance(value, Statistic) else ())
                    row |= {f"{name}_{part}": getattr(value, part, math.nan) for part in parts} or {name: value}
                rows.append(row | shared)
        frame = pd.DataFrame(rows, columns=None if rows else list(_FIRST))
        frame = frame.drop(columns=["spec", "others"], errors="ignore")
        return frame[[*_FIRST, *(name for name in frame if name not in _FIRST)]]

    def plot(self, ax: Axes | None = None) -> Figure:
        """Leakage against cost, one point per defense, with confidence intervals."""
        from matplotlib.figure import Figure

        chart = privacy_utility(self.summary)
        if chart is None:
            raise UserError("nothing to plot: no defense has both an identified rate and a measured cost.")
        if ax is None:
            ax = Figure(figsize=(6.4, 4.4), layout="constrained").add_subplot()
        marks = {LEAKS: ("o", "#b3261e"), NO_LEAK: ("D", "#1f5f99"), UNREFUTED: ("s", "#8a5a00"), CANNOT_TELL: ("x", "#666666")}
        for point in chart.points:
            rate, (marker, colour) = point.rate, marks[point.defense.verdict]
            error = [[max(0.0, rate.rate - rate.low)], [max(0.0, rate.high - rate.rate)]]
            ax.errorbar(point.cost, rate.rate, error, marker=marker, color=colour, capsize=3, linestyle="none")
            right = point.x < (chart.frame.left + chart.frame.right) / 2  # the label stays inside the frame
            offset = (6 if right else -6, -11 if rate.rate > 0.9 else 5)
            # A dollar sign would start a formula.
            name = plain(point.defense.spec).replace("$", r"\$")
            side = "left" if right else "right"
            ax.annotate(name, (point.cost, rate.rate), offset, textcoords="offset points", ha=side, fontsize=8)
        ax.set_xlabel(chart.x_title)
        ax.set_ylabel("identified private images")
        ax.set_ylim(-0.03, 1.03)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if not chart.by_loss:
            ax.xaxis.set_major_formatter(lambda value, _: f"{1 - value:.2f}")
        ax.margins(x=0.12)
        ax.grid(alpha=0.25)
        return ax.figure.figure

    def export(self, defense: str | None = None, accept_leak: bool = False) -> Protection:
        """An audited defense with its task, local training and units: the recommended or only one, or the one named."""
        if self.folder is None:
            raise UserError("this report has no folder; export needs the stored cells of a run.")
        return export(RunFolder(self.folder), self.summary, choose_defense(self.summary, defense), accept_leak)

    def save(self, folder: str | Path, pictures: PictureMode | None = None) -> Path:
        """Copy the run's folder there (or write the summary alone, if there is none), with its page.

        `pictures`: none, blurred or shown in the page; None: as the audit had it.
        """
        target = Path(folder)
        if self.folder is not None and target.exists() and target.samefile(self.folder):
            return target
        if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{target} is already there, and not an empty folder; choose another one.")
        make_private(target.parent)
        with orderly(), TemporaryFolder(beside=target.parent) as part:
            if self.folder is not None:
                _copy(self.folder, part)
            write_text(part / "summary.json", self.summary.model_dump_json(indent=1) + "\n")
            write_report(part, pictures)
            if target.exists():
                target.rmdir()
            os.replace(part, target)
        return target

    def _repr_html_(self) -> str:
        return page("notebook.html.j2", summary=self.summary)

    def __repr__(self) -> str:
        return f"<Report: {words.overall(self.summary)} {self.summary.scope}>"


def _copy(source: Path, target: Path) -> None:
    """Copy a run's files, private as all of them are. Links and special files, which no run makes, stay behind."""
    for folder, _, names in os.walk(source):
        to = target / os.path.relpath(folder, source)
        make_private(to)
        for name in names:
            if stat.S_ISREG(os.lstat(os.path.join(folder, name)).st_mode):
                write_atomic(to / name, partial(shutil.copyfile, os.path.join(folder, name)))
