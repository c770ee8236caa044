"""`Report`: what `gradveil.auditing` returns. The summary as it stands in `summary.json`, and a few ways to look at it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.core.errors import UserError
from gradveil.core.text import plain
from gradveil.report import words
from gradveil.report.chart import privacy_utility
from gradveil.report.folder import read_summary
from gradveil.report.html import PictureMode, write_report
from gradveil.report.page import page
from gradveil.report.view import LEAKS, METRICS, NO_LEAK, UNREFUTED, SummaryView, mapping, texts
from gradveil.storage.files import write_json

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NESTED = {
    **dict.fromkeys(METRICS, ("mean", "std", "min", "max")),
    "identified": ("rate", "low", "high", "chance"),
}
_FIRST = ("defense", "attack", "against", "knowledge", "status", "adaptive", "updates", "scored", "failed")


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """The finding of an audit, and the folder of its run if it has one."""

    summary: dict[str, Any]
    folder: Path | None = None

    @classmethod
    def load(cls, folder: str | Path) -> Report:
        """The report of a stored run."""
        return cls(read_summary(Path(folder)), Path(folder))

    def to_frame(self) -> pd.DataFrame:
        """One row per defense, attack and truth it is scored against; `psnr.mean` becomes `psnr_mean`."""
        import pandas as pd

        rows = []
        for defense in self.summary.get("defenses") or []:
            shared = {"verdict": defense.get("verdict"), "stage": "+".join(texts(defense.get("stage")))}
            for group in ("utility", "gradient"):
                shared |= {f"{group}_{k}": v for k, v in mapping(defense.get(group)).items()}
            for attack in defense.get("attacks") or []:
                named = {"defense": defense.get("spec"), "attack": attack.get("spec")}
                rows.append(named | _flat({k: v for k, v in attack.items() if k != "spec"}) | shared)
        frame = pd.DataFrame(rows)
        measured = [f"{key}_{part}" for key, parts in _NESTED.items() for part in parts]
        frame = frame.astype({name: float for name in measured if name in frame})  # null becomes NaN
        first = [name for name in _FIRST if name in frame]
        return frame[[*first, *(name for name in frame if name not in first)]]

    def plot(self, ax: Axes | None = None) -> Figure:
        """Leakage against cost, one point a defense, with confidence intervals."""
        from matplotlib.figure import Figure

        view = SummaryView.read(self.summary)
        chart = privacy_utility(view)
        if chart is None:
            raise UserError("nothing to plot: no defense has both an identified rate and a measured cost.")
        if ax is None:
            ax = Figure(figsize=(6.4, 4.4), layout="constrained").add_subplot()
        marks = {LEAKS: ("o", "#b3261e"), NO_LEAK: ("D", "#1f5f99"), UNREFUTED: ("s", "#8a5a00")}
        for point in chart.points:
            rate, (marker, colour) = point.defense.identified, marks.get(point.defense.verdict, ("x", "#666666"))
            if rate is None:
                continue
            low = rate.rate if rate.low is None else rate.low
            high = rate.rate if rate.high is None else rate.high
            error = [[max(0.0, rate.rate - low)], [max(0.0, high - rate.rate)]]
            ax.errorbar(point.cost, rate.rate, error, marker=marker, color=colour, capsize=3, linestyle="none")
            right = point.x < (chart.left + chart.right) / 2  # the label stays inside the frame
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

    def save(self, folder: str | Path, pictures: PictureMode = "blurred") -> Path:
        """Copy the run's folder there (or write the summary alone, if there is none), with its page."""
        target = Path(folder)
        if self.folder is not None and target.exists() and target.samefile(self.folder):
            return target
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{target} is already there and not empty; choose another folder.")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=target.parent, prefix=".gradveil-", suffix=".part"))
        try:
            if self.folder is not None:
                shutil.copytree(self.folder, part, dirs_exist_ok=True)
            write_json(part / "summary.json", self.summary)
            if not (part / "report.html").exists():
                write_report(part, pictures)
            if target.exists():
                target.rmdir()
            os.replace(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return target

    def _repr_html_(self) -> str:
        view = SummaryView.read(self.summary)
        return page("notebook.html.j2", view=view, choice=words.recommend(view))

    def __repr__(self) -> str:
        view = SummaryView.read(self.summary)
        return f"<Report: {words.overall(view)} {words.scope(view)}>"


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Nested objects as columns of their own; a metric that is null still has its columns, empty."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key in _NESTED or isinstance(value, Mapping):
            given = mapping(value)
            flat |= {f"{key}_{part}": given.get(part) for part in dict.fromkeys([*_NESTED.get(key, ()), *given])}
        else:
            flat[key] = value
    return flat
