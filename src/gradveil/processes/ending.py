"""Ending by a signal: everything is closed and removed first, then the process ends by that same signal.

Only where nobody else handles the signal, and in the main thread, which alone can handle signals.
"""

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_AGAIN = 2.0  # seconds: a signal so soon after another means the same, and must not disturb what ends
_UNHEARD = 20.0  # seconds after which the process asks itself again: code that drops exceptions may have dropped this one


@dataclass
class _State:
    blocks: int = 0  # `orderly` blocks that have begun and not ended
    cleanups: list[Callable[[], None]] = field(default_factory=list)  # for what must not outlive this process
    received: int | None = None  # the signal that ends this process
    last: float = -_AGAIN
    process: int = 0  # who installed the handlers: a forked child must not clean up after its parent


_state = _State()


class Terminated(KeyboardInterrupt):
    """The process was asked to end. Treated as Ctrl-C, until the outermost `orderly` block ends the process."""


@contextmanager
def orderly() -> Iterator[None]:
    """Inside, a signal to end raises `Terminated`, so that all blocks are left; then the process ends by the signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.blocks += 1
    _install()
    try:
        yield
    finally:
        _state.blocks -= 1
        if _state.received is not None and not _state.blocks:
            _end(_state.received)
        _install()


def at_end(cleanup: Callable[[], None]) -> Callable[[], None]:
    """Have `cleanup` called when a signal ends the process. Returns what takes that back."""
    _state.cleanups.append(cleanup)
    _install()

    def forget() -> None:
        with suppress(ValueError):
            _state.cleanups.remove(cleanup)
        _install()

    return forget


def _install() -> None:
    """Handle the signals while there is something to do; else leave them as they were."""
    if threading.current_thread() is not threading.main_thread():
        return
    _state.process = os.getpid()
    active = bool(_state.blocks or _state.cleanups)
    for number in _SIGNALS:
        current = signal.getsignal(number)
        if active and current == signal.SIG_DFL:
            signal.signal(number, _handle)
        elif not active and current == _handle:
            signal.signal(number, signal.SIG_DFL)


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.process:
        _end_by(number)
    if time.monotonic() - _state.last < _AGAIN:
        return
    _state.last, _state.received = time.monotonic(), number
    if _state.blocks:
        start_new_thread(_ask_again, (number,))
        raise Terminated
    _end(number)


def _ask_again(number: int) -> None:
    time.sleep(_UNHEARD)
    os.kill(os.getpid(), number)


def _end(number: int) -> None:
    for cleanup in list(_state.cleanups):
        cleanup()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    _end_by(number)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
