"""The browser at hand, without a window and without a network: it prints pages, and tests and screenshots look at them.

It gets a profile of its own in a temporary folder, so nothing of the user's is read or changed. It is ended after a bounded
time, with all processes that it started.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gradveil.core.errors import UserError, one_line
from gradveil.core.text import plain
from gradveil.processes.ending import at_end
from gradveil.processes.temporary import TemporaryFolder

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
SECONDS = 120.0  # a long page on a busy machine takes ten
_QUIET = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name leads anywhere: a page that asks for something gets nothing
)


def find_browser() -> str | None:
    """The program of a browser that can print, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def run_browser(browser: str, page: Path, options: Sequence[str], seconds: float = SECONDS) -> str:
    """Open a page with these options, and return what the browser prints."""
    # Chromium refuses to run as root with a sandbox. Pages that are opened here run no script but gradveil's.
    as_root = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with TemporaryFolder() as profile:
        command = [browser, *_QUIET, *as_root, f"--user-data-dir={profile}", *options, page.resolve().as_uri()]
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"{browser} cannot be started ({one_line(error)}).") from None
        forget = at_end(lambda: _end(child))
        with child:
            try:
                output, errors = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise UserError(f"{browser} did not end within {seconds:.0f} s.") from None
            finally:
                _end(child)
                forget()
    if child.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"
        raise UserError(f"{browser} ended with code {child.returncode} ({plain(last)}).")
    return output.decode(errors="replace")


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a browser that still runs, and the processes that it started: they are in its group."""
    if child.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
