"""Faults of 0.1.0 in stored results: pages that showed or told too much, tensors left behind, cells that were swapped."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from pathlib import Path

from old_case import CLOCK, TRAIN, Place, case


@case("the page is for its owner alone")
def page_mode(place: Place) -> str | None:
    place.gradveil(*place.audit_words())
    mode = stat.S_IMODE((place.folder / "run" / "report.html").stat().st_mode)
    return None if mode == 0o600 else f"mode {mode:o}"


@case("the blurred page does not hold the clear pictures")
def page_blur(place: Place) -> str | None:
    place.gradveil(*place.audit_words())
    file = place.folder / "run" / "report.html"
    place.gradveil("report", "run", "--pictures", "shown", "--quiet")
    shown = {part[:200] for part in file.read_text().split("data:image/png;base64,")[1:]}
    done = place.gradveil("report", "run", "--pictures", "blurred", "--quiet")
    if not shown or done.returncode:
        return "no pictures on the page"
    text = file.read_text()
    return "they are in it" if any(part in text for part in shown) else None


@case("SIGTERM leaves no tensors behind")
def terminated(place: Place) -> str | None:
    temporary = place.folder / "tmp"
    temporary.mkdir()
    text = TRAIN + (
        "data = (torch.rand(300, 1, 6, 6), torch.arange(300) % 3)\n"
        "print('go', flush=True)\n"
        "gv.audit(data, net, ['none', 'prune:ratio=0.5'], ['linear', 'ig:steps=100000'], victims=2, quiet=True)\n"
    )
    environment = {**place.environment, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", text], cwd=place.folder, env=environment, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        until = time.monotonic() + CLOCK / 2
        while time.monotonic() < until and not any(p.is_file() for p in temporary.rglob("*")):
            time.sleep(0.1)
        time.sleep(5)
        job.terminate()
        job.wait(CLOCK)
    left = list(temporary.rglob("*.safetensors"))
    return f"{len(left)} files of tensors" if left else None


def _verdicts(run: Path) -> list[tuple[str, str, object]]:
    summary = json.loads((run / "summary.json").read_text())
    return [(d["spec"], d["verdict"], d["worst"]) for d in summary["defenses"]]


@case("swapped cells are noticed")
def swapped_cells(place: Place) -> str | None:
    """The attack on undefended updates and the attack on pruned ones, each in the file of the other."""
    words, run = place.audit_words(), place.folder / "run"
    place.gradveil(*words)
    before = _verdicts(run)
    attacks = [p for p in sorted((run / "cells").glob("*.json")) if json.loads(p.read_text())["kind"] == "attack"]
    contents = [p.read_bytes() for p in attacks]
    for path, content in zip(attacks, contents[::-1], strict=True):
        path.write_bytes(content)
    place.gradveil(*words)
    return None if _verdicts(run) == before else "the results of the two defenses change places, and nothing is said"


@case("truncated tensors are computed again")
def truncated_tensors(place: Place) -> str | None:
    words, run = place.audit_words(), place.folder / "run"
    place.gradveil(*words)
    files = {p: p.read_bytes() for p in run.rglob("*.safetensors")}
    if not files:
        return "the audit stored no tensors"
    for path, content in files.items():
        path.write_bytes(content[: len(content) // 2])
    place.gradveil(*words)
    short = [p for p, content in files.items() if p.is_file() and p.stat().st_size < len(content)]
    return f"{len(short)} of {len(files)} files stay half as long" if short else None
