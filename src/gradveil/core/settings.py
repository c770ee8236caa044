"""How a method is written: `name` or `name:key=value,key=value`, and a registry that finds it by name.

The settings of a method are the fields of a frozen dataclass made by `@settings`: typed, validated (bounds are
`Field(ge=…, le=…)`), with the paper's value as the default. The text form is the same for defenses, attacks and models.
"""

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar, cast

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass as _pydantic_dataclass
from pydantic.fields import FieldInfo
from typing_extensions import dataclass_transform

from gradveil.core.errors import UserError, shown, unknown

T = TypeVar("T")

_NAME = r"[A-Za-z][\w-]*"
_SPEC = re.compile(rf"(?P<name>{_NAME})(?::(?P<settings>.*))?", re.DOTALL)
_IMPORT = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.\w+)*):(?P<object>[A-Za-z_]\w*)(?::(?P<settings>.*))?", re.DOTALL)


@dataclass_transform(frozen_default=True, field_specifiers=(Field, dataclasses.field))
def settings(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, validated dataclass: the settings of a method.

    Type checkers see a default only where it is written by name: `Field(default=0.1, gt=0)`.
    """
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True, str_strip_whitespace=True, allow_inf_nan=False)
    return cast("type[T]", _pydantic_dataclass(frozen=True, config=config)(cls))


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """The settings of a class with their types, bounds, defaults and descriptions; empty where it has none."""
    described: dict[str, FieldInfo] | None = getattr(cls, "__pydantic_fields__", None)
    if described is not None or not dataclasses.is_dataclass(cls):
        return described or {}
    fields = dataclasses.fields(cls)  # a user's class may be a plain dataclass
    return {f.name: FieldInfo.from_annotated_attribute(cast("type", f.type), f) for f in fields}


def default_of(field: FieldInfo) -> object:
    """The default of a setting."""
    return field.get_default(call_default_factory=True, validated_data={})


def spec_of(method: object) -> str:
    """The text form of a method with the settings that differ from their defaults; `parse` reads it back."""
    name = str(getattr(method, "name", "") or type(method).__name__)
    values = {key: (getattr(method, key), default_of(field)) for key, field in fields_of(type(method)).items()}
    changed = [f"{key}={_text(value)}" for key, (value, default) in values.items() if value != default]
    return name + (":" + ",".join(changed) if changed else "")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "/".join(_text(v) for v in value)
    return str(value)


def parse_settings(text: str | None, *, of: str) -> dict[str, str]:
    """`"a=1,b=x/y"` as a dictionary of texts, which the types of the fields read later."""
    pairs: dict[str, str] = {}
    for part in text.split(",") if text else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise UserError(f"'{of}': '{part}' is not a setting; write {of.partition(':')[0]}:key=value,key=value.")
        if key.strip() in pairs:
            raise UserError(f"'{of}': '{key.strip()}' is given twice.")
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def build(cls: type[T], values: Mapping[str, object], *, of: str) -> T:
    """An instance of a settings class from values or their texts; what does not fit raises one clear line."""
    fields = fields_of(cls)
    for key in values:
        if key not in fields:
            raise UserError(f"'{of}' has no setting '{key}'; its settings: {', '.join(fields) or 'none'}.")
    try:
        return cls(**{key: _read_tuple(value, fields[key]) for key, value in values.items()})
    except pydantic.ValidationError as error:
        raise UserError(f"'{of}': {first_error(error)}") from None


def first_error(error: pydantic.ValidationError) -> str:
    """The first thing that does not fit, as one line."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "settings"
    if first["type"] == "missing":
        return f"{place} is missing."
    return f"{place}={shown(first['input'])}: {first['msg'].removeprefix('Value error, ').lower()}."


def _read_tuple(value: object, field: FieldInfo) -> object:
    """Tuples are written with slashes: `layers=conv1/conv2`."""
    return tuple(value.split("/")) if isinstance(value, str) and "tuple[" in str(field.annotation) else value


def choose(kind: str, text: str, choices: Mapping[str, type[T]]) -> T:
    """The one of `choices` that `text` names, with its settings: `name` or `name:key=value`."""
    name, _, values = text.strip().partition(":")
    if name not in choices:
        raise unknown(kind, name, choices, hint=f"There are: {', '.join(choices)}.")
    return build(choices[name], parse_settings(values, of=text), of=text)


def split_chain(text: str) -> list[str]:
    """Split `a:x=1+b` at the plus signs that begin a name, so that `policy=3-1-7+43-18-18` and `1e+3` stay whole."""
    parts = re.split(rf"\+(?={_NAME}(?:[:.+]|$))", text)
    if not all(p.strip() for p in parts):
        raise UserError(f"'{text}' has an empty part around '+'.")
    return [p.strip() for p in parts]


def load_object(path: str, *, kind: str) -> object:
    """Import `pkg.mod:object`, which a user named explicitly. The current folder is searched too."""
    match = _IMPORT.fullmatch(path)
    if not match:
        raise UserError(f"'{path}' is not of the form pkg.mod:object.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(match["path"])
    except ImportError as error:
        raise UserError(f"cannot import {kind} '{path}': {error}.") from None
    except (Exception, SystemExit) as error:  # the module may do anything
        raise UserError(f"importing {kind} '{path}' raised {type(error).__name__}: {error}") from None
    if not hasattr(module, match["object"]):
        raise UserError(f"module '{match['path']}' has no '{match['object']}' (asked for as {kind}).")
    loaded: object = getattr(module, match["object"])
    return loaded


class Registry(Generic[T]):
    """Methods of one kind by name. `register` is used as a decorator by the file that holds the method."""

    def __init__(self, kind: str, package: str | None = None):
        self.kind = kind
        self._package = package  # imported at the first look-up, so that its files register their methods
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str, **attributes: object) -> Callable[[type[T]], type[T]]:
        def add(cls: type[T]) -> type[T]:
            if not cls.__module__.startswith(f"{self._package}."):
                self._load()  # the methods of the package come first
            if not _same(self._entries.get(name, cls), cls):
                raise ValueError(f"two {self.kind}s are named '{name}'")
            self._entries[name] = cls
            return _with_attributes(cls, {"name": name, **attributes})

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

    def check_name(self, method: T) -> None:
        """Refuse a method that has the name of another class, for which it would be taken."""
        name = str(getattr(method, "name", ""))
        if name in self and not _same(self[name], type(method)):
            raise UserError(f"{self.kind} '{name}' is not the class {type(method).__qualname__}; give that another `name`.")

    def parse(self, text: str) -> T:
        """The method that `text` writes: a registered name, or a user's class as `pkg.mod:Class`."""
        text = text.strip()
        match, user = _SPEC.fullmatch(text), _IMPORT.fullmatch(text)
        if match and (match["name"] in self or not user):
            return build(self[match["name"]], parse_settings(match["settings"], of=text), of=text)
        if not user:
            raise UserError(f"'{text}' is not a {self.kind}; write name or name:key=value,key=value.")
        path = f"{user['path']}:{user['object']}"
        cls = load_object(path, kind=self.kind)
        if not isinstance(cls, type):
            raise UserError(f"'{path}' is not a class; a {self.kind} is a class.")
        if "name" not in vars(cls):
            _with_attributes(cls, {"name": path})
        if not dataclasses.is_dataclass(cls):
            cls = settings(cls)
        return build(cast("type[T]", cls), parse_settings(user["settings"], of=text), of=text)


def _same(one: type, other: type) -> bool:
    """Whether two classes may share a name. A user's may be defined again, as notebooks do, or come from two modules."""
    places = [(cls.__qualname__, cls.__module__.startswith("gradveil.")) for cls in (one, other)]
    return one is other or places[0] == places[1]


def _with_attributes(cls: type[T], attributes: Mapping[str, object]) -> type[T]:
    for key, value in attributes.items():
        setattr(cls, key, value)
    return cls


def import_all(package: str) -> None:
    """Import every module below `package`, so that decorators in them have run."""
    import pkgutil

    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        importlib.import_module(info.name)
