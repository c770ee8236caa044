"""`--fail-if`: a condition on each defense of a summary, such as `worst.ssim.max > 0.6 and spec != "none"`.

The grammar is Python's; a small part of it is read, and nothing is ever executed. A condition that needs a value which was
not measured neither holds nor fails: a gate that is green because nothing was measured would be worse than none.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from gradveil.core.errors import UserError, unknown
from gradveil.core.text import listing
from gradveil.summary import CANNOT_TELL, DefenseRow, Summary

Operand = str | float | tuple[str, ...]


def _fields(kind: Any, path: str = "") -> Iterator[tuple[str, Operand]]:
    """The fields of a type that can be asked for, such as `worst.ssim.max`, each with a value of its type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType, Annotated):
        yield from _fields(next(part for part in parts if part is not NoneType), path)
    elif origin is dict:
        return  # whose keys differ from run to run
    elif origin is tuple:
        yield from ((name, (value,)) for name, value in _fields(parts[0], path) if name == path and value == "")
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            yield from _fields(info.annotation, f"{path}.{name}" if path else name)
    else:
        yield path, "" if origin is Literal else kind()


_FIELDS = dict(_fields(DefenseRow))
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
    """CheckedCondition when it is made, so that a slip shows before the audit and not after it."""

    def __init__(self, text: str):
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
            self.fields = self._check(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._wrong("write for instance: worst.ssim.max > 0.6") from None

    def holds(self, defense: DefenseRow) -> bool | None:
        """Whether it holds for one defense of `summary.json`; None where that depends on a value that was not measured."""
        return self._true(self._tree, defense)

    def check(self, defenses: Sequence[DefenseRow]) -> "CheckedCondition":
        """It on every defense."""
        outcomes = {defense.spec: self.holds(defense) for defense in defenses}
        missing = {
            defense.spec: tuple(path for path in sorted(self.fields) if _field(defense, path) is None)
            for defense in defenses
            if outcomes[defense.spec] is None
        }
        return CheckedCondition(self.text, tuple(spec for spec, holds in outcomes.items() if holds), missing)

    def _wrong(self, why: str) -> UserError:
        return UserError(f"--fail-if '{self.text}': {why}.")

    def _check(self, node: ast.expr) -> set[str]:
        """The fields it asks for. Whatever is no condition is refused."""
        match node:
            case ast.BoolOp(values=parts):
                return set().union(*(self._check(part) for part in parts))
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return self._check(part)
            case ast.Compare(left=left, ops=ops, comparators=others):
                if not all(type(op) in _COMPARE for op in ops):
                    raise self._wrong(f"{ast.unparse(node)} cannot be compared like this")
                try:
                    self._true(node, None)
                except TypeError:
                    raise self._wrong(f"{ast.unparse(node)} compares things of different kinds") from None
                return {path for part in (left, *others) if (path := _path(part))}
        raise self._wrong(f"{ast.unparse(node)} is no condition; write for instance: worst.ssim.max > 0.6")

    def _true(self, node: ast.expr, defense: DefenseRow | None) -> bool | None:
        """None: unknown. With no defense, fields have a value of their type: what cannot be compared raises TypeError."""
        match node:
            case ast.BoolOp(op=op, values=parts):
                outcomes, decisive = [self._true(part, defense) for part in parts], isinstance(op, ast.Or)
                return decisive if decisive in outcomes else None if None in outcomes else not decisive
            case ast.UnaryOp(operand=part):
                inner = self._true(part, defense)
                return None if inner is None else not inner
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self._value(part, defense) for part in (left, *others)]
                if any(value is None for value in values):
                    return None
                return all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
        raise self._wrong(f"{ast.unparse(node)} is no condition")

    def _value(self, node: ast.expr, defense: DefenseRow | None) -> Operand | None:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as constant):
                return constant
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
        path = _path(node)
        if not path:
            raise self._wrong(f"{ast.unparse(node)} is neither a number, a text nor a field")
        if path not in _FIELDS:
            raise self._wrong(_no_field(path))
        return _FIELDS[path] if defense is None else _field(defense, path)


@dataclass(frozen=True)
class CheckedCondition:
    """A condition and the defenses of one summary."""

    text: str
    holds: tuple[str, ...] = ()  # the defenses for which it holds
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by defense, what it needs and was not measured


def untold(summary: Summary, checked: Sequence[CheckedCondition]) -> list[str]:
    """What a gate asks and the audit cannot tell, one line each. The control counts: it shows what the attacks can do."""
    judged = [d.spec for d in summary.defenses if d.verdict == CANNOT_TELL]
    lines = [f"the audit cannot tell whether updates leak under {listing(judged)}"] if judged else []
    for condition in checked:
        for spec, fields in condition.missing.items():
            lines.append(f"the audit cannot tell whether {condition.text} holds for {spec}: {listing(fields)} was not measured")
    return lines


def _field(defense: DefenseRow, path: str) -> Operand | None:
    """A field of a defense, such as `worst.ssim.max`; None where it was not measured."""
    part: Any = defense
    for name in path.split("."):
        part = getattr(part, name, None)
    value: Operand | None = part
    return value


def _no_field(path: str) -> str:
    below = [field.removeprefix(f"{path}.") for field in _FIELDS if field.startswith(f"{path}.")]
    if below:
        return f"{path} has parts: {', '.join(below)}"
    first = dict.fromkeys(field.partition(".")[0] for field in _FIELDS)
    return str(unknown("field", path, _FIELDS, hint=f"There are: {', '.join(first)}"))


def _path(node: ast.expr) -> str:
    """`a.b.c` as text; of anything else nothing."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            before = _path(inner)
            return before and f"{before}.{name}"
    return ""
