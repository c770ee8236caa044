"""A run's folder, as reports read it: `summary.json` must be there, everything else may be missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from gradveil.core.errors import UserError
from gradveil.report.view import DefenseView, Row

SCHEMA = 1


@dataclass(frozen=True)
class RunFolder:
    """What an audit left behind."""

    path: Path
    summary: dict[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    settings: str = ""  # audit.yaml as written
    cells: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        summary = read_summary(path)
        environment, settings = path / "environment.json", path / "audit.yaml"
        cells = (_json(p) for p in sorted((path / "cells").glob("*.json")))
        return cls(
            path,
            summary,
            _json(environment) if environment.exists() else {},
            settings.read_text(encoding="utf-8") if settings.exists() else "",
            {str(c.get("key", "")): c for c in cells},
        )

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [c for c in self.cells.values() if c.get("kind") == kind]

    def attacked(self, defense: DefenseView) -> list[tuple[Row, Mapping[str, Any]]]:
        """The attacks of a defense with their cells, strongest first. A folder may hold cells of other audits too."""
        rows = sorted((r for r in defense.rows if r.against == "original"), key=lambda r: r.strength, reverse=True)
        named = {(c.get("defense"), c.get("attack")): c for c in self.of_kind("attack")}
        found = [(r, self.cells.get(r.cell or "") or named.get((defense.spec, r.attack))) for r in rows]
        return [(row, cell) for row, cell in found if cell is not None]

    def images(self, cell: Mapping[str, Any], name: str, which: list[tuple[int, int]]) -> list[NDArray[Any] | None]:
        """Images (C × H × W) of a cell by (victim, image), without reading the rest; `None` for those not there."""
        # Only the name counts: a folder from elsewhere must not point out of itself.
        file = self.path / "tensors" / Path(str(cell.get("tensors") or "")).name
        if not cell.get("tensors") or not file.is_file():
            return [None] * len(which)
        try:
            with safe_open(file, framework="numpy") as tensors:
                if name not in tensors.keys():  # noqa: SIM118 - the file handle is no mapping
                    return [None] * len(which)
                part = tensors.get_slice(name)
                shape = part.get_shape()
                if len(shape) != 5:
                    raise UserError(
                        f"{file}: '{name}' is {shape}, not victims × images × C × H × W. Run the audit again."
                    )
                inside = [v < shape[0] and b < shape[1] for v, b in which]
                return [
                    np.asarray(part[v : v + 1, b : b + 1])[0, 0] if there else None
                    for (v, b), there in zip(which, inside, strict=True)
                ]
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read ({error}). Delete its cell and resume the audit.") from None


def read_summary(path: Path) -> dict[str, Any]:
    """`summary.json` of a run's folder, or one clear line."""
    file = path / "summary.json"
    if not file.is_file():
        raise UserError(
            f"{path} has no summary.json, so it is not a finished run; `gradveil audit --out DIR` makes one."
        )
    summary = _json(file)
    if summary.get("schema", SCHEMA) != SCHEMA:
        raise UserError(f"{file} has schema {summary['schema']}, this version reads {SCHEMA}. Update gradveil.")
    return summary


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid JSON ({error}). Was it edited by hand?") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} does not hold a JSON object. Was it edited by hand?")
    return value
