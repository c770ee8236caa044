"""Which part of a report speaks to which clause of the documents that privacy officers work with: our reading of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml

from gradveil.core.text import listing

_FILE = Path(__file__).parent / "templates" / "clauses.yaml"


@dataclass(frozen=True)
class Clause:
    """A part of a document, the answers that speak to it by their places on the page, and how they do."""

    document: str
    clause: str  # its number; empty where the part has none that we could check
    title: str
    answers: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        """`8.2.3 adversarial testing`."""
        return f"{self.clause} {self.title}".lstrip()


CLAUSES = tuple(Clause(**entry | {"answers": tuple(entry["answers"])}) for entry in yaml.safe_load(_FILE.read_text("utf-8")))
DOCUMENTS: Mapping[str, tuple[Clause, ...]] = {
    document: tuple(clauses) for document, clauses in groupby(CLAUSES, lambda clause: clause.document)
}


def documents_text() -> str:
    """`ISO/IEC 27559:2022 (6.2, 7.3.2), EDPB Opinion 28/2024 and …`."""
    numbers = {document: ", ".join(c.clause for c in clauses if c.clause) for document, clauses in DOCUMENTS.items()}
    return listing(f"{document} ({text})" if text else document for document, text in numbers.items())
