"""The door out of a client: what leaves, what does not, and the evidence of both.

A shield, a guard and a mod each have one `Door`. It calls the defense, refuses an answer that is late, broken or incomplete,
logs one line per round, and can keep a record of each round in a file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gradveil import __version__
from gradveil.core.errors import UserError, one_line
from gradveil.core.hashing import digest
from gradveil.core.results import GradientChange
from gradveil.core.text import shorten
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Refused, Setup, Step, checked_update, is_plain
from gradveil.protection.audited import Audited, AuditOptions, DefenseSource, options_of

T = TypeVar("T")
Buffers = Literal["withhold", "send"]
_LOG = logging.getLogger("gradveil")
_BEGIN = b'{"time": "'  # of a file of evidence


class DoorOptions(AuditOptions, total=False):
    """How a door treats what no defense acts on, how long it waits, and where it keeps its evidence."""

    buffers: Buffers  # withhold, if left out: the server gets back the buffers that it sent
    deadline: float  # seconds that each call of the defense may take; later, nothing is sent
    evidence: str | Path  # a file that gets one line of JSON per round


class Checked(Defense):
    """A defense whose answers are refused unless they are complete and in time.

    Where `remote`, texts of exceptions stay here: Flower would send them to the server, and they may quote private data.
    """

    def __init__(self, inner: Defense, deadline: float | None = None, remote: bool = False):
        self.inner, self._deadline, self._remote = inner, deadline, remote

    @property
    def parts(self) -> tuple[Defense, ...]:
        return self.inner.parts

    def prepare(self, setup: Setup) -> Any:
        return self._answer(lambda: self.inner.prepare(setup), limited=False)

    def data(self, batch: Batch, step: Step) -> Batch:
        protected = _checked_batch(self._answer(lambda: self.inner.data(batch, step)))
        if len(protected) != len(batch):
            raise UserError(f"the defense made {len(protected)} images of {len(batch)}; nothing is sent.")
        return protected

    def batch(self, batch: Batch, step: Step) -> Batch:
        return _checked_batch(self._answer(lambda: self.inner.batch(batch, step)))

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        return self._answer(lambda: checked_update(tensors, self.inner.gradient(dict(tensors), step)))

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        # Copies: a defense that works in place must not change what its answer is compared with.
        copies = {name: t.clone() for name, t in tensors.items()}
        return self._answer(lambda: checked_update(tensors, self.inner.update(copies, step)))

    def _answer(self, call: Callable[[], T], limited: bool = True) -> T:
        try:
            with text_kept_here("the defense") if self._remote else nullcontext():
                return within(self._deadline if limited else None, call)
        except UserError:
            raise
        except Exception as error:
            reason = shorten(one_line(error), 160)
            raise Refused(f"the defense raised {type(error).__name__}: {reason}; nothing is sent.") from error


@contextmanager
def text_kept_here(name: str) -> Iterator[None]:
    """Log an error of `name`, and raise one without its text: Flower sends texts to the server."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        _LOG.error("%s failed", name, exc_info=error)
        raise Refused(f"{name} raised {type(error).__name__}; nothing is sent.") from None


def _checked_batch(returned: object) -> Batch:
    if type(returned) is not Batch or not is_plain(returned.x) or not is_plain(returned.y):
        raise Refused(f"the defense returned {type(returned).__name__}, not images and labels; nothing is sent.")
    if not bool(torch.isfinite(returned.x).all()):
        raise Refused("the defense made images with values that are not finite; nothing is sent.")
    return returned


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """The result of `call`, if it takes no longer than this. A call that does is left alone: its result goes nowhere."""
    if seconds is None:
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    gradients = torch.is_grad_enabled()  # a setting of each thread

    def run() -> None:
        try:
            with torch.set_grad_enabled(gradients):
                results.append(call())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="gradveil-defense", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Refused(f"the defense took more than the {seconds:g} s it had; nothing is sent.")
    if errors:
        raise errors[0]
    return results[0]


