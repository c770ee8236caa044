"""`gradveil attack`: what an update captured elsewhere gives away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from gradveil.core.errors import UserError

# typer reads these at run time, on Python 3.10 too: hence Optional.
Text = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Real = Optional[float]  # noqa: UP045
File = Optional[Path]  # noqa: UP045


def command(
    update: Annotated[File, typer.Argument(help="Safetensors of gradients or weight deltas by parameter name.")] = None,
    *,
    model: Annotated[str, typer.Option(help="Name, or pkg.mod:factory; with the weights of that round.")],
    input_shape: Annotated[Text, typer.Option(help="Of one image: C,H,W.")] = None,
    loss: Annotated[
        str, typer.Option(help="cross-entropy, multi-label, regression, or pkg.mod:factory.")
    ] = "cross-entropy",
    classes: Annotated[Whole, typer.Option(help="How many classes the model tells apart.")] = None,
    batch_size: Annotated[Whole, typer.Option(help="Images behind the update. [from the file, else 1]")] = None,
    mean: Annotated[Text, typer.Option(help="Of the normalisation, a value a channel: 0.49,0.48,0.45.")] = None,
    std: Annotated[Text, typer.Option(help="Of the normalisation.")] = None,
    labels: Annotated[Text, typer.Option(help="Known labels: 3,7. [inferred]")] = None,
    local_steps: Annotated[Whole, typer.Option(help="Local steps behind a weight delta.")] = None,
    lr: Annotated[Real, typer.Option(help="The client's learning rate, for a weight delta.")] = None,
    before: Annotated[File, typer.Option(help="Checkpoint of the round's start (safetensors).")] = None,
    after: Annotated[File, typer.Option(help="Checkpoint after the round, in place of UPDATE.")] = None,
    attack: Annotated[list[str], typer.Option(help="Repeat for several.")] = ["linear", "rgap", "swift"],  # noqa: B006
    knowledge: Annotated[str, typer.Option(help="realistic, or paper with --labels.")] = "realistic",
    budget: Annotated[str, typer.Option(help="quick, standard or thorough.")] = "standard",
    seed: Annotated[int, typer.Option(help="All randomness comes from it.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for pictures and tensors.")] = Path("runs/attack"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> int:
    """Rebuild the images behind a captured update, without knowing them: pictures, tensors and what fits best."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from gradveil.auditing.captured import attack_update as run
    from gradveil.core.observation import labels_text

    for name, value, allowed in (
        ("knowledge", knowledge, ("realistic", "paper")),
        ("budget", budget, ("quick", "standard", "thorough")),
    ):
        if value not in allowed:
            raise UserError(f"--{name} {value}: write one of {', '.join(allowed)}.")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=quiet or not terminal.is_terminal) as bars:
        task = bars.add_task("attacking", total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        found = run(
            update,
            model,
            _numbers(input_shape, int, "--input-shape"),
            attack,
            loss=loss,
            num_classes=classes,
            batch_size=batch_size,
            mean=_numbers(mean, float, "--mean"),
            std=_numbers(std, float, "--std"),
            labels=_numbers(labels, int, "--labels"),
            local_steps=local_steps,
            lr=lr,
            before=before,
            after=after,
            knowledge=knowledge,
            budget=budget,
            seed=seed,
            progress=show,
        )
    folder = found.save(out)
    if not quiet:
        for spec, reason in found.not_applicable.items():
            typer.echo(f"{spec}: does not apply ({reason})")
        for spec, fit in found.fit.items():
            labels_found = found.by_attack[spec].labels
            guessed = "" if labels_found is None else f", labels {labels_text(labels_found)}"
            typer.echo(f"{spec}: the rebuilt images' update differs by {100 * fit**0.5:.2g}% of its size{guessed}")
        typer.echo(f"Best fit: {found.best}. Pictures and tensors: {folder}")
    return 0


def _numbers(text: str | None, kind: type, option: str) -> Any:
    if text is None:
        return None
    try:
        return [kind(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        raise UserError(f"{option} {text}: write numbers with commas between.") from None
