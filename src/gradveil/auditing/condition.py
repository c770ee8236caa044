"""`--fail-if`: a condition on each defense of a summary, such as `worst.ssim.max > 0.6 and spec != "none"`.

Python's own grammar is parsed and a small part of it is read; nothing is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from gradveil.core.errors import UserError, unknown

_STAT = dict.fromkeys(("mean", "std", "min", "max"), 0.0)
# What there is to ask for, each with a value of its type.
_FIELDS: dict[str, Any] = {
    "spec": "",
    "verdict": "",
    "stage": [""],
    "counter": [""],
    "utility": dict.fromkeys(("acc_test", "acc_train", "acc_sensitive", "pdm", "overhead"), 0.0),
    "gradient": {"cosine": 0.0, "noise_ratio": 0.0},
    "worst": {
        **dict.fromkeys(("psnr", "ssim", "mse", "lpips"), _STAT),
        "asr": 0.0,
        "identified": dict.fromkeys(("rate", "low", "high", "chance"), 0.0),
        "recognised": 0,
    },
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class Condition:
    """Checked when it is made, so that a slip shows before the audit and not after it."""

    def __init__(self, text: str):
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
            self.fields = self._check(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._wrong("write for instance: worst.ssim.max > 0.6") from None

    def holds(self, defense: Mapping[str, Any]) -> bool:
        """Whether it holds for one defense of `summary.json`."""
        return self._true(self._tree, defense)

    def _wrong(self, why: str) -> UserError:
        return UserError(f"--fail-if '{self.text}': {why}.")

    def _check(self, node: ast.expr) -> set[str]:
        """The fields it asks for. Whatever is no condition is refused."""
        match node:
            case ast.BoolOp(values=parts):
                return set().union(*(self._check(part) for part in parts))
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return self._check(part)
            case ast.Compare(left=left, comparators=others):
                try:
                    self._true(node, _FIELDS)
                except TypeError:
                    raise self._wrong(f"{ast.unparse(node)} compares things of different kinds") from None
                return {".".join(path) for part in (left, *others) if (path := _path(part))}
        raise self._wrong(f"{ast.unparse(node)} is no condition; write for instance: worst.ssim.max > 0.6")

    def _true(self, node: ast.expr, defense: Mapping[str, Any]) -> bool:
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(self._true(part, defense) for part in parts)
            case ast.BoolOp(values=parts):
                return any(self._true(part, defense) for part in parts)
            case ast.UnaryOp(operand=part):
                return not self._true(part, defense)
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self._value(part, defense) for part in (left, *others)]
                pairs = zip(ops, values, values[1:], strict=False)
                return all(
                    _COMPARE[type(op)](a, b) if type(op) in _COMPARE else self._refuse(node) for op, a, b in pairs
                )
        raise self._wrong(f"{ast.unparse(node)} is no condition")

    def _refuse(self, node: ast.expr) -> bool:
        raise self._wrong(f"{ast.unparse(node)} cannot be compared like this")

    def _value(self, node: ast.expr, defense: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str()):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
        path = _path(node)
        if path is None:
            raise self._wrong(f"{ast.unparse(node)} is neither a number, a text nor a field")
        return self._field(path, defense)

    def _field(self, path: list[str], defense: Mapping[str, Any]) -> Any:
        found, known = defense, _FIELDS
        for depth, name in enumerate(path):
            if not isinstance(known, Mapping) or name not in known:
                there = [".".join([*path[:depth], n]) for n in known] if isinstance(known, Mapping) else []
                asked = ".".join(path[: depth + 1])
                near = unknown("field", asked, there, hint=f"There are: {', '.join(there) or 'none below'}.")
                raise self._wrong(str(near).rstrip("."))
            known = known[name]
            found = found.get(name) if isinstance(found, Mapping) else None  # type: ignore[assignment]
        if isinstance(known, Mapping):
            raise self._wrong(f"{'.'.join(path)} has parts: {', '.join(known)}")
        if found is None:
            raise self._wrong(f"{'.'.join(path)} was not measured for {defense.get('spec')}, so it cannot be checked")
        return found


def _path(node: ast.expr) -> list[str] | None:
    """`a.b.c` as its names."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=inner, attr=name):
            before = _path(inner)
            return None if before is None else [*before, name]
    return None
