"""What leaks in practice: every preset of a real federation under six defenses, in plain words.

    GRADVEIL_DATA=… python benchmarks/practice.py run --presets flower-quickstart --minutes 60 --runs FOLDER
    python benchmarks/practice.py write

A defense is attacked only until it leaks. `run` does the audits that are not stored yet, each within its minutes; one that
was interrupted goes on from its folder in `--runs`. `write` puts all stored audits into docs/results/practice.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nets import facts
from stored_parts import command_line, commands, table

from gradveil.auditing.case import Case
from gradveil.auditing.fit import fit
from gradveil.auditing.limits import Execution
from gradveil.auditing.presets import PRESETS
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.auditing.utility import UtilityTraining
from gradveil.report.words import line_up_sentence, overall, verdict_sentence
from gradveil.storage.files import write_json
from gradveil.summary import DefenseRow

DEFENSES = ["clip", "gaussian:relative=1.0", "prune:ratio=0.9", "soteria", "percentile", "dpsgd"]
FEWER = {"groupnorm-adam": {"victims": 2}, "chest-labels": {"victims": 4}}  # an hour of one core each otherwise
PRICED = {"medical-resnet": "percentile"}  # the filter of hospitals, where they train


def run(options: argparse.Namespace) -> None:
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.presets:
        file = options.store / f"{name}-{options.seed}.json"
        if not file.exists():
            settings = {"preset": name, "defenses": DEFENSES, "until_leak": True, **FEWER.get(name, {})}
            asked = Case(make_spec({**settings, "seed": options.seed}))
            deadline = time.monotonic() + 60 * options.minutes
            fitted = fit(asked, options.minutes, options.workers, deadline)
            spec = fitted.case.spec.model_copy(update={"utility": UtilityTraining() if name in PRICED else None})
            execution = Execution(out=options.runs / f"{name}-{options.seed}", workers=options.workers)
            unpriced = {defense for defense in DEFENSES if defense != PRICED.get(name)}
            summary = run_audit(Case(spec), execution, deadline=deadline, unpriced=unpriced).summary
            part = {"preset": name, "suite": summary.suite, "command": summary.command, "scope": summary.scope}
            part |= {"images": spec.victims * spec.batch_size, "minutes": options.minutes, "note": fitted.note}
            rows = [{**fact, **in_words(row)} for fact, row in zip(facts(summary), summary.defenses, strict=True)]
            write_json(file, {**part, "overall": overall(summary), "defenses": rows})
            print(name, overall(summary), flush=True)


def in_words(row: DefenseRow) -> dict[str, Any]:
    """Both risks of a defense."""
    risk = row.line_up
    first = None if risk is None else f"{sum(rank == 1 for rank in risk.ranks)} of {len(risk.ranks)}, m = {risk.m}"
    cost = row.utility.model_dump(include={"acc_test", "pdm", "low", "high", "overhead"}) if row.utility else None
    return {"sentence": verdict_sentence(row), "line_up": first, "line_up_sentence": line_up_sentence(row), "cost": cost}


def page(parts: dict[str, dict[str, Any]]) -> Iterable[str]:
    yield from ("# What leaks in practice", "")
    yield "Federations as they are: local epochs, optimizers, BatchNorm, weight differences (`gradveil list presets`). Each was"
    yield "audited within so many minutes, with what fits; what was left out stands below its table. A defense is attacked only"
    yield "until it leaks, so all attacks together may get more of it. Identified: images that are picked out of all others of"
    yield "their class by what was rebuilt. Who has an image asks for the line-up."
    missing = [f"`{name}`" for name in PRESETS if name not in {part["preset"] for part in parts.values()}]
    yield from ("", f"Not audited yet: {', '.join(missing)}.") if missing else ()
    for part in parts.values():
        yield from ("", f"## {part['preset']}", "", f"{PRESETS[part['preset']].description}.", "", part["overall"])
        yield from table(("defense", "verdict", "identified", "PSNR", "line-up"), (row(r, part) for r in part["defenses"]))
        control = part["defenses"][0]
        yield from ("", f"{control['sentence']} {control['line_up_sentence'] or ''}".rstrip(), "")
        yield f"{part['scope']}; {part['note']}."
        yield from (cost_sentence(fact, control["cost"]) for fact in part["defenses"][1:] if fact["cost"])
    yield from commands("The commands:", (part["command"] for part in parts.values()))


def cost_sentence(fact: dict[str, Any], undefended: dict[str, float]) -> str:
    cost = fact["cost"]
    loss = f"{cost['pdm']:.1f}% of the accuracy ({cost['low']:.1f} to {cost['high']:.1f})"
    without = f"{undefended['acc_test']:.1%} of test images are right"
    return f"`{fact['defense']}` costs {loss} and {cost['overhead']:.1f} times the time; without it {without}."


def row(fact: dict[str, Any], part: dict[str, Any]) -> Iterable[object]:
    rate, psnr = fact["identified"], fact["psnr"]
    identified = "" if rate is None else f"{round(rate * part['images'])} of {part['images']}"
    yield from (
        f"`{fact['defense']}`",
        fact["verdict"],
        identified,
        "" if psnr is None else f"{psnr:.1f} dB",
        fact["line_up"] or "",
    )


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    running.add_argument("--seed", type=int, default=100)
    running.add_argument("--minutes", type=float, default=120)
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--runs", type=Path, required=True, help="folder of the runs, to go on after an interruption")


if __name__ == "__main__":
    command_line(__doc__, run, page, "practice.md", add_options)
