"""What a person sees while an audit runs: bars on a terminal, lines elsewhere, or nothing."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gradveil.auditing.spec import CONTROL
from gradveil.core.text import plain
from gradveil.storage.run_folder import CellName, StoredCell

EVERY = 30.0  # seconds between two lines about the cells at work
TOLD = 0.02  # share of the work from which on the time left is told
Clock = Callable[[], float]


@dataclass
class Forecast:
    """The time that is left, by the work that was done so far."""

    weights: Mapping[str, float]  # of the cells that are to be done, about in proportion to their time
    clock: Clock = time.monotonic
    begun: float = 0.0
    ended: float = 0.0  # weight of the cells that are done
    dropped: float = 0.0  # weight of the cells that turned out to be no work
    at_work: dict[str, tuple[float, float]] = field(default_factory=dict)  # when each began, and the share that is done

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def begin(self, key: str) -> None:
        self.at_work[key] = self.clock(), 0.0

    def progress(self, key: str, share: float) -> None:
        if key in self.at_work:
            self.at_work[key] = self.at_work[key][0], min(1.0, share)

    def end(self, key: str, worked: bool) -> None:
        self.at_work.pop(key, None)
        self.ended += self.weights.get(key, 0.0) if worked else 0.0
        self.dropped += 0.0 if worked else self.weights.get(key, 0.0)

    def cell(self, key: str) -> tuple[float, float, float | None]:
        """The share that is done, the seconds since it began, and those that are left."""
        begun, share = self.at_work[key]
        elapsed = self.clock() - begun
        return share, elapsed, elapsed * (1 - share) / share if share >= TOLD else None

    def left(self) -> float | None:
        """Seconds until all cells are done, if those to come go on like those before; no cell at work takes longer."""
        total = sum(self.weights.values()) - self.dropped
        done = self.ended + sum(self.weights.get(key, 0.0) * share for key, (_, share) in self.at_work.items())
        if done <= TOLD * total:
            return None
        return max(
            (self.clock() - self.begun) * (total - done) / done, *(self.cell(key)[2] or 0.0 for key in self.at_work), 0.0
        )


def clock_text(seconds: float | None) -> str:
    """`1:05` or `2:00:10`."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display:
    """Shows nothing. The others show more."""

    def start(self, total: int, weights: Mapping[str, float]) -> None:
        """`weights` are those of the cells that are not done yet, by key."""

    def begin(self, cell: CellName) -> None: ...

    def progress(self, cell: CellName, done: int, total: int) -> None: ...

    def end(self, cell: CellName, stored: StoredCell) -> None: ...

    def end_early(self, cell: CellName) -> None:
        """Its process died; it will begin again."""

    def note(self, text: str) -> None:
        """Something else that a person should know."""

    def stop(self) -> None: ...


class LogLines(Display):
    """One line per finished cell, and every half minute one per cell at work."""

    def __init__(self, console: Console, clock: Clock = time.monotonic):
        self._console, self._clock, self._done, self._total = console, clock, 0, 0
        self._cells: dict[str, CellName] = {}
        self._forecast = Forecast({}, clock)
        self._stopped = threading.Event()

    def start(self, total: int, weights: Mapping[str, float]) -> None:
        self._done, self._total, self._forecast = total - len(weights), total, Forecast(weights, self._clock)
        if self._done:
            self.note(f"{self._done} of {total} cells are done already")
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, args=(self._stopped,), daemon=True).start()

    def _watch(self, stopped: threading.Event) -> None:
        while not stopped.wait(EVERY):
            self.tell()

    def tell(self) -> None:
        """How far the cells at work are."""
        left = clock_text(self._forecast.left())
        for key, cell in list(self._cells.items()):
            share, elapsed, rest = self._forecast.cell(key)
            self.note(f"{cell}: {share:.0%} after {clock_text(elapsed)}, {clock_text(rest)} left; the audit: {left} left")

    def begin(self, cell: CellName) -> None:
        self._forecast.begin(cell.key)
        self._cells[cell.key] = cell

    def progress(self, cell: CellName, done: int, total: int) -> None:
        self._forecast.progress(cell.key, done / max(total, 1))

    def end(self, cell: CellName, stored: StoredCell) -> None:
        self.end_early(cell)
        self._forecast.end(cell.key, stored.status == "ok")
        self._done += 1
        self.note(f"[{self._done}/{self._total}] {outcome(cell, stored)}")

    def end_early(self, cell: CellName) -> None:
        self._cells.pop(cell.key, None)

    def note(self, text: str) -> None:
        self._console.print(plain(text), markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._stopped.set()


class Bars(Display):
    """A bar for the audit and one for every cell at work."""

    def __init__(self, console: Console):
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}", markup=False))
        self._bars = Progress(*columns, console=console, transient=True)
        self._whole = self._bars.add_task("audit", total=None, left="")
        self._tasks: dict[str, TaskID] = {}
        self._forecast = Forecast({})
        self._best: tuple[float, float] = (-1.0, 0.0)

    def start(self, total: int, weights: Mapping[str, float]) -> None:
        self._forecast = Forecast(weights)
        self._bars.update(self._whole, total=total)
        self._done, self._parts = total - len(weights), dict[str, float]()
        self._advance()
        self._bars.start()

    def begin(self, cell: CellName) -> None:
        self._forecast.begin(cell.key)
        self._tasks[cell.key] = self._bars.add_task(str(cell), total=None, left="")

    def progress(self, cell: CellName, done: int, total: int) -> None:
        self._parts[cell.key] = done / max(total, 1)
        self._forecast.progress(cell.key, self._parts[cell.key])
        left = self._forecast.cell(cell.key)[2]
        self._bars.update(self._tasks[cell.key], completed=done, total=total, left=_left(left))
        self._advance()

    def end(self, cell: CellName, stored: StoredCell) -> None:
        self.end_early(cell)
        self._forecast.end(cell.key, stored.status == "ok")
        self._done += 1
        self._advance()
        self._show_best(cell, stored)
        self._bars.console.print(outcome(cell, stored), markup=False, highlight=False, style="dim")

    def end_early(self, cell: CellName) -> None:
        if cell.key in self._tasks:  # it had begun
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
        left = _left(self._forecast.left())
        self._bars.update(self._whole, completed=self._done + sum(self._parts.values()), left=left)


def display_on(console: Console, quiet: bool) -> Display:
    if quiet:
        return Display()
    return Bars(console) if console.is_terminal else LogLines(console)


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{clock_text(seconds)} left"


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
