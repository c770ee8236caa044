"""`gradveil search`: an ATS policy for your data and model, saved for use as `ats:policy=FILE`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from gradveil import models
from gradveil.cli.bar import progress_bar
from gradveil.cli.options import Quiet
from gradveil.core.gradients import ModelFunction
from gradveil.core.text import plain
from gradveil.data import load
from gradveil.defenses.data.ats.search import Search, search_policy
from gradveil.processes.worker import cores
from gradveil.storage.files import check_replaceable, write_json


def command(
    data: Annotated[str, typer.Option(help="Name, path, or pkg.mod:factory.")] = "mnist-5k",
    model: Annotated[str, typer.Option(help="Name, or pkg.mod:factory.")] = "lenet",
    *,
    search: Search,
    out: Annotated[Path, typer.Option(help="The policy's .json file, or a folder; only our own file is replaced.")] = Path(
        "ats-policy.json"
    ),
    workers: Annotated[int | None, typer.Option(help="Processes. [one per core]", metavar="N")] = None,
    quiet: Quiet = False,
) -> int:
    """Search an ATS transformation policy for a data set and a model.

    The same command resumes a search that was stopped. The saved policy can be used on any data set:
    --defense ats:policy=FILE.
    """
    images = load(data, seed=search.seed)
    shape, classes = images.input_shape, images.num_classes
    module = models.build(model, input_shape=shape, num_classes=classes, seed=search.seed)
    file = out if out.suffix == ".json" else out / "policy.json"
    check_replaceable(file, '"found_on"')
    torch.set_num_threads(1)  # the workers have the other cores, and a resumed search must compute the same numbers
    with progress_bar("searching", quiet) as show:
        try:
            result = search_policy(
                images.task(ModelFunction(module)),
                images.private,
                images.test,
                search,
                folder=file.with_suffix(".search"),
                workers=cores() if workers is None else max(1, workers),
                model=model,
                progress=show,
            )
        except KeyboardInterrupt:
            typer.echo("gradveil: stopped; the same command resumes", err=True)
            return 130
    write_json(file, {**result.plain(), "found_on": {"data": data, "model": model}, "search": asdict(search)})
    if not quiet:
        best, median, none = (f"{value:.3f}" for value in (result.best, result.median, result.untransformed))
        typer.echo(f"{result.policy}: privacy score {best} (median {median}, untransformed {none}; lower is better)")
        typer.echo(f"{len(result.ranking)} policies ranked, {result.rejected} rejected for accuracy")
        if result.failed:
            typer.echo(f"{len(result.failed)} could not be scored: {plain(result.failed[0].failed or '')}")
        typer.echo(f"Use it: --defense ats:policy={file}")
    return 0
