"""The evidence behind a page as one hash, and whether a page says what its run holds.

The hash covers what the finding rests on: the summary, the settings, the environment (with the hashes of data and model) and
every stored cell, each of which holds the hash of its tensors. It protects a finding only where a copy of the hash is kept
elsewhere, such as on a signed print.
"""

import hashlib
import re
from collections.abc import Callable

from gradveil.core.errors import UserError
from gradveil.core.results import ScoreRow
from gradveil.storage.reading import MAX_JSON, read_bytes
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import Summary

PAGE = "report.html"
MAX_PAGE = 1 << 26  # bytes; pages are kept below 15 MB
_FILES = ("summary.json", "audit.yaml", "environment.json")
_MARK = re.compile(r'<meta name="gradveil" content="pictures=(none|blurred|shown) evidence=([0-9a-f]{64})">')


def evidence_hash(run: RunFolder) -> str:
    """SHA-256 over the names and hashes of all files that the finding rests on."""
    names = [name for name in _FILES if (run.path / name).is_file()] + [f"cells/{key}.json" for key in run.cells]
    digests = ((name, hashlib.sha256(read_bytes(run.path / name, MAX_JSON)).hexdigest()) for name in sorted(names))
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in digests).encode()).hexdigest()


def disagreement(run: RunFolder, render: Callable[[RunFolder, str], str]) -> str | None:
    """Where page, summary and cells of a run do not agree, in words; None: they do."""
    file = run.path / PAGE
    if not file.is_file():
        return f"there is no {file}; `gradveil report {run.path}` makes it"
    text = read_bytes(file, MAX_PAGE).decode("utf-8", "replace")
    mark = _MARK.search(text)
    if mark is None:
        return f"{file} does not name its evidence, so gradveil did not write it, or an earlier version did"
    pictures, stated = mark.groups()
    try:
        if (evidence := evidence_hash(run)) != stated:
            return f"{file} was made of other evidence (SHA-256 {stated[:16]}…) than is stored here ({evidence[:16]}…)"
        if row := _wrong_row(run, Summary.read(run.path)):
            return row
        for cell in run.cells.values():
            if cell.tensors_sha256 is not None:
                run.shapes(cell)  # opening a file of tensors compares it with its hash
        again = render(run, pictures)
    except UserError as error:
        return str(error).removesuffix(".")
    if again != text:
        return (
            f"{file} is not the page that this version of gradveil makes of the run: it was edited, or another version made it"
        )
    return None


def _wrong_row(run: RunFolder, summary: Summary) -> str | None:
    """A row of the summary that its stored cell does not bear out."""
    for defense in summary.defenses:
        for row in defense.attacks:
            cell, where = run.cells.get(row.cell), f"{row.spec} under {defense.spec}"
            if cell is None:
                return f"the summary's row of {where} rests on a cell that is not stored"
            scores = ScoreRow(**{name: getattr(row, name) for name in ScoreRow.model_fields})
            if row.status != cell.status or (row.ok and scores not in cell.rows):
                return f"the summary's row of {where} is not what its cell holds"
    return None
