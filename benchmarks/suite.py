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
in [Concepts](../concepts.md). Sections with other attacks than the suite's name them in their command.
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
        f"Scope: {summary.scope}; suite {summary.suite}; {environment.seconds / 60:.0f} min on "
        f"{environment.cpus} processors with gradveil {environment.gradveil}, torch {environment.packages['torch']}. "
        f"With no update at all the class mean has {mean(summary.baseline.psnr, 1)} dB.",
        "",
        "| defense | strongest attack | PSNR | SSIM | ASR | identified | cosine to the true update | verdict |",
        "|---|---|---|---|---|---|---|---|",
        *(row(defense) for defense in summary.defenses),
        "",
        "### Every attack",
        "",
        "| defense | attack | PSNR | SSIM | identified | seconds |",
        "|---|---|---|---|---|---|",
        *(line for defense in summary.defenses for line in each(defense)),
        "",
    ]
    return "\n".join(lines)


def row(defense: DefenseRow) -> str:
    worst, best = defense.worst, defense.best
    if worst is None or best is None:
        return f"| `{defense.spec}` | no attack applies | | | | | | |"
    cosine = "" if defense.cosine is None else f"{defense.cosine:.2f}"
    return (
        f"| `{defense.spec}` | `{best.spec}` | {mean(worst.psnr, 1)} | {mean(worst.ssim, 2)} "
        f"| {worst.asr:.2f} | {rate(worst.identified)} | {cosine} | {defense.verdict} |"
    )


def each(defense: DefenseRow) -> list[str]:
    return [
        f"| `{defense.spec}` | `{a.spec}` | {mean(a.psnr, 1)} | {mean(a.ssim, 2)} | {rate(a.identified)} | {a.seconds:.0f} |"
        for a in defense.attacks
        if a.ok and a.against == "original"
    ]


def mean(statistic: Statistic | None, places: int) -> str:
    return f"{statistic.mean:.{places}f}" if statistic else ""


def rate(identified: Rate | None) -> str:
    return f"{identified.rate:.2f} ({identified.low:.2f}–{identified.high:.2f})" if identified else ""


if __name__ == "__main__":
    main()