class Door:
    """Calls the defense for a shield, a guard or a mod, and tells what left in each round."""

    def __init__(
        self,
        kind: str,
        audited: Audited,
        *,
        buffers: Buffers = "withhold",
        deadline: float | None = None,
        evidence: str | Path | None = None,
    ):
        if buffers not in ("withhold", "send"):
            raise UserError(f"buffers={buffers!r}: write withhold or send.")
        if deadline is not None and not (0 < deadline < math.inf):
            raise UserError(f"deadline={deadline}: a number of seconds above zero.")
        audited.check_statistics(buffers == "send")
        self.kind, self.audited, self.defense, self.buffers = kind, audited, audited.defense, buffers
        self.checked = Checked(audited.defense, deadline, remote=kind != "shield")
        self._evidence = None if evidence is None else Path(evidence)
        if self._evidence is not None:
            _append(self._evidence, "")  # a file that cannot be written is reported before any work

    @classmethod
    def of(cls, kind: str, source: DefenseSource, options: DoorOptions) -> Door:
        """A door for a defense or an exported protection. Options of others are left alone."""
        return cls(
            kind,
            Audited.of(source, options_of(AuditOptions, options)),
            buffers=options.get("buffers", "withhold"),
            deadline=options.get("deadline"),
            evidence=options.get("evidence"),
        )

    @contextmanager
    def round(self, number: int | str) -> Iterator[None]:
        """Keep a record of a round that is refused."""
        try:
            yield
        except UserError as error:
            self._record(number, refused=str(error))
            raise

    def let_out(
        self,
        number: int | str,
        sent: Mapping[str, Tensor],
        protected: Sequence[str],
        withheld: Sequence[str] = (),
        unprotected: Sequence[str] = (),
        change: GradientChange | None = None,
    ) -> None:
        """Say what leaves. It is called before anything does: without the evidence that was asked for, nothing leaves.

        `change` is what the defense did to the update. It stands in the log of the client and in no evidence.
        """
        tensors = {name: t for name, t in sent.items() if t.numel()}
        norm = math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors.values()))
        self._record(
            number,
            protected=len(protected),
            withheld=list(withheld),
            unprotected=list(unprotected),
            norm=norm if math.isfinite(norm) else None,
            sha256=digest("", tensors),
        )
        facts, unusual = self.audited.in_words(change)
        line = f"'{self.defense.spec}' acted on {len(protected)} tensors{facts}"
        if withheld:
            line += f"; {len(withheld)} withheld (the received ones go back): {shorten(', '.join(withheld), 200)}"
        if unprotected:
            line += f"; {len(unprotected)} leave unprotected: {shorten(', '.join(unprotected), 200)}"
        level = logging.WARNING if unprotected or unusual else logging.INFO
        shown = _LOG.level or (_LOG.hasHandlers() and _LOG.isEnabledFor(level))
        if self.kind in ("mod", "guard") and not shown:  # nobody has set up logging; Flower shows its log nevertheless
            logging.getLogger("flwr").log(level, "gradveil: %s", line)
        else:
            _LOG.log(level, "%s", line)

    def _record(self, number: int | str, **facts: object) -> None:
        if self._evidence is None:
            return
        versions = {"gradveil": __version__, "torch": torch.__version__}
        versions |= {part.name: str(part.version) for part in self.defense.parts if part.name}
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": time, "door": self.kind, "round": number, "defense": self.defense.spec, "versions": versions}
        if self.audited.protection is not None:
            units = self.audited.protection.units.model_dump()
            record |= {"protection": self.audited.sha256, "units": units, "beyond_audit": self.audited.beyond_audit}
        _append(self._evidence, json.dumps({**record, **facts}, allow_nan=False) + "\n")


def _append(path: Path, text: str) -> None:
    """Add whole lines to a private file, in one piece and for good. A line that a crash cut off is ended first."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, flags, 0o600)
        try:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise UserError(f"{path}: not a regular file, so no evidence can be kept there; nothing is sent.")
            if facts.st_size and os.pread(handle, len(_BEGIN), 0) != _BEGIN:
                raise UserError(f"{path}: holds something else than evidence; choose another file. Nothing is sent.")
            torn = facts.st_size and os.pread(handle, 1, facts.st_size - 1) != b"\n"
            content = (("\n" if torn and text else "") + text).encode()
            if content and os.write(handle, content) != len(content):
                raise UserError(f"{path}: the evidence could not be written whole; nothing is sent.")
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: no evidence can be kept there ({reason}); nothing is sent.") from None
