"""Words for people: one line without control characters, counted nouns, lists."""

from collections.abc import Iterable


def plain(text: str) -> str:
    """One line without control characters, so that a name cannot move the cursor of a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def plural(count: int, word: str) -> str:
    """`1 image`, `2,000 images`."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def listing(items: Iterable[str]) -> str:
    """`a, b and c`."""
    parts = list(items)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}" if parts else ""


def duration(seconds: float) -> str:
    """`40 seconds`, `12 minutes`, `3.2 hours`: about how long."""
    if seconds < 90:
        return plural(max(1, round(seconds)), "second")
    return plural(round(seconds / 60), "minute") if seconds < 5400 else f"{seconds / 3600:.1f} hours"
