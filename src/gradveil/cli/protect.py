"""`gradveil protect`: a protected copy of an image data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import Progress as Bar

# typer reads these at run time, on Python 3.10 too.
Text = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
LOOKED_AT = 500  # images whose likeness to their originals is told at the end


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder of pictures by class, or an .npz file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where the copy goes; it must not exist yet.")],
    *,
    defense: Annotated[str, typer.Option(help="loda, ats, mixup or instahide, as name:key=value,…")] = "loda",
    public: Annotated[Text, typer.Option(help="Data set of the same kind that anybody may have.")] = None,
    size: Annotated[Whole, typer.Option(help="Crop to a square and resize to so many pixels.", min=4, max=1024)] = None,
    reproducible: Annotated[
        Whole, typer.Option(metavar="SEED", help="Draw from this seed: everyone who knows it can undo the protection.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors and warnings.")] = False,
) -> int:
    """Write a protected copy of an image data set, to train on in place of the original.

    A run that was stopped goes on where it was when the same command is given again. Copies made by mixup and instahide
    have soft labels and are .npz files.
    """
    from gradveil.core.randomness import REPRODUCIBLE
    from gradveil.metrics import identify, psnr
    from gradveil.protection.dataset import protect_files

    console = Console(stderr=True)
    if reproducible is not None:
        console.print(f"Warning: {REPRODUCIBLE}", style="yellow", soft_wrap=True)
    with Bar(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        copy = protect_files(
            source, target, defense, public=public, size=size, reproducible=reproducible, progress=show
        )
    if not quiet:
        some, shown = copy.original[:LOOKED_AT], copy.protected.x[:LOOKED_AT].clamp(0, 1)
        known = identify(some.x, some.y, shown, copy.original)
        print(f"{copy.path}: {len(copy.original)} images, PSNR to the originals {psnr(some.x, shown).mean():.1f} dB;")
        print(f"of {len(some)}, {int(known.identified.sum())} are nearest to their own original (|correlation|).")
    return 0
