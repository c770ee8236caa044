"""Odd defenses under the quick suite: what they send in truth, and what an audit says.

    python benchmarks/odd_defenses.py run
    python benchmarks/odd_defenses.py write

`run` audits the defenses of `odd_gradients.py` and `odd_images.py` that are not stored yet, one part per defense. Each of
its processes keeps one run folder, so that the undefended control is computed once. `write` puts all stored parts into
docs/results/odd_defenses.md.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypedDict, get_args

import odd_gradients  # noqa: F401  (it registers defenses)
import odd_images  # noqa: F401
import torch
from odd_catalogue import ENTRIES, Odd
from stored_parts import command_line

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.auditing.verdict import Likenesses
from gradveil.metrics.leak_test import LEVEL
from gradveil.storage.files import write_json
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import CONTROL, LEAKS, NO_LEAK, Verdict

SETTINGS: Mapping[str, object] = {
    "data": "mnist-5k",
    "model": "odd_catalogue:small_network",
    "attacks": ["standard"],
    "budget": "quick",
    "victims": 4,
    "seed": 100,
}


class Part(TypedDict):
    """What the audit of one defense said."""

    defense: str
    verdict: str
    p: float | None
    alone: dict[str, float]  # p by each attack, or other look at the updates, alone
    warnings: list[str]
    failed: dict[str, str]
    seconds: float


def audit(name: str, folder: Path, settings: Mapping[str, object] = SETTINGS) -> Part:
    """Audit one defense in a folder that may hold audits of others."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    case = Case(make_spec({**settings, "defenses": [CONTROL if name == CONTROL else Odd(name)]}))
    run = run_audit(case, Execution(out=folder, workers=0))
    row = next(d for d in run.summary.defenses if d.spec.partition("@")[0] == name)
    cells = [RunFolder(folder).outcome(cell.key) for cell in make_plan(case) if cell.defense == row.spec]
    ran = [cell for cell in cells if cell.status == "ok" and cell.likeness]
    alone = {c.attack or c.kind: Likenesses.of(case, [c]).exchanged(case).p for c in ran}
    return {
        "defense": name,
        "verdict": row.verdict,
        "p": row.test.p if row.test else None,
        "alone": alone,
        "warnings": [notice.code for notice in row.warnings],
        "failed": {c.attack or c.kind: c.error or "" for c in cells if c.status != "ok"},
        "seconds": time.perf_counter() - begun,
    }


# -- all parts ---------------------------------------------------------------------------------------------------------


def do(names: Sequence[str], store: Path, worker: int) -> None:
    """Audit these defenses one after the other, in the folder of this worker."""
    for name in names:
        write_json(store / f"{name}.json", audit(name, store / f"audits-{worker}"))
        print(name, flush=True)


def run(options: argparse.Namespace) -> None:
    names = [CONTROL, *ENTRIES]
    wanted = {name for name in options.only or names if not (options.store / f"{name}.json").exists()}
    print(f"{len(wanted)} defenses to audit", flush=True)
    options.store.mkdir(parents=True, exist_ok=True)
    # A defense always gets the same folder, which may hold cells of an audit that was stopped.
    shares = [[name for name in names[i :: options.workers] if name in wanted] for i in range(options.workers)]
    with ProcessPoolExecutor(options.workers) as pool:
        for done in [pool.submit(do, share, options.store, i) for i, share in enumerate(shares)]:
            done.result()


# -- the page ----------------------------------------------------------------------------------------------------------


def is_missed(part: Part) -> bool:
    """Whether an image can be decoded, and the audit licenses the defense."""
    return ENTRIES[part["defense"]].truth == "decodable" and part["verdict"] == NO_LEAK


def is_false_alarm(part: Part) -> bool:
    return ENTRIES[part["defense"]].truth == "nothing" and part["verdict"] == LEAKS


def shown_by(part: Part) -> str:
    """By which attacks, or by the direct look, the leak is shown."""
    if part["verdict"] != LEAKS:
        return ", ".join(code for code in part["warnings"] if code != "single-draw")
    names = [NAMES.get(name, name) for name, p in sorted(part["alone"].items(), key=lambda item: item[1]) if p <= LEVEL]
    return ", ".join(names) or ("only-rescaled" if "only-rescaled" in part["warnings"] else "all together")


NAMES = {"look": "direct look"}
ORDER = ("decodable", "undecided", "nothing")


def page(parts: Mapping[str, Part]) -> Iterable[str]:
    """The lines of the page."""
    audited = sorted((name for name in ENTRIES if name in parts), key=lambda name: ORDER.index(ENTRIES[name].truth))
    missed = [name for name in audited if is_missed(parts[name])]
    alarms = [name for name in audited if is_false_alarm(parts[name])]
    count = {truth: sum(ENTRIES[name].truth == truth for name in audited) for truth in ORDER}
    said = Counter((ENTRIES[name].truth, parts[name]["verdict"]) for name in audited)
    yield from ("# Odd defenses", "")
    yield f"Written by `benchmarks/odd_defenses.py write` from audits of {len(audited)} defenses that no user should write."
    yield f"Settings: {', '.join(f'{name} {text(value)}' for name, value in SETTINGS.items())}."
    yield ""
    yield "- `decodable`: who knows the code, and not what was drawn in secret, can compute an image of the victim from the"
    yield "  update, at least for a share of the victims."
    yield "- `nothing`: the update does not depend on the image."
    yield "- `undecided`: neither is certain."
    yield ""
    yield f"`no leak shown` where an image can be decoded: **{len(missed)}** of {count['decodable']}{listed(missed)}."
    yield f"`leaks` where the update holds nothing: **{len(alarms)}** of {count['nothing']}{listed(alarms)}; the level is 5%."
    yield ""
    yield from (f"| truth | {' | '.join(VERDICTS)} |", f"|---{'|---' * len(VERDICTS)}|")
    for truth in ORDER:
        yield f"| {truth} | {' | '.join(str(said[truth, verdict]) for verdict in VERDICTS)} |"
    yield ""
    yield "The last column names the attacks that show the leak alone (p ≤ 0.05), or the warnings where no leak was shown."
    yield from ("", "| defense | sends | truth | verdict | p | shown by, or warnings |", "|---|---|---|---|---|---|")
    for name in audited:
        part, entry = parts[name], ENTRIES[name]
        p = "" if part["p"] is None else f"{part['p']:.3f}"
        yield f"| {name} | {entry.does} | {entry.truth} | {part['verdict']} | {p} | {shown_by(part)} |"
    seconds = [part["seconds"] for part in parts.values()]
    yield from ("", f"Without a defense: {parts[CONTROL]['verdict']}." if CONTROL in parts else "")
    yield f"Time per defense: {sum(seconds) / len(seconds):.0f} s on one core."


VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def add_options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--only", nargs="+", choices=[CONTROL, *ENTRIES], help="these defenses alone")
    running.add_argument("--workers", type=int, choices=(1, 2), default=2)


if __name__ == "__main__":
    command_line(__doc__, run, page, "odd_defenses.md", add_options)
