"""A page as its reader meets it: tags, words and pictures."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from advised import advised
from PIL import Image

from gradveil.auditing.spec import PictureMode
from gradveil.report import write_report


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style and script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._raw, self._term, self._inline = "", False, False
        self.source = text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        self._raw = tag if tag in ("style", "script") else self._raw
        self._term = ("class", "term") in attrs
        self._inline = self._term

    def handle_endtag(self, tag: str) -> None:
        self._raw = "" if tag == self._raw else self._raw
        self._inline, self._term = self._term and tag == "a", False

    def handle_data(self, data: str) -> None:
        if self._raw == "script":
            self.scripts.append(data)
        if not self._raw and self._inline and self.words:  # a word that is explained is part of its sentence
            self.words[-1] += data
        elif not self._raw:
            self.words.append(data)
        self._inline = False

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in attributes.items())]


def page_of(folder: Path, mode: PictureMode = "blurred") -> Page:
    return Page(write_report(folder, mode).read_text(encoding="utf-8"))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    summary = json.loads((folder / "summary.json").read_text())
    change(summary)
    (folder / "summary.json").write_text(json.dumps(advised(summary)))
    return folder


def tiles(page: Page, sprite: int) -> np.ndarray[Any, Any]:
    found = re.search(rf"\.s{sprite}{{background-image:url\(data:image/png;base64,([^)]*)\)}}", page.source)
    assert found
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))))
