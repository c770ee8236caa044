"""Who audited what: the names that only people can give, for the first page of a report. Stored beside the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, StringConstraints, ValidationError, field_validator

from gradveil.core.errors import UserError
from gradveil.core.results import Record
from gradveil.core.settings import first_error
from gradveil.core.text import plain
from gradveil.storage.files import write_text
from gradveil.storage.reading import read_yaml
from gradveil.storage.run_folder import read_record

FILE = "about.json"
MAX_NAME, MAX_FILE = 80, 10_000  # characters of a name, bytes of a file: they must fit on the first page

Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_NAME)]


class About(Record):
    """Names for the first page; None: not told."""

    model_config = ConfigDict(extra="forbid")

    organisation: Name | None = None
    auditor: Name | None = None
    system: Name | None = None  # that the audited model is trained for
    system_version: Name | None = None

    @field_validator("*")
    @classmethod
    def _one_line(cls, value: str | None) -> str | None:
        if value is not None and value != plain(value):
            raise ValueError("must be one line without control characters")
        return value

    @classmethod
    def of_run(cls, folder: Path) -> About:
        """What is stored beside the run; nothing where there is no such file."""
        if not os.path.lexists(folder / FILE):
            return cls()
        return read_record(folder / FILE, cls, f"delete it and give the names again ({', '.join(cls.model_fields)})")

    def store(self, folder: Path) -> None:
        write_text(folder / FILE, self.model_dump_json(indent=1) + "\n")

    def changed(self, file: Path | None, options: Mapping[str, str | None]) -> About:
        """With the names of a YAML or JSON file, and above them those of options that were used."""
        stated = _read(file) if file else {}
        stated |= {name: value for name, value in options.items() if value is not None}
        try:
            return About.model_validate({**dict(self), **stated})
        except ValidationError as error:
            raise UserError(f"{file or 'the names'}: {first_error(error)}") from None


def _read(file: Path) -> dict[str, object]:
    content = read_yaml(file, MAX_FILE)
    if not isinstance(content, dict) or not set(content) <= set(About.model_fields):
        raise UserError(f"{file}: a mapping is needed, with no other keys than {', '.join(About.model_fields)}.")
    return content
