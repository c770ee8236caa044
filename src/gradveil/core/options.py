"""How typed settings are written on a command line: one option per field, and the fields of a nested class with a prefix."""

from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gradveil.core.settings import fields_of


@dataclass(frozen=True)
class Option:
    """Names the option of a field where the field's name does not: `Annotated[tuple[str, ...], Option("defense")]`."""

    name: str


def option_of(name: str, field: FieldInfo, prefix: str = "") -> str:
    """`--batch-size` for `batch_size`."""
    marked = next((mark.name for mark in field.metadata if isinstance(mark, Option)), name)
    return "--" + f"{prefix}{marked}".replace("_", "-")


def types_of(field: FieldInfo) -> tuple[object, ...]:
    """The types that a field takes, without None and bounds: those of a union, or its one type."""
    types = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    return tuple(get_args(t)[0] if get_origin(t) is Annotated else t for t in types if t is not type(None))


def nested_class(field: FieldInfo) -> type | None:
    """The class of a field that holds settings itself."""
    return next((t for t in types_of(field) if isinstance(t, type) and fields_of(t)), None)


def option_words(spec: object, prefix: str = "") -> list[str]:
    """The options that differ from the defaults, as words of a command."""
    words: list[str] = []
    defaults = type(spec)()
    for name, field in fields_of(type(spec)).items():
        value, option = getattr(spec, name), option_of(name, field, prefix)
        if value == getattr(defaults, name):
            continue
        if nested_class(field):
            words += [f"--no-{option[2:]}"] if value is None else [option, *option_words(value, f"{prefix}{name}_")]
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [word for each in values for word in (option, str(each))]
    return words
