"""The Python entry points that need all of the package: `gradveil.audit` and `gradveil.compare`."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradveil.attacks.base import Attack
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.progress import display_on
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import SUITE, make_spec, read_spec
from gradveil.core.errors import UserError
from gradveil.core.settings import build, fields_of
from gradveil.defenses.base import Defense
from gradveil.processes.ending import orderly
from gradveil.processes.temporary import TemporaryFolder
from gradveil.report.audit_report import Report
from gradveil.report.compare import Comparison, compare_runs


def audit(
    data: Any = None,
    model: Any = None,
    defenses: str | Defense | Sequence[str | Defense] | None = None,
    attacks: str | Attack | Sequence[str | Attack] = SUITE,
    *,
    quiet: bool = False,
    config: str | Path | None = None,
    **settings: Any,
) -> Report:
    """Play the curious server against your model, your data and your defenses.

    `data` is a name, a path, a torch Dataset or (x, y) tensors with pixels in [0, 1]; `model` a name or any module. The
    control `none` is always added. `settings` are the other fields of `AuditSpec` (victims, batch_size, local_steps,
    knowledge, budget, seed, utility …) and those of `Execution` (out, workers, memory, device, ray). With `out`, the run
    is stored there and the same call resumes it; without, the folder is temporary and goes with the report, unless
    `report.save` copies it. Objects are audited in this process; names and `pkg.mod:factory` by `workers` processes, or
    by the Ray cluster at the address `ray`.
    """
    names = fields_of(Execution)
    execution = build(Execution, {k: v for k, v in settings.items() if k in names}, of="audit")
    named = {"data": data, "model": model, "defenses": defenses}
    values = {k: v for k, v in {**named, **settings}.items() if v is not None and k not in names}
    if config is None or attacks != SUITE:
        values["attacks"] = attacks
    case = Case(make_spec(values) if config is None else read_spec(Path(config), **values))
    display = display_on(Console(stderr=True), quiet)
    with orderly():
        temporary = TemporaryFolder() if execution.out is None else None
        try:
            run = run_audit(case, replace(execution, out=temporary.path) if temporary else execution, display)
            report = Report.written(*run, case.spec.picture_mode)
        except BaseException:
            if temporary:
                temporary.remove()
            raise
        if temporary:
            weakref.finalize(report, temporary.remove)  # it holds private images
    return report


def compare(a: str | Path | Report, b: str | Path | Report, across: Iterable[str] = ()) -> Comparison:
    """What changed from run `a` to run `b`, for every defense and attack, and whether that is more than chance.

    A run is the folder of a finished audit, or its report. Cases that differ are refused, but for the terms named in
    `across`.
    """
    return compare_runs(_folder(a), _folder(b), across)


def _folder(run: str | Path | Report) -> Path:
    if isinstance(run, Report):
        if run.folder is None:
            raise UserError("this report has no folder; compare needs the stored cells of a run.")
        return run.folder
    return Path(run)
