"""What a person sees while an audit runs: bars on a terminal, a line for each finished cell elsewhere, or nothing."""

from __future__ import annotations

from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradveil.auditing.spec import CONTROL


class Shown(Protocol):
    """A piece of work: an audit's cell, or a part of a recipe's measure. As text it says what it is."""

    @property
    def key(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def defense(self) -> str: ...
    @property
    def attack(self) -> str: ...


class Display:
    """Shows nothing. The others show more."""

    def start(self, total: int, stored: int) -> None: ...

    def begin(self, cell: Shown) -> None: ...

    def progress(self, cell: Shown, done: int, total: int) -> None: ...

    def end(self, cell: Shown, content: dict[str, Any]) -> None: ...

    def end_early(self, cell: Shown) -> None:
        """Its process died; it will begin again."""

    def stop(self) -> None: ...


class Lines(Display):
    """One line for each finished cell."""

    def __init__(self, console: Console):
        self._console, self._done, self._total = console, 0, 0

    def start(self, total: int, stored: int) -> None:
        self._done, self._total = stored, total
        if stored:
            self._print(f"{stored} of {total} cells are done already")

    def end(self, cell: Shown, content: dict[str, Any]) -> None:
        self._done += 1
        self._print(f"[{self._done}/{self._total}] {outcome(cell, content)}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bars(Display):
    """A bar for the audit and one for every cell at work."""

    def __init__(self, console: Console):
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True)
        self._whole: TaskID | None = None
        self._tasks: dict[str, TaskID] = {}
        self._parts: dict[str, float] = {}
        self._finished = 0
        self._best: tuple[float, float] = (-1.0, 0.0)

    def start(self, total: int, stored: int) -> None:
        self._finished = stored
        self._whole = self._bars.add_task("audit", total=total, completed=stored)
        self._bars.start()

    def begin(self, cell: Shown) -> None:
        self._tasks[cell.key] = self._bars.add_task(str(cell), total=None)

    def progress(self, cell: Shown, done: int, total: int) -> None:
        self._bars.update(self._tasks[cell.key], completed=done, total=total)
        self._parts[cell.key] = done / max(total, 1)
        self._advance()

    def end(self, cell: Shown, content: dict[str, Any]) -> None:
        self._bars.remove_task(self._tasks.pop(cell.key))
        self._parts.pop(cell.key, None)
        self._finished += 1
        self._advance()
        self._show_best(cell, content)
        self._bars.console.print(outcome(cell, content), markup=False, highlight=False, style="dim")

    def end_early(self, cell: Shown) -> None:
        self._bars.remove_task(self._tasks.pop(cell.key))
        self._parts.pop(cell.key, None)

    def stop(self) -> None:
        self._bars.stop()

    def _show_best(self, cell: Shown, content: dict[str, Any]) -> None:
        """The strongest attack on a defense so far, beside the bar of the whole."""
        if cell.kind != "attack" or cell.defense == CONTROL or content["status"] != "ok" or self._whole is None:
            return
        known = sum(bool(v["identified"]) for v in content["victims"]) / max(1, len(content["victims"]))
        found = (known, content["rows"][0]["psnr"]["mean"])
        if found > self._best:
            self._best = found
            words = f"audit · most so far {known:.0%} identified, {found[1]:.0f} dB: {cell.attack} under {cell.defense}"
            self._bars.update(self._whole, description=words)

    def _advance(self) -> None:
        if self._whole is not None:
            self._bars.update(self._whole, completed=self._finished + sum(self._parts.values()))


def display_on(console: Console, quiet: bool) -> Display:
    if quiet:
        return Display()
    return Bars(console) if console.is_terminal else Lines(console)


def outcome(cell: Shown, content: dict[str, Any]) -> str:
    """What became of a cell, in a line."""
    if content["status"] != "ok":
        return f"{cell}: {content['status']}: {content['error']}"
    seconds = f" ({content['seconds']:.1f} s)"
    if cell.kind != "attack":
        return f"{cell}: done{seconds}"
    row = content["rows"][0]
    known = sum(bool(v["identified"]) for v in content["victims"])
    return f"{cell}: {known} of {row['scored']} images identified, PSNR {row['psnr']['mean']:.1f} dB{seconds}"
