"""`gradveil attack`: what an update that was captured elsewhere gives away."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.auditing.captured import CapturedSpec, attack_update
from gradveil.cli.bar import progress_bar
from gradveil.cli.layout import hanging
from gradveil.cli.options import Given, Quiet
from gradveil.core.observation import labels_text


def command(
    update: Annotated[Path | None, typer.Argument(help="Safetensors file of gradients or weight deltas.")] = None,
    *,
    model: Annotated[str, typer.Option(help="Name, or pkg.mod:factory with its weights.")],
    attack: Annotated[list[str], typer.Option(help="Repeat for several.")] = ["linear", "rgap", "swift"],  # noqa: B006
    spec: Given[CapturedSpec],
    out: Annotated[Path, typer.Option(help="Folder for pictures and tensors.")] = Path("runs/attack"),
    quiet: Quiet = False,
) -> int:
    """Rebuild the images behind a captured update, without knowing them: pictures, tensors and what fits best."""
    with progress_bar("attacking", quiet) as show:
        rebuilt = attack_update(update, model, attacks=attack, progress=show, **spec)
    folder = rebuilt.save(out)
    if not quiet:
        for name, fit in rebuilt.fit.items():
            labels = rebuilt.by_attack[name].labels
            guess = "" if labels is None else f", labels {labels_text(labels)}"
            typer.echo(hanging(f"{name}: ", f"the rebuilt images' update differs by {100 * fit**0.5:.2g}% of its size{guess}"))
        for name, reason in rebuilt.not_applicable.items():
            typer.echo(hanging(f"{name}: ", f"does not apply ({reason})"))
        typer.echo(f"Best fit: {rebuilt.best}. Pictures and tensors: {folder}\n")
        typer.echo(hanging("", rebuilt.verdict))
        typer.echo(f"Picture: {folder / rebuilt.picture(rebuilt.best)}")
    return 0
