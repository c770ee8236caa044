"""Pages that scripts write (method cards, results) enter the navigation by being there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GENERATED = {"Methods": "methods", "Results": "results"}


def on_config(config: Any) -> Any:
    folder = Path(config["docs_dir"])
    for title, name in GENERATED.items():
        pages = sorted((folder / name).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
        if pages:
            config["nav"].insert(-1, {title: [{_title(page): f"{name}/{page.name}"} for page in pages]})
    return config


def _title(page: Path) -> str:
    heading = re.search(r"^# +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1].replace("`", "").strip() if heading else page.stem
