"""`gradveil search`: an ATS policy for your data and model, saved for use as `ats:policy=FILE`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import Progress as Bar

Whole = Optional[int]  # noqa: UP045  typer reads it at run time, on Python 3.10 too


def command(
    data: Annotated[str, typer.Option(help="Name, path, or pkg.mod:factory.")] = "mnist-5k",
    model: Annotated[str, typer.Option(help="Name, or pkg.mod:factory.")] = "lenet",
    candidates: Annotated[int, typer.Option(help="Random policies to score (the paper: 1500).")] = 100,
    images: Annotated[int, typer.Option(help="Images that a policy is scored on (the paper: 100).")] = 20,
    points: Annotated[int, typer.Option(help="Points between noise and image.")] = 21,
    seed: Annotated[int, typer.Option(help="All randomness comes from it.")] = 0,
    out: Annotated[Path, typer.Option(help="The policy's .json file, or a folder for it.")] = Path("ats-policy.json"),
    workers: Annotated[Whole, typer.Option(help="Processes. [number of cores]", min=1)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> int:
    """Search an ATS transformation policy for a data set and a model.

    A search that was stopped goes on where it was when the same command is given again. The saved policy can be used on
    any data set: --defense ats:policy=FILE.
    """
    import torch

    from gradveil.cli import one_line
    from gradveil.core.gradients import ModelFunction
    from gradveil.core.settings import build
    from gradveil.data import load
    from gradveil.defenses.data.ats.search import Search, search_policy
    from gradveil.models import build as build_model
    from gradveil.processes.worker import cores
    from gradveil.storage.files import write_json

    wanted = {"candidates": candidates, "images": images, "points": points, "seed": seed}
    search = build(Search, wanted, of="search")
    found_data = load(data, seed=seed)
    shape, classes = found_data.input_shape, found_data.num_classes
    module = build_model(model, input_shape=shape, num_classes=classes, seed=seed)
    file = out if out.suffix == ".json" else out / "policy.json"
    torch.set_num_threads(1)  # the workers have the other cores, and a resumed search must compute the same numbers
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        try:
            found = search_policy(
                found_data.task(ModelFunction(module)),
                found_data.private,
                found_data.test,
                search,
                folder=file.with_suffix(".search"),
                workers=cores() if workers is None else workers,
                model=model,
                progress=show,
            )
        except KeyboardInterrupt:
            typer.echo("gradveil: stopped; the same command goes on from here", err=True)
            return 130
    write_json(file, {**found.plain(), "found_on": {"data": data, "model": model}, "search": asdict(search)})
    if not quiet:
        best, median, none = (f"{value:.3f}" for value in (found.best, found.median, found.untransformed))
        typer.echo(f"{found.policy}: privacy score {best} (median {median}, untransformed {none}; lower is better)")
        typer.echo(f"{len(found.ranking)} policies ranked, {found.rejected} rejected for accuracy")
        if found.failed:
            typer.echo(f"{len(found.failed)} could not be scored: {one_line(found.failed[0].failed or '')}")
        typer.echo(f"Use it: --defense ats:policy={file}")
    return 0
