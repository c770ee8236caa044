"""`gradveil audit`: what can be rebuilt from the updates, under every defense and attack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gradveil.auditing.case import Case

# typer reads these at run time, on Python 3.10 too: hence Optional and List.
Text = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Texts = Optional[list[str]]  # noqa: UP045
File = Optional[Path]  # noqa: UP045


def command(
    data: Annotated[Text, typer.Option(help="Name, path, or pkg.mod:factory. [mnist-5k]")] = None,
    model: Annotated[Text, typer.Option(help="Name, or pkg.mod:factory. [lenet]")] = None,
    loss: Annotated[Text, typer.Option(help="cross-entropy, multi-label, regression, or pkg.mod:factory.")] = None,
    defense: Annotated[Texts, typer.Option(help="name:key=value,…; + combines; repeat. [a first picture]")] = None,
    attack: Annotated[Texts, typer.Option(help="name:key=value,… or the suite `standard`; repeat. [standard]")] = None,
    victims: Annotated[Whole, typer.Option(help="How many private batches are attacked. [8]")] = None,
    batch_size: Annotated[Whole, typer.Option(help="Images in a batch. [1]")] = None,
    local_steps: Annotated[Whole, typer.Option(help="SGD steps before an update is sent. [1: a gradient]")] = None,
    local_lr: Annotated[Optional[float], typer.Option(help="Learning rate of local steps. [0.01]")] = None,  # noqa: UP045
    trained_rounds: Annotated[Whole, typer.Option(help="Attack a model trained by so many rounds. [0]")] = None,
    trained_epochs: Annotated[Whole, typer.Option(help="Attack a model trained for so many epochs. [0]")] = None,
    knowledge: Annotated[Text, typer.Option(help="realistic, paper or upper-bound. [realistic]")] = None,
    budget: Annotated[Text, typer.Option(help="quick, standard or thorough. [quick]")] = None,
    updates: Annotated[Whole, typer.Option(help="Updates of the same batch that the server sees. [1]")] = None,
    seed: Annotated[Whole, typer.Option(help="All randomness comes from it. [0]")] = None,
    classes: Annotated[Whole, typer.Option(help="Number of classes, where the data does not say.")] = None,
    utility: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--utility/--no-utility", help="Train under each defense to see what it costs. [no]"),
    ] = None,
    out: Annotated[File, typer.Option(help="Folder of the run; the same command resumes it. [runs/…]")] = None,
    workers: Annotated[Whole, typer.Option(help="Processes; 0: this one alone. [number of cores]", min=0)] = None,
    memory: Annotated[Text, typer.Option(help="For batched computations, e.g. 4G. [most of the machine's]")] = None,
    device: Annotated[str, typer.Option(help="Where attacks run: cpu, cuda, cuda:1 or mps.")] = "cpu",
    ray: Annotated[Text, typer.Option(help="Address of a Ray cluster that does the cells, or `auto`.")] = None,
    pictures: Annotated[Text, typer.Option(help="none (no image is stored), blurred or shown. [blurred]")] = None,
    config: Annotated[File, typer.Option(help="YAML file with an audit; options go before it.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show the cells and an estimate, and stop.")] = False,
    fail_if: Annotated[
        Texts, typer.Option(help="Exit with 1 if this holds for any defense, e.g. 'worst.ssim.max > 0.6'; repeat.")
    ] = None,
    junit: Annotated[File, typer.Option(help="Write JUnit XML there: a suite a defense.")] = None,
    annotations: Annotated[Text, typer.Option(help="github: print errors and warnings as it shows them.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> int:
    """Attack the updates of a model under each defense, and report what leaks.

    With no options: a complete first audit on the embedded data.

    Example: gradveil audit --data mnist-5k --model lenet --defense prune:ratio=0.9 --victims 8 --out runs/mine
    """
    from gradveil.auditing.case import Case
    from gradveil.auditing.condition import Condition
    from gradveil.auditing.limits import find_device, parse_size
    from gradveil.auditing.progress import display_on
    from gradveil.auditing.run import Stopped, run_audit
    from gradveil.auditing.spec import make_spec, read_spec
    from gradveil.core.errors import UserError
    from gradveil.report.audit_report import Report
    from gradveil.report.pipeline import check_file, github_annotations, write_junit

    options: dict[str, Any] = {
        "data": data,
        "model": model,
        "loss": loss,
        "defenses": defense or None,
        "attacks": attack or None,
        "victims": victims,
        "batch_size": batch_size,
        "local_steps": local_steps,
        "local_lr": local_lr,
        "trained_rounds": trained_rounds,
        "trained_epochs": trained_epochs,
        "knowledge": knowledge,
        "budget": budget,
        "updates": updates,
        "seed": seed,
        "num_classes": classes,
        "utility": utility,
        "pictures": pictures,
    }
    given = {name: value for name, value in options.items() if value is not None}
    spec = make_spec(given) if config is None else read_spec(config, **given)
    conditions = [Condition(text) for text in fail_if or []]
    for condition in conditions:
        if any(f.startswith("utility.") for f in condition.fields) and not spec.utility:
            raise UserError(
                f"--fail-if '{condition.text}' asks for the utility, which is measured only with --utility."
            )
    if annotations not in (None, "github"):
        raise UserError(f"--annotations {annotations}: write github, the one kind there is.")
    if junit is not None:
        check_file(junit)
    size = None if memory is None else parse_size(memory)
    find_device(device)
    case = Case(spec)
    if plan:
        _show_plan(case, out, workers)
        return 0
    try:
        shown = display_on(Console(stderr=True), quiet)
        run = run_audit(case, out, workers=workers, display=shown, memory=size, device=device, ray=ray)
        report = Report.written(*run, spec.pictures)
    except Stopped as stopped:
        typer.echo(f"gradveil: {stopped}", err=True)
        return 130
    if not quiet:
        from gradveil.report import print_summary

        print_summary(report.summary, Console())
        typer.echo(f"\nReport: {report.folder / 'report.html' if report.folder else ''}")
    failures = {c.text: [d.spec for d in report.summary.defenses if c.holds(d)] for c in conditions}
    for text, failing in failures.items():
        if failing:
            typer.echo(f"gradveil: {text} holds for {', '.join(failing)}", err=True)
    if junit is not None:
        write_junit(report.summary, failures, junit)
    if annotations is not None:
        for line in github_annotations(report.summary, failures):
            typer.echo(line)
    return 1 if any(failures.values()) else 0


def _show_plan(case: Case, out: Path | None, workers: int | None) -> None:
    from gradveil.auditing.estimate import Estimate
    from gradveil.auditing.plan import make_plan
    from gradveil.auditing.run import default_folder, identity_of
    from gradveil.processes.worker import cores
    from gradveil.report.words import seconds_text
    from gradveil.storage.run_folder import RunFolder

    folder, plan, estimate = RunFolder(out or default_folder(case)), make_plan(case), Estimate(case)
    folder.check(identity_of(case))
    table = Table("cell", "kind", "seconds", box=None, pad_edge=False)
    left = 0.0
    for cell in plan:
        stored = folder.read(cell.key) is not None
        seconds = 0.0 if stored else estimate.seconds(cell)
        left += seconds
        table.add_row(str(cell), cell.kind, "stored" if stored else f"{seconds:.0f}")
    console = Console()
    console.print(table)
    count = max(1, cores() if workers is None else workers)
    console.print(
        f"{len(plan)} cells in {folder.path}; about {seconds_text(left / count)} with {count} at work. "
        "An estimate: attacks may stop early, and some defenses take long to prepare.",
        highlight=False,
    )
