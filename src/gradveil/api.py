"""The Python entry points that need all of the package: `gradveil.audit`, `gradveil.tune` and `gradveil.compare`."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradveil.attacks.base import Attack
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.progress import display_on
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import SUITE, AuditSpec, make_spec, read_spec
from gradveil.auditing.tuning.run import run_tune
from gradveil.auditing.tuning.spec import TuneSpec
from gradveil.core.errors import UserError
from gradveil.core.settings import build, fields_of
from gradveil.defenses.base import Defense
from gradveil.processes.ending import orderly
from gradveil.processes.temporary import TemporaryFolder
from gradveil.report.audit_report import Report
from gradveil.report.compare import compare_runs
from gradveil.report.comparison import Comparison
from gradveil.report.tune_report import TuneReport


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
    named = {"data": data, "model": model, "defenses": defenses}
    spec, execution = _asked({**named, **settings}, attacks, config, AuditSpec)
    case, display = Case(spec), display_on(Console(stderr=True), quiet)
    with orderly(), _folder_of(execution) as (here, keep):
        report = Report.written(*run_audit(case, here, display), case.spec.picture_mode)
        keep(report)
    return report


def tune(
    data: Any = None,
    model: Any = None,
    defenses: str | Defense | Sequence[str | Defense] | None = None,
    attacks: str | Attack | Sequence[str | Attack] = SUITE,
    *,
    quiet: bool = False,
    config: str | Path | None = None,
    **settings: Any,
) -> TuneReport:
    """Find the cheapest strength of your defenses under which the updates of your model do not leak.

    `defenses` are up to four, each at the strength where its search begins; without any, a sensible four. `settings` are
    those of `audit`, and `max_loss` (percent of accuracy), `risk` (of a line-up, by a proof), `strengths` (tried per
    defense, at most). `report.summary.recommended` is the setting to take, audited again on fresh victims, and
    `report.protection` what clients act by; where there is none, `report.summary.text` says why.
    """
    named = {"data": data, "model": model, "defenses": defenses}
    spec, execution = _asked({**named, **settings}, attacks, config, TuneSpec)
    assert isinstance(spec, TuneSpec)
    display = display_on(Console(stderr=True), quiet)
    with orderly(), _folder_of(execution) as (here, keep):
        report = TuneReport.written(run_tune(spec, here, display), spec.picture_mode)
        keep(report)
    return report


def _asked(
    values: dict[str, Any], attacks: object, config: str | Path | None, cls: type[AuditSpec]
) -> tuple[AuditSpec, Execution]:
    """The settings of a call: what to do, and where."""
    names = fields_of(Execution)
    execution = build(Execution, {k: v for k, v in values.items() if k in names}, of=cls.command_name)
    stated = {k: v for k, v in values.items() if v is not None and k not in names}
    if config is None or attacks != SUITE:
        stated["attacks"] = attacks
    return (make_spec(stated, cls) if config is None else read_spec(Path(config), cls, **stated)), execution


@contextmanager
def _folder_of(execution: Execution) -> Iterator[tuple[Execution, Callable[[object], object]]]:
    """Where to work, and a function that binds a temporary folder to its report: it holds private images."""
    if execution.out is not None:
        yield execution, lambda report: None
        return
    temporary = TemporaryFolder()
    try:
        yield replace(execution, out=temporary.path), lambda report: weakref.finalize(report, temporary.remove)
    except BaseException:
        temporary.remove()
        raise


def compare(
    a: str | Path | Report, b: str | Path | Report | None = None, defenses: str | Sequence[str] = (), across: Iterable[str] = ()
) -> Comparison:
    """What changed from `a` to `b`, for every defense and attack, and whether that is more than chance.

    A run is the folder of a finished audit, or its report. With two `defenses`, the first in run `a` is compared with the
    second in run `b`, or in the same run where there is only one: two settings of a defense. Victims that both sides
    attacked are compared each with itself. Cases that differ are refused by the names of the terms in which they differ,
    but for those in `across`. The result has `to_frame()`, `save(FILE)` for a page, and is shown as a table in notebooks.
    """
    chosen = (defenses,) if isinstance(defenses, str) else tuple(defenses)
    return compare_runs(_folder(a), None if b is None else _folder(b), chosen, across)


def _folder(run: str | Path | Report) -> Path:
    if isinstance(run, Report):
        if run.folder is None:
            raise UserError("this report has no folder; compare needs the stored cells of a run.")
        return run.folder
    return Path(run)
