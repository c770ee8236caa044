"""`gradveil train`: federated training under a defense, and what it costs in accuracy and time."""

import re
from pathlib import Path

import typer
from pydantic import Field

from gradveil import models
from gradveil.cli.bar import progress_bar
from gradveil.cli.options import Quiet
from gradveil.core.hashing import short_hash
from gradveil.core.losses import DEFAULT
from gradveil.core.settings import settings
from gradveil.data import load
from gradveil.federation import FederationPlan, History, train


@settings
class Training:
    """What is trained, and where the run is stored."""

    data: str = Field(default="mnist-5k", description="Name, path, or pkg.mod:factory.")
    model: str = Field(default="cnn", description="Name, or pkg.mod:factory.")
    loss: str = Field(default=DEFAULT, description="Name, or pkg.mod:factory.")
    defense: str = Field(default="none", description="name:key=value,…; + combines.")
    out: Path | None = Field(default=None, description="Folder; the same command resumes. [runs/…]")

    def folder(self, plan: FederationPlan) -> Path:
        """The folder of the run: without --out, one that is the same for the same command."""
        if self.out is not None:
            return self.out
        parts = (self.data, self.model, self.defense)
        words = "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.")[-30:] for part in parts)
        return Path("runs") / f"train-{words}-{short_hash([*parts, self.loss, plan.to_json()])[:6]}"


def command(training: Training, plan: FederationPlan, *, quiet: Quiet = False) -> int:
    """Train a model in a federation whose clients are defended, and write its curves to DIR/history.json."""
    data = load(training.data, seed=plan.seed, rows=training.loss != DEFAULT)
    module = models.build(training.model, input_shape=data.input_shape, num_classes=data.num_classes, seed=plan.seed)
    folder = training.folder(plan)
    with progress_bar("training", quiet) as show:
        try:
            history = train(
                module, data, training.defense, plan, loss=training.loss, cache=folder / "cache", folder=folder, progress=show
            )
        except KeyboardInterrupt:
            typer.echo(f"gradveil: stopped; the same command resumes from {folder}.", err=True)
            return 130
    if not quiet:
        _print(history, folder)
    return 0


def _print(history: History, folder: Path) -> None:
    accuracy = {"test": history.acc_test, "training": history.acc_train, "defended clients'": history.acc_sensitive}
    parts = [f"{name} images {curve[-1]:.1%}" for name, curve in accuracy.items() if curve[-1] is not None]
    typer.echo(f"accuracy after {history.rounds} rounds: {', '.join(parts)} ({history.seconds:.1f} s)")
    if history.events:
        first = history.events[0]
        client = "" if first.client is None else f", client {first.client}"
        typer.echo(f"{len(history.events)} events; the first in round {first.round}{client}: {first.message}")
    typer.echo(f"History: {folder / 'history.json'}")
