"""`gradveil audit`: what can be rebuilt from the updates, under every defense and attack."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field
from rich.console import Console
from rich.text import Text

from gradveil.auditing.case import Case
from gradveil.auditing.condition import Condition, untold
from gradveil.auditing.estimate import CellTime, Estimate, wall_seconds
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import expected_power, make_plan
from gradveil.auditing.progress import display_on
from gradveil.auditing.replay import replayed_rounds
from gradveil.auditing.run import Stopped, default_folder, identity_of, run_audit
from gradveil.auditing.spec import AuditSpec, make_spec, read_spec
from gradveil.cli.bar import progress_bar
from gradveil.cli.options import Given, Quiet
from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.text import plain, plural
from gradveil.processes.worker import cores
from gradveil.report import print_summary
from gradveil.report.audit_report import Report
from gradveil.report.fitted_table import FittedColumn, FittedTable
from gradveil.report.pipeline import check_file, github_annotations, write_junit
from gradveil.report.words import needed_sentence, seconds_text, visible
from gradveil.storage.run_folder import RunFolder

CANNOT_TELL_CODE = 3  # a gate that is green on an audit that cannot tell would be worse than none


INTERRUPTED = 130  # exit code after Ctrl-C


@settings
class Gate:
    """What a build server asks of an audit."""

    fail_if: tuple[str, ...] = Field(
        default=(), description="Exit code 1 if it holds for a defense, 3 if that cannot be told; repeat."
    )
    junit: Path | None = Field(default=None, description="File for JUnit XML: one suite per defense; only our own is replaced.")
    annotations: Literal["github"] | None = Field(default=None, description="github: print its annotations.")

    def conditions(self, spec: AuditSpec) -> list[Condition]:
        """The conditions, checked before the audit begins."""
        conditions = [Condition(text) for text in self.fail_if]
        for condition in conditions:
            if any(field.startswith("utility.") for field in condition.fields) and not spec.utility:
                raise UserError(f"--fail-if '{condition.text}' asks for the utility, which is measured only with --utility.")
        if self.junit is not None:
            check_file(self.junit)
        return conditions

    def exit_code(self, report: Report, conditions: list[Condition]) -> int:
        """Write what was asked for; 1 if a condition holds, else 3 if the audit cannot tell."""
        summary = report.summary
        checked = [condition.check(summary.defenses) for condition in conditions]
        holding = [f"{c.text} holds for {', '.join(c.holds)}" for c in checked if c.holds]
        unknown = untold(summary, checked) if self.fail_if or self.junit else []
        for line in (*holding, *unknown):
            typer.echo(f"gradveil: {plain(line)}", err=True)
        if self.junit is not None:
            write_junit(summary, checked, self.junit)
        for line in github_annotations(summary, checked) if self.annotations else ():
            typer.echo(line)
        return 1 if holding else CANNOT_TELL_CODE if unknown else 0


def command(
    spec: Given[AuditSpec],
    execution: Execution,
    gate: Gate,
    *,
    preset: Annotated[str | None, typer.Option(help="A real federation: `gradveil list presets`.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Rounds that gradveil.flower.capture wrote: audit those.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with an audit; options replace its keys.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show the cells and an estimate, and stop.")] = False,
    quiet: Quiet = False,
) -> int:
    """Attack the updates of a model under each defense, and report what leaks.

    With no options: a complete first audit on the embedded data.

    Example: gradveil audit --data mnist-5k --model lenet --defense prune:ratio=0.9 --victims 8 --out runs/mine
    """
    values = {**({} if preset is None else {"preset": preset}), **spec}
    if replay is None:
        return _one(make_spec(values) if config is None else read_spec(config, **values), execution, gate, plan, quiet)
    rounds = replayed_rounds(replay, values)
    if gate.junit is not None and len(rounds) > 1:
        raise UserError(
            f"--junit holds one audit, and {replay} has {len(rounds)} rounds: name one, {replay}/{next(iter(rounds))}."
        )
    codes = []
    for name, chosen in rounds.items():
        audit = make_spec(chosen) if config is None else read_spec(config, AuditSpec, **chosen)
        if not quiet:
            typer.echo(f"\n{name}: {audit.local_training.in_words(audit.batch_size)}; victims of {audit.batch_size} images")
        out = execution.out and (execution.out / name if len(rounds) > 1 else execution.out)
        codes.append(_one(audit, replace(execution, out=out), gate, plan, quiet))
        if codes[-1] == INTERRUPTED:
            break
    return next((code for code in (INTERRUPTED, 1, CANNOT_TELL_CODE) if code in codes), 0)


def _one(audit: AuditSpec, execution: Execution, gate: Gate, plan: bool, quiet: bool) -> int:
    """One audit: its plan, or its run, report and exit code."""
    conditions = gate.conditions(audit)
    case = Case(audit)
    if plan:
        _show_plan(case, execution)
        return 0
    try:
        run = run_audit(case, execution, display_on(Console(stderr=True), quiet))
        report = Report.written(*run, audit.picture_mode)
    except Stopped as stopped:
        typer.echo(f"gradveil: {stopped}", err=True)
        return INTERRUPTED
    if not quiet:
        print_summary(report.summary, Console())
        typer.echo(f"\nReport: {report.folder / 'report.html' if report.folder else ''}")
    return gate.exit_code(report, conditions)


def _show_plan(case: Case, execution: Execution) -> None:
    folder, plan = RunFolder(execution.out or default_folder(case)), make_plan(case)
    folder.check(identity_of(case))
    estimate = Estimate(case, plan)
    table = FittedTable([FittedColumn("cell"), FittedColumn("kind", left_out=1), FittedColumn("CPU seconds", "right")])
    reasons = Counter[str]()
    expected, limit = dict[str, float](), 0.0
    times, stored_keys = dict[str, CellTime](), {cell.key for cell in plan if folder.read(cell.key) is not None}
    with progress_bar("trying cells", quiet=False) as show:  # each for a moment
        for number, cell in enumerate(plan):
            show(f"trying {plain(str(cell))}", number, len(plan))
            times[cell.key] = CellTime(0.0, 0.0) if cell.key in stored_keys else estimate.cell(cell)
    for cell in plan:
        time, stored = times[cell.key], cell.key in stored_keys
        expected[cell.key] = time.seconds
        limit += time.limit
        if time.reason:
            reasons[time.reason] += 1
        table.add_row(plain(str(cell)), cell.kind, "stored" if stored else "not run" if time.reason else f"{time.seconds:.1f}")
    console = Console()
    console.print(table)
    for reason, count in reasons.items():
        console.print(Text(f"Not run ({plural(count, 'cell')}): {plain(reason)}"))
    workers = max(1, cores() if execution.workers is None else execution.workers)
    wall = wall_seconds(plan.cells, expected, workers)
    console.print(
        f"{len(plan)} cells in {folder.path}. Estimate: {seconds_text(sum(expected.values()))} of one core, at most "
        f"{seconds_text(limit)} where no search ends early; about {seconds_text(wall)} with {workers} at work.",
        highlight=False,
    )
    if case.spec.until_leak:
        console.print(
            "--until-leak takes less: attacks on a defense that leaks before them are counted, and not run.", highlight=False
        )
    share, needed = expected_power(case)
    console.print(f"{visible(share)} {needed_sentence(needed)} Assumed: a leak rebuilds an image exactly.", highlight=False)
