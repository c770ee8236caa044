"""How a method is written down: `name`, `name:key=value,key=value`, and a registry to find it by name.

The settings of a method are the fields of a frozen dataclass made by `@settings`: typed, validated (bounds are
`Field(ge=…, le=…)`), with the paper's value as the default. The text form is the same for defenses, attacks, models.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import pydantic
from pydantic.dataclasses import dataclass as _pydantic_dataclass
from typing_extensions import dataclass_transform

from gradveil.core.errors import UserError, shown, unknown

T = TypeVar("T")
C = TypeVar("C", bound=type)

_NAME = r"[A-Za-z][\w-]*"
_SPEC = re.compile(rf"(?P<name>{_NAME})(?::(?P<settings>.*))?", re.DOTALL)
_IMPORT = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.\w+)*):(?P<object>[A-Za-z_]\w*)(?::(?P<settings>.*))?", re.DOTALL)


@dataclass_transform(frozen_default=True, field_specifiers=(pydantic.Field, dataclasses.field))
def settings(cls: C) -> C:
    """Make `cls` a frozen, validated dataclass: the settings of a method."""
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True, str_strip_whitespace=True)
    return cast(C, _pydantic_dataclass(frozen=True, config=config)(cls))


def spec_of(method: object) -> str:
    """The text form of a method, naming only what differs from the defaults; `parse` reads it back."""
    name = str(getattr(method, "name", "") or type(method).__name__)
    changed = []
    # A user's own class may do without settings.
    for field in dataclasses.fields(cast(Any, method)) if dataclasses.is_dataclass(method) else ():
        value = getattr(method, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        if isinstance(default, pydantic.fields.FieldInfo):
            default = default.get_default(call_default_factory=True, validated_data={})
        if value != default:
            changed.append(f"{field.name}={_text(value)}")
    return name + (":" + ",".join(changed) if changed else "")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "/".join(_text(v) for v in value)
    return str(value)


def parse_settings(text: str | None, *, of: str) -> dict[str, Any]:
    """`"a=1,b=x/y"` as a dictionary of strings; a value with slashes stays text until its field's type reads it."""
    pairs: dict[str, Any] = {}
    for part in (text or "").split(",") if text else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise UserError(f"'{of}': '{part}' is not a setting; write {of.partition(':')[0]}:key=value,key=value.")
        if key.strip() in pairs:
            raise UserError(f"'{of}': '{key.strip()}' is given twice.")
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def build(cls: type[T], values: Mapping[str, Any], *, of: str) -> T:
    """An instance of a settings class from text values, or one clear line on what does not fit."""
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls)) if f.init}
    for key in values:
        if key not in fields:
            have = ", ".join(fields) or "none"
            raise UserError(f"'{of}' has no setting '{key}'; its settings: {have}.")
    try:
        return cls(**{k: _sequence(v, fields[k]) for k, v in values.items()})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"]) or "settings"
        raise UserError(f"'{of}': {where}={shown(first['input'])}: {first['msg'].lower()}.") from None


def _sequence(value: Any, field: dataclasses.Field[Any]) -> Any:
    """Tuples are written with slashes: `layers=conv1/conv2`."""
    if isinstance(value, str) and "tuple[" in str(field.type):
        return tuple(value.split("/"))
    return value


def split_chain(text: str) -> list[str]:
    """Split `a:x=1+b` at the plus signs that begin a name, so that `policy=3-1-7+43-18-18` and `1e+3` stay whole."""
    parts = re.split(rf"\+(?={_NAME}(?:[:.+]|$))", text)
    if not all(p.strip() for p in parts):
        raise UserError(f"'{text}' has an empty part around '+'.")
    return [p.strip() for p in parts]


def load_object(path: str, *, kind: str) -> Any:
    """Import `pkg.mod:object`, on the user's explicit word only. The current folder is searched too."""
    match = _IMPORT.fullmatch(path)
    if not match:
        raise UserError(f"'{path}' is not of the form pkg.mod:object.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(match["path"])
    except ImportError as error:
        raise UserError(f"cannot import {kind} '{path}': {error}.") from None
    except Exception as error:
        raise UserError(f"importing {kind} '{path}' raised {type(error).__name__}: {error}") from None
    if not hasattr(module, match["object"]):
        raise UserError(f"module '{match['path']}' has no '{match['object']}' (asked for as {kind}).")
    return getattr(module, match["object"])


class Registry(Generic[T]):
    """Methods of one kind by name. `register` is used as a decorator by the file that holds the method."""

    def __init__(self, kind: str, package: str | None = None):
        self.kind = kind
        self._package = package  # imported on first look-up, so that its files register themselves
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str, **attributes: Any) -> Callable[[type[T]], type[T]]:
        def add(cls: type[T]) -> type[T]:
            if name in self._entries and self._entries[name].__qualname__ != cls.__qualname__:
                raise ValueError(f"two {self.kind}s are named '{name}'")
            for key, value in {"name": name, **attributes}.items():
                setattr(cls, key, value)
            self._entries[name] = cls
            return cls

        return add

    def _load(self) -> None:
        if self._package:
            package, self._package = self._package, None
            import_all(package)

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[type[T]]:
        self._load()
        return iter(self._entries[n] for n in self.names())

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._entries

    def __getitem__(self, name: str) -> type[T]:
        self._load()
        if name not in self._entries:
            raise unknown(self.kind, name, self._entries)
        return self._entries[name]

    def parse(self, text: str) -> T:
        """The method that `text` writes: a registered name, or a user's own class as `pkg.mod:Class`."""
        text = text.strip()
        match = _SPEC.fullmatch(text)
        if match and (match["name"] in self or not _IMPORT.fullmatch(text)):
            return build(self[match["name"]], parse_settings(match["settings"], of=text), of=text)
        own = _IMPORT.fullmatch(text)
        if not own:
            raise UserError(f"'{text}' is not a {self.kind}; write name or name:key=value,key=value.")
        path, _, given = text.partition(":")[0], None, own["settings"]
        cls = load_object(f"{path}:{own['object']}", kind=self.kind)
        if not isinstance(cls, type):
            raise UserError(f"'{path}:{own['object']}' is not a class; a {self.kind} is a class.")
        if "name" not in vars(cls):
            cls.name = f"{path}:{own['object']}"  # type: ignore[attr-defined]
        if not dataclasses.is_dataclass(cls):
            cls = settings(cls)
        return cast(T, build(cls, parse_settings(given, of=text), of=text))


def import_all(package: str) -> None:
    """Import every module below `package`, so that decorators in them have run."""
    import pkgutil

    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        importlib.import_module(info.name)
