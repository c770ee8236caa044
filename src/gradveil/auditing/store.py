"""A run's folder: finished cells, their tensors, and what they add up to. One process at a time may write to it."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from gradveil import __version__
from gradveil.auditing.case import Case
from gradveil.auditing.plan import Cell
from gradveil.core.errors import UserError
from gradveil.core.types import Tensors
from gradveil.storage.files import LOCK, alone_in, is_temporary, remove_leftovers, write_json, write_tensors, write_text

_PACKAGES = ("torch", "numpy", "scipy", "safetensors", "pydantic", "pytorch-msssim")


class RunFolder:
    """Where the cells of one case are kept."""

    def __init__(self, path: Path):
        self.path = path

    @contextmanager
    def opened(self, case: Case) -> Iterator[RunFolder]:
        """Make the folder, or take up one that holds the same case, and keep others out of it meanwhile."""
        self.check(case)
        with alone_in(self.path, "audit"):
            os.chmod(self.path, 0o700)  # it will hold private images
            for part in ("cells", "tensors", "cache"):
                remove_leftovers(self.path / part)
            environment = {**self.environment, **environment_of(case)}
            write_json(self.path / "environment.json", environment)
            text = yaml.safe_dump(case.spec.plain(**case.names), sort_keys=False, allow_unicode=True)
            write_text(self.path / "audit.yaml", f"# gradveil {__version__}\n{text}")
            yield self

    def check(self, case: Case) -> None:
        """Refuse a folder that is neither empty nor the folder of this case: other files are the user's."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; --out names a folder.")
        environment = self.environment  # written before audit.yaml
        written_here = {"case", "gradveil"} <= environment.keys()
        if not (written_here and (self.path / "audit.yaml").is_file()):
            # A run that was killed as it began leaves at most these.
            started = {LOCK, "environment.json"} if written_here else {LOCK}
            if any(p.name not in started and not is_temporary(p.name) for p in self.path.iterdir()):
                raise UserError(f"{self.path} is not empty and holds no audit; choose another --out.")
            return
        try:
            before = yaml.safe_load((self.path / "audit.yaml").read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError):
            raise UserError(f"{self.path}/audit.yaml cannot be read; choose another --out.") from None
        before = before if isinstance(before, dict) else {}
        for name, value in case.terms.items():
            if before.get(name) != value:
                raise UserError(
                    f"{self.path} holds another audit ({name} {before.get(name)}, now {value}); choose another --out."
                )
        if environment["case"] != case.id:
            raise UserError(
                f"{self.path} holds an audit of the same name, but the data, the model or gradveil has changed since; "
                "choose another --out."
            )

    # -- cells -------------------------------------------------------------------------------------------------------

    def read(self, key: str) -> dict[str, Any] | None:
        """A cell as stored, or None if it is still to be done. One that raised an error is to be tried again."""
        try:
            cell = json.loads((self.path / "cells" / f"{key}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return None if cell.get("traceback") or not self._has_tensors(cell) else cell

    def outcome(self, key: str) -> dict[str, Any]:
        """What became of a cell in this run, failures included."""
        return dict(json.loads((self.path / "cells" / f"{key}.json").read_text(encoding="utf-8")))

    def write(self, cell: Cell, content: dict[str, Any], tensors: Tensors | None = None) -> dict[str, Any]:
        """Tensors first: a cell's file says that it is complete."""
        file = f"tensors/{cell.key}.safetensors" if tensors else None
        if file and tensors:
            write_tensors(self.path / file, tensors)
        named = {"key": cell.key, "kind": cell.kind, "defense": cell.defense, "attack": cell.attack or None}
        stored = {**named, "status": "ok", "error": None, **content, "tensors": file}
        write_json(self.path / "cells" / f"{cell.key}.json", stored)
        return stored

    def tensors(self, key: str) -> Tensors:
        return load_file(self.path / "tensors" / f"{key}.safetensors")

    def _has_tensors(self, cell: dict[str, Any]) -> bool:
        return not cell.get("tensors") or (self.path / cell["tensors"]).is_file()

    @property
    def cache(self) -> Path:
        """For what is trained once and may be used again: of this run, or shared by all runs where GRADVEIL_CACHE says so."""
        shared = os.environ.get("GRADVEIL_CACHE")
        return Path(shared) if shared else self.path / "cache"

    # -- the whole ---------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, Any]:
        file = self.path / "environment.json"
        if not file.is_file():
            return {}
        try:
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except (TypeError, ValueError):  # no JSON, or no object
            raise UserError(f"{file} is not that of an audit, or damaged; choose another --out.") from None

    def finish(self, summary: dict[str, Any], seconds: float) -> None:
        before = self.environment
        write_json(self.path / "environment.json", {**before, "seconds": before.get("seconds", 0.0) + seconds})
        write_json(self.path / "summary.json", summary)


def default_folder(case: Case) -> Path:
    """The same for the same case, so that the same command resumes."""
    words = "-".join(re.sub(r"[^\w.]+", "-", case.names[part]).strip("-.")[-40:] for part in ("data", "model"))
    return Path("runs") / f"{words}-{case.id[:6]}"


def environment_of(case: Case) -> dict[str, Any]:
    return {
        "case": case.id,
        "data_sha256": case.data_hash,
        "model_sha256": case.model_hash,
        "seed": case.spec.seed,
        "gradveil": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
