"""The one exception a user should ever see: a single line that says what was wrong and what to do."""

import difflib
import reprlib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """Bad input. The command line prints its text as one line and exits with code 2."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """A value from outside for a message: a few words of it, however large it is."""
    return _SHORT.repr(value)


def unknown(kind: str, name: str, names: Iterable[str], *, hint: str | None = None) -> UserError:
    """The error for a name that does not exist; it offers the nearest one."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    offer = f"; did you mean '{near[0]}'?" if near else "."
    return UserError(f"no {kind} '{name}'{offer} {hint or f'`gradveil list {kind}s` shows all.'}")


def one_line(error: BaseException) -> str:
    """The text of an exception as one line; its class where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def shape_text(shape: Sequence[int]) -> str:
    """The sizes of a tensor or array for a message: `3×32×32`."""
    return "×".join(map(str, shape)) or "a single number"
