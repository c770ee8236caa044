"""What tests of hostile input share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradveil.core.errors import UserError


@contextmanager
def refused(words: str, seconds: float = 5.0) -> Iterator[None]:
    """One line that holds the words, and soon."""
    began = time.process_time()
    with pytest.raises(UserError) as error:
        yield
    text = str(error.value)
    assert words in text and "\n" not in text and len(text) < 1000
    assert time.process_time() - began < seconds
