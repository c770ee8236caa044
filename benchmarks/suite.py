"""Write docs/results/suite.md: what the standard suite got under every defense.

    gradveil audit --defense … --attack standard --out RUN
    python benchmarks/suite.py RUN [RUN …]

Every number comes from a run's summary; the command that made it stands above its table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
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
    given = arguments.parse_args()
    parts = [HEAD, *(section(folder) for folder in given.runs)]
    given.out.write_text("\n".join(parts), encoding="utf-8")
    print(given.out)


def section(folder: Path) -> str:
    summary, environment = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "environment"))
    lines = [
        f"## {summary['case']['model']} on {summary['case']['data']}",
        "",
        f"`{summary['command']}`",
        "",
        f"Scope: {summary['scope']}; suite {summary['suite']}; {environment['seconds'] / 60:.0f} min on "
        f"{environment['cpus']} processors with gradveil {environment['gradveil']}, torch {environment['packages']['torch']}. "
        f"With no update at all the class mean has {summary['baseline']['psnr']['mean']:.1f} dB.",
        "",
        "| defense | strongest attack | PSNR | SSIM | ASR | identified | cosine to the true update | verdict |",
        "|---|---|---|---|---|---|---|---|",
        *(row(defense) for defense in summary["defenses"]),
        "",
        "### Every attack",
        "",
        "| defense | attack | PSNR | SSIM | identified | seconds |",
        "|---|---|---|---|---|---|",
        *(line for defense in summary["defenses"] for line in each(defense)),
        "",
    ]
    return "\n".join(lines)


def row(defense: Json) -> str:
    worst = defense["worst"]
    if not worst:
        return f"| `{defense['spec']}` | no attack applies | | | | | | |"
    cosine = (defense["gradient"] or {}).get("cosine")
    return (
        f"| `{defense['spec']}` | `{strongest(defense)['spec']}` | {worst['psnr']['mean']:.1f} | {worst['ssim']['mean']:.2f} "
        f"| {worst['asr']:.2f} | {rate(worst['identified'])} | {'' if cosine is None else f'{cosine:.2f}'} "
        f"| {defense['verdict']} |"
    )


def each(defense: Json) -> list[str]:
    return [
        f"| `{defense['spec']}` | `{a['spec']}` | {a['psnr']['mean']:.1f} | {a['ssim']['mean']:.2f} "
        f"| {rate(a['identified'])} | {a['seconds']:.0f} |"
        for a in tried(defense)
    ]


def tried(defense: Json) -> list[Json]:
    return [a for a in defense["attacks"] if a["status"] == "ok" and a["against"] == "original"]


def strongest(defense: Json) -> Json:
    return max(tried(defense), key=lambda a: (a["identified"]["rate"], a["ssim"]["mean"]))


def rate(found: Json) -> str:
    return f"{found['rate']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


if __name__ == "__main__":
    main()
