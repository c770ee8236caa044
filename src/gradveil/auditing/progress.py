"""What a person sees while an audit runs: bars on a terminal, a line for each finished cell elsewhere, or nothing."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradveil.auditing.spec import CONTROL
from gradveil.core.text import plain
from gradveil.storage.run_folder import CellName, StoredCell


class Display:
    """Shows nothing. The others show more."""

    def start(self, total: int, stored: int) -> None: ...

    def begin(self, cell: CellName) -> None: ...

    def progress(self, cell: CellName, done: int, total: int) -> None: ...

    def end(self, cell: CellName, stored: StoredCell) -> None: ...

    def end_early(self, cell: CellName) -> None:
        """Its process died; it will begin again."""

    def note(self, text: str) -> None:
        """Something else that a person should know."""

    def stop(self) -> None: ...


class LogLines(Display):
    """One line for each finished cell."""

    def __init__(self, console: Console):
        self._console, self._done, self._total = console, 0, 0

    def start(self, total: int, stored: int) -> None:
        self._done, self._total = stored, total
        if stored:
            self.note(f"{stored} of {total} cells are done already")

    def end(self, cell: CellName, stored: StoredCell) -> None:
        self._done += 1
        self.note(f"[{self._done}/{self._total}] {outcome(cell, stored)}")

    def note(self, text: str) -> None:
        self._console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


class Bars(Display):
    """A bar for the audit and one for every cell at work."""

    def __init__(self, console: Console):
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._whole = self._bars.add_task("audit", total=None)
        self._tasks: dict[str, TaskID] = {}
        self._parts: dict[str, float] = {}
        self._finished = 0
        self._best: tuple[float, float] = (-1.0, 0.0)

    def start(self, total: int, stored: int) -> None:
        self._finished = stored
        self._bars.update(self._whole, total=total, completed=stored)
        self._bars.start()

    def begin(self, cell: CellName) -> None:
        self._tasks[cell.key] = self._bars.add_task(str(cell), total=None)

    def progress(self, cell: CellName, done: int, total: int) -> None:
        self._bars.update(self._tasks[cell.key], completed=done, total=total)
        self._parts[cell.key] = done / max(total, 1)
        self._advance()

    def end(self, cell: CellName, stored: StoredCell) -> None:
        self.end_early(cell)
        self._finished += 1
        self._advance()
        self._show_best(cell, stored)
        self._bars.console.print(outcome(cell, stored), markup=False, highlight=False, style="dim")

    def end_early(self, cell: CellName) -> None:
        self._bars.remove_task(self._tasks.pop(cell.key))
        self._parts.pop(cell.key, None)

    def note(self, text: str) -> None:
        self._bars.console.print(plain(text), markup=False, highlight=False)

    def stop(self) -> None:
        self._bars.stop()

    def _show_best(self, cell: CellName, stored: StoredCell) -> None:
        """The strongest attack on a defense so far, beside the bar of the whole."""
        if cell.kind != "attack" or cell.defense == CONTROL or stored.status != "ok":
            return
        hits, psnr = _recovered(stored)
        share = hits / max(1, len(stored.victims))
        if (share, psnr) > self._best:
            self._best = (share, psnr)
            text = f"audit · most so far {share:.0%} identified, {psnr:.0f} dB: {cell.attack} under {cell.defense}"
            self._bars.update(self._whole, description=text)

    def _advance(self) -> None:
        self._bars.update(self._whole, completed=self._finished + sum(self._parts.values()))


def display_on(console: Console, quiet: bool) -> Display:
    if quiet:
        return Display()
    return Bars(console) if console.is_terminal else LogLines(console)


def outcome(cell: CellName, stored: StoredCell) -> str:
    """What became of a cell, in a line."""
    if stored.status != "ok":
        return f"{cell}: {stored.status}: {stored.error}"
    seconds = f" ({stored.seconds or 0.0:.1f} s)"
    if cell.kind != "attack":
        return f"{cell}: done{seconds}"
    hits, psnr = _recovered(stored)
    return f"{cell}: {hits} of {len(stored.victims)} images identified, PSNR {psnr:.1f} dB{seconds}"


def _recovered(stored: StoredCell) -> tuple[int, float]:
    """How many images an attack identified, and its mean PSNR."""
    psnr = stored.rows[0].psnr
    return sum(bool(image.identified) for image in stored.victims), psnr.mean if psnr else 0.0
