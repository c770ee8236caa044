"""`gradveil protect`: a protected copy of an image data set."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradveil.cli.bar import progress_bar
from gradveil.cli.options import Quiet
from gradveil.core.randomness import REPRODUCIBLE
from gradveil.metrics import identify, psnr
from gradveil.protection.dataset import protect_files

COMPARED = 500  # images that are compared with their originals at the end


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of pictures by class, or an .npz file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The copy; it must not exist yet.")],
    *,
    defense: Annotated[str, typer.Option(help="loda, ats, mixup, instahide, as name:key=value,…")] = "loda",
    public: Annotated[str | None, typer.Option(help="Data of the same kind that anybody may have.")] = None,
    size: Annotated[int | None, typer.Option(help="Crop to a square of N pixels.", metavar="N", min=4, max=1024)] = None,
    reproducible: Annotated[
        int | None, typer.Option(help="Draw from this seed: who knows it can undo the copy.", metavar="SEED")
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Write a protected copy of an image data set, to train on in place of the original.

    The same command resumes a run that was stopped. Copies made by mixup and instahide have soft labels and are .npz
    files.
    """
    if reproducible is not None:
        Console(stderr=True).print(f"Warning: {REPRODUCIBLE}", style="yellow", soft_wrap=True)
    with progress_bar("protecting", quiet) as show:
        copy = protect_files(source, target, defense, public=public, size=size, reproducible=reproducible, progress=show)
    if not quiet:
        originals, protected = copy.original[:COMPARED], copy.protected.x[:COMPARED].clamp(0, 1)
        nearest = identify(originals.x, originals.y, protected, copy.original).identified
        similarity = f"PSNR to the originals {psnr(originals.x, protected).mean():.1f} dB"
        print(f"{copy.path}: {len(copy.original)} images, {similarity};")
        print(f"of {len(originals)}, {int(nearest.sum())} are nearest to their own original (|correlation|).")
    return 0
