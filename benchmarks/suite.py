"""Write docs/results/suite.md: what the standard suite got under every defense.

    gradveil audit --defense … --attack standard --out RUN
    python benchmarks/suite.py RUN [RUN …]

Every number comes from a run's summary; the command that made it stands above its table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradveil.core.results import Rate, Statistic
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import DefenseRow, Summary

OUT = Path("docs/results/suite.md")
HEAD = """# The standard suite, defense by defense

Each row is one defense under its strongest attack, its counters included. `identified` is the share of victims whose image
is nearest to what was rebuilt among all others of its class, with its 95 % interval; PSNR, SSIM and ASR (share of images with
SSIM of 0.6 and more) take for every victim the attack that got most of it. What a verdict means, and what not, is told
in [Concepts](../concepts.md). The line-up is another risk: victims that someone who has them picks out of m images of their
class. Sections with other attacks than the suite's name them in their command. What the older suite got is
[kept](suite_v1.md).
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", type=Path, nargs="+")
    arguments.add_argument("--out", type=Path, default=OUT)
    options = arguments.parse_args()
    parts = [HEAD, *(section(folder) for folder in options.runs)]
    options.out.write_text("\n".join(parts), encoding="utf-8")
    print(options.out)


def section(folder: Path) -> str:
    summary, environment = Summary.read(folder), RunFolder(folder).environment
    assert environment is not None and summary.baseline is not None
    lines = [
        f"## {summary.case.model} on {summary.case.data}",
        "",
        f"`{summary.command}`",
        "",
        f"Scope: {summary.scope}; suite {summary.suite}; {cpu_seconds(folder) / 60:.0f} CPU minutes, all cells together, "
        f"with gradveil {environment.gradveil}, torch {environment.packages['torch']}. "
        f"With no update at all the class mean has {mean(summary.baseline.psnr, 1)} dB.",
        "",
        "| defense | strongest attack | PSNR | SSIM | ASR | identified | cosine to the true update | verdict | line-up |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row(defense) for defense in summary.defenses),
        "",
        "### Every attack",
        "",
        "| defense | attack | PSNR | SSIM | identified | CPU seconds |",
        "|---|---|---|---|---|---|",
        *(line for defense in summary.defenses for line in each(defense, RunFolder(folder))),
        "",
    ]
    return "\n".join(lines)


def row(defense: DefenseRow) -> str:
    worst, best = defense.worst, defense.best
    if worst is None or best is None:
        return f"| `{defense.spec}` | no attack applies | | | | | | | {line_up(defense)} |"
    cosine = "" if defense.cosine is None else f"{defense.cosine:.2f}"
    return (
        f"| `{defense.spec}` | `{best.spec}` | {mean(worst.psnr, 1)} | {mean(worst.ssim, 2)} "
        f"| {worst.asr:.2f} | {rate(worst.identified)} | {cosine} | {defense.verdict} | {line_up(defense)} |"
    )


def line_up(defense: DefenseRow) -> str:
    risk = defense.line_up
    return "" if risk is None else f"{sum(rank == 1 for rank in risk.ranks)} of {len(risk.ranks)}, m = {risk.m}"


def cpu_seconds(folder: Path) -> float:
    """Of all cells of the run."""
    run = RunFolder(folder)
    return sum(run.outcome(file.stem).cpu_seconds or 0.0 for file in (folder / "cells").glob("*.json"))


def each(defense: DefenseRow, run: RunFolder) -> list[str]:
    return [
        f"| `{defense.spec}` | `{a.spec}` | {mean(a.psnr, 1)} | {mean(a.ssim, 2)} | {rate(a.identified)} "
        f"| {run.outcome(a.cell).cpu_seconds or 0:.0f} |"
        for a in defense.attacks
        if a.ok and a.against == "original"
    ]


def mean(statistic: Statistic | None, places: int) -> str:
    return f"{statistic.mean:.{places}f}" if statistic else ""


def rate(identified: Rate | None) -> str:
    return f"{identified.rate:.2f} ({identified.low:.2f}–{identified.high:.2f})" if identified else ""


if __name__ == "__main__":
    main()
