"""A progress bar on the error stream of a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from gradveil.core.progress import Progress


@contextmanager
def progress_bar(text: str, quiet: bool) -> Iterator[Progress]:
    """A bar that shows what is being done; nothing if `quiet`, or where there is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        task = bars.add_task(text, total=None)
        yield lambda step, done, total: bars.update(task, description=step, completed=done, total=total)
