"""Temporary folders for private data: removed when they are no longer used, on a signal, and after a kill at the next start.

A folder has a name that only gradveil makes, and a marker with this name, the folder's inode, the process and the time. The
process holds a lock on the marker, which the system takes away when the process ends, however it ends. A folder is removed
as a leftover only where all of this agrees, it belongs to this user, and nobody holds the lock.
"""

import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gradveil.processes.ending import at_end

if sys.platform != "win32":
    import fcntl

_NAME = re.compile(r"\.gradveil-[0-9a-f]{16}\.folder")
_MARKER = ".gradveil-process"


class TemporaryFolder:
    """A private folder that goes with this object's `remove`, with its block, or with the process."""

    def __init__(self, beside: Path | None = None):
        """Make the folder in the system's folder for temporary files, or in `beside`; first remove leftovers there."""
        parent = Path(tempfile.gettempdir()) if beside is None else beside
        remove_leftover_folders(parent)
        self._root = parent / f".gradveil-{secrets.token_hex(8)}.folder"
        self._root.mkdir(mode=0o700)
        self._process = os.getpid()
        self._marker = os.open(self._root / _MARKER, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        _lock(self._marker)
        # Written when the lock is held: a marker without text is nobody's.
        os.write(self._marker, f"{_owner(self._root)} process {os.getpid()} since {time.time():.0f}\n".encode())
        self._forget = at_end(self.remove)

    @property
    def path(self) -> Path:
        """For the content. It does not exist yet."""
        return self._root / "content"

    def remove(self) -> None:
        """Remove the folder. A forked child leaves it to its parent."""
        if self._process == os.getpid():
            self._process = 0
            _clear(self._root)
            os.close(self._marker)
            self._forget()

    def __enter__(self) -> Path:
        self.path.mkdir(mode=0o700)
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def remove_leftover_folders(parent: Path | None = None) -> None:
    """Remove the folders of processes of this user that were killed, and nothing else."""
    with suppress(OSError):  # a folder for temporary files that cannot be listed has no leftovers that could be removed
        for entry in os.scandir(tempfile.gettempdir() if parent is None else parent):
            if _NAME.fullmatch(entry.name) and hasattr(os, "geteuid"):
                _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    """Every doubt (an error of the system) leaves the folder where it is."""
    with suppress(OSError):
        if not stat.S_ISDIR((status := os.lstat(folder)).st_mode) or status.st_uid != os.geteuid():
            return
        marker = os.open(folder / _MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(marker)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
            if ours and os.read(marker, 200).decode("ascii", "replace").startswith(f"{_owner(folder)} process "):
                _lock(marker)  # raises while its process lives; held until the folder is gone
                _clear(folder)
        finally:
            os.close(marker)


def _owner(folder: Path) -> str:
    return f"gradveil {folder.name} {os.lstat(folder).st_ino}"


def _lock(marker: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _clear(folder: Path) -> None:
    """The marker goes last, so that a process that is killed here leaves a leftover that can be told."""
    for entry in os.scandir(folder):
        if entry.name != _MARKER:
            shutil.rmtree(entry.path, ignore_errors=True)
            with suppress(OSError):  # it was a folder and is gone
                os.unlink(entry.path)
    shutil.rmtree(folder, ignore_errors=True)
