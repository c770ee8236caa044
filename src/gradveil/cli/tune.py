"""`gradveil tune`: the cheapest setting that survives."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradveil.auditing.limits import Execution
from gradveil.auditing.progress import display_on
from gradveil.auditing.run import Stopped
from gradveil.auditing.spec import make_spec, read_spec
from gradveil.auditing.tuning.estimate import expected_time
from gradveil.auditing.tuning.results import PAGE
from gradveil.auditing.tuning.run import run_tune
from gradveil.auditing.tuning.spec import TuneSpec
from gradveil.cli.audit import INTERRUPTED
from gradveil.cli.options import Given, Quiet
from gradveil.core.text import duration, plural
from gradveil.report.tune_report import TuneReport, print_tune


def command(
    spec: Given[TuneSpec],
    execution: Execution,
    *,
    preset: Annotated[str | None, typer.Option(help="A real federation: `gradveil list presets`.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with a search; options replace its keys.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show how long it may take, and stop.")] = False,
    quiet: Quiet = False,
) -> int:
    """Find the weakest strength of each defense that survives all attacks, what it costs, and which one to take.

    The one to take is audited again on fresh victims, and written to protection.json in the folder of the run.

    Example: gradveil tune --data mnist-5k --model lenet --defense gaussian --defense dpsgd:noise=0.01 --max-loss 5
    """
    values = {**({} if preset is None else {"preset": preset}), **spec}
    wanted = make_spec(values, TuneSpec) if config is None else read_spec(config, TuneSpec, **values)
    assert isinstance(wanted, TuneSpec)
    if plan:
        time = expected_time(wanted)
        typer.echo(
            f"At most {plural(wanted.strengths, 'strength')} of each of {plural(len(wanted.defenses), 'defense')}. Estimate of "
            f"one core, at most: {duration(time.search)} for the search, {duration(time.cost)} for accuracy, "
            f"{duration(time.fresh)} for each setting on fresh victims."
        )
        return 0
    try:
        report = TuneReport.written(run_tune(wanted, execution, display_on(Console(stderr=True), quiet)), wanted.picture_mode)
    except Stopped as stopped:
        typer.echo(f"gradveil: {stopped}", err=True)
        return INTERRUPTED
    if not quiet:
        print_tune(report, Console())
        if report.summary.protection:
            typer.echo(f"\nProtection: {report.folder / report.summary.protection}")
        typer.echo(f"{'' if report.summary.protection else chr(10)}Page: {report.folder / PAGE}")
    return 0
