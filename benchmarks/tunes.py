"""Searches for the cheapest setting that survives, on presets of real federations.

    GRADVEIL_DATA=… python benchmarks/tunes.py run --presets small-clients --runs FOLDER
    python benchmarks/tunes.py write

`run` does the searches that are not stored yet; one that was interrupted goes on from its folder in `--runs`. `write` puts all
of them into docs/results/tunes.md. Times are CPU time of all cells, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stored_parts import command_line, commands, table

from gradveil.auditing.limits import Execution
from gradveil.auditing.presets import preset
from gradveil.auditing.spec import make_spec
from gradveil.auditing.tuning.results import FRESH
from gradveil.auditing.tuning.run import run_tune
from gradveil.auditing.tuning.spec import TuneSpec
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder

TWO: dict[str, object] = {"defenses": ["gaussian:relative=1.0", "dpsgd:noise=0.1"], "strengths": 4}
TUNES: dict[str, dict[str, object]] = {
    "flower-quickstart": {**TWO, "utility": {"rounds": 150}},  # by default 63, after which its rate has taught little
    "small-clients": TWO,
    "frozen-backbone": {},
    "vit-finetune": TWO,
}


def run(options: argparse.Namespace) -> None:
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.presets:
        file = options.store / f"{name}.json"
        if not file.exists():
            spec = make_spec({**preset(name), **TUNES[name], "seed": options.seed}, TuneSpec)
            assert isinstance(spec, TuneSpec)
            tune = run_tune(spec, Execution(out=options.runs / f"{name}-{options.seed}", workers=options.workers))
            folders = [tune.folder, *([tune.folder / FRESH] if tune.fresh else [])]
            tuned = tune.tuned.model_dump(mode="json", by_alias=True)
            write_json(file, {"cpu_seconds": sum(map(cpu_seconds, folders)), "tuned": tuned})
            print(name, tune.tuned.text, flush=True)


def cpu_seconds(folder: Path) -> float:
    return sum(cell.cpu_seconds or 0.0 for cell in RunFolder(folder).cells.values())


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# The cheapest setting that survives, on presets", "")
    yield "`gradveil tune` from scratch: settings that leak are attacked only until that is seen, settings that hold by the"
    yield "whole suite with their counters; accuracy by paired seeds with a learning rate of its own; the best again on fresh"
    yield "victims. Identified is of all images by all attacks together, line-up of victims. The loss is in percent of the"
    yield "undefended accuracy, with its 95% interval; time is that of a round beside an undefended one."
    for name in [name for name in TUNES if name in parts]:
        tuned = parts[name]["tuned"]
        yield from ("", f"## {name}", "", f"{tuned['scope']}.", "")
        yield f"**{tuned['text']}**"
        head = ("setting", "verdict", "p", "identified", "line-up", "loss, %", "time", "on fresh victims")
        yield from table(head, map(row, [{"spec": "none", **tuned["control"]}, *tuned["settings"]]))
        yield from ("", f"The search took {parts[name]['cpu_seconds'] / 60:.0f} minutes of one core.")
    yield from commands("The commands:", (parts[name]["tuned"]["command"] for name in TUNES if name in parts))


def row(setting: dict[str, Any]) -> Iterable[str]:
    yield f"`{setting['spec']}`"
    yield from finding(setting)
    measured = setting.get("loss") is not None
    yield f"{setting['loss']:.1f} ({setting['low']:.1f} to {setting['high']:.1f})" if measured else ""
    yield f"{setting['overhead']:.1f}×" if setting.get("overhead") else ""
    fresh = setting.get("fresh")
    yield f"{fresh['verdict']}, p {fresh['p']}, line-up {share(fresh['line_up'])}" if fresh else ""


def finding(setting: dict[str, Any]) -> Iterable[str]:
    yield setting["verdict"]
    yield "" if setting["p"] is None else f"{setting['p']:.3f}"
    yield share(setting["identified"])
    yield share(setting["line_up"])


def share(rate: dict[str, float] | None) -> str:
    return "" if rate is None else f"{rate['rate']:.0%}"


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--presets", nargs="+", choices=TUNES, default=list(TUNES))
    running.add_argument("--seed", type=int, default=100)
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--runs", type=Path, required=True, help="folder of the searches, to go on after an interruption")


if __name__ == "__main__":
    command_line(__doc__, run, page, "tunes.md", add_options)
