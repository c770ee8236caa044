"""`gradveil train`: federated training under a defense, and what it costs in accuracy and time."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from gradveil.federation import History


class Engine(StrEnum):
    """Who carries states and updates between server and clients."""

    inline = "inline"
    flower = "flower"


# typer reads these at run time, on Python 3.10 too: hence Optional.
Whole = Optional[int]  # noqa: UP045
Real = Optional[float]  # noqa: UP045
Folder = Optional[Path]  # noqa: UP045


def command(
    *,
    data: Annotated[str, typer.Option(help="Name, path, or pkg.mod:factory.")] = "mnist-5k",
    model: Annotated[str, typer.Option(help="Name, or pkg.mod:factory.")] = "cnn",
    loss: Annotated[
        str, typer.Option(help="cross-entropy, multi-label, regression, or pkg.mod:factory.")
    ] = "cross-entropy",
    defense: Annotated[str, typer.Option(help="name:key=value,…; + combines.")] = "none",
    defended: Annotated[str, typer.Option(help="all, or how many of the clients.")] = "all",
    engine: Annotated[Engine, typer.Option(help="inline: in this process; flower: its simulation.")] = Engine.inline,
    rounds: Annotated[int, typer.Option(help="How often the server adds up.")] = 20,
    clients: Annotated[int, typer.Option(help="How many clients there are.")] = 10,
    images_per_client: Annotated[Whole, typer.Option(help="On average. [private images / clients]")] = None,
    sampled: Annotated[Whole, typer.Option(help="How many clients take part in a round. [all]")] = None,
    partition: Annotated[str, typer.Option(help="iid, dirichlet:alpha=0.5 or classes:per_client=2.")] = "iid",
    local_epochs: Annotated[int, typer.Option(help="Passes of a client over its images in a round.")] = 2,
    batch_size: Annotated[int, typer.Option(help="Images in a mini-batch.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.05,
    momentum: Annotated[float, typer.Option(help="Of local SGD; of the server's with --fedsgd.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Of the same SGD.")] = 0.0,
    schedule: Annotated[str, typer.Option(help="constant, exponential:gamma=0.99 or step:every=30.")] = "constant",
    fedsgd: Annotated[bool, typer.Option("--fedsgd", help="Clients send one gradient a round.")] = False,
    deadline: Annotated[Real, typer.Option(help="Seconds until a silent client misses the round. [none]")] = None,
    seed: Annotated[int, typer.Option(help="All randomness comes from it.")] = 0,
    out: Annotated[Folder, typer.Option(help="Folder of the run; the same command resumes it. [runs/…]")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> int:
    """Train a model in a federation whose clients are defended, and write its curves to DIR/history.json."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from gradveil import models
    from gradveil.core.losses import DEFAULT
    from gradveil.core.settings import build
    from gradveil.data import load
    from gradveil.federation import FederationPlan, train

    options: dict[str, Any] = {
        "rounds": rounds,
        "clients": clients,
        "images_per_client": images_per_client,
        "sampled": sampled,
        "partition": partition,
        "local_epochs": local_epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "fedsgd": fedsgd,
        "defended": defended,
        "deadline": deadline,
        "seed": seed,
        "engine": engine.value,
    }
    found = load(data, seed=seed, rows=loss != DEFAULT)
    if images_per_client is None and clients > 0:
        options["images_per_client"] = max(1, len(found.private) // clients)
    module = models.build(model, input_shape=found.input_shape, num_classes=found.num_classes, seed=seed)
    folder = out or _default_folder(data, model, defense, {**options, "loss": loss})

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bars:
        task = bars.add_task("training", total=rounds)

        def show(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        try:
            history = train(
                module,
                found,
                defense,
                build(FederationPlan, options, of="train"),
                loss=loss,
                progress=show,
                cache=folder / "cache",
                folder=folder,
            )
        except KeyboardInterrupt:
            typer.echo(f"gradveil: stopped; the same command goes on from {folder}.", err=True)
            return 130
    if not quiet:
        _tell(history, folder)
    return 0


def _tell(history: History, folder: Path) -> None:
    accuracy = {"test": history.acc_test, "training": history.acc_train, "defended clients'": history.acc_sensitive}
    parts = [f"{name} images {curve[-1]:.1%}" for name, curve in accuracy.items() if curve[-1] is not None]
    typer.echo(f"accuracy after {history.rounds} rounds: {', '.join(parts)} ({history.seconds:.1f} s)")
    if history.events:
        first = history.events[0]
        who = "" if first.client is None else f", client {first.client}"
        typer.echo(f"{len(history.events)} events; the first in round {first.round}{who}: {first.message}")
    typer.echo(f"History: {folder / 'history.json'}")


def _default_folder(data: str, model: str, defense: str, options: dict[str, Any]) -> Path:
    """The same for the same command, so that it resumes."""
    words = "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.")[-30:] for part in (data, model, defense))
    digest = hashlib.sha256(repr((data, model, defense, sorted(options.items()))).encode()).hexdigest()
    return Path("runs") / f"train-{words}-{digest[:6]}"
