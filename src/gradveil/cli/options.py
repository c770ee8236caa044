"""The options of a command, made from typed fields: one field is an option, a YAML key and a Python argument.

A command is a function. A parameter whose type is a class with settings becomes one option per field. `Given[Class]`
does the same, but the command gets the values unchecked, for instance to put those of a file below them. All other
parameters are declared as typer does. Help shows a default in brackets, unless the description has a bracket already.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
import typer.core
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ParameterInfo

from gradveil.core.errors import UserError, shown
from gradveil.core.options import nested_class, option_of, types_of
from gradveil.core.settings import build, default_of, fields_of

if TYPE_CHECKING:
    import click

Command = Callable[..., int | None]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
T = TypeVar("T")

MAX_NAME, MAX_PATH = 255, 4095  # bytes, as file systems have it
_METAVARS: dict[object, str] = {int: "N", float: "X", Path: "PATH"}
_NO_DEFAULT = (None, False, PydanticUndefined, inspect.Parameter.empty)


class Given(dict[str, Any], Generic[T]):
    """The values that options gave to fields of a class, not checked yet."""


class _Parser(typer.core.TyperCommand):
    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Typer writes arguments above the options; click 8.5 would write them a second time."""


def parser_of(command: Command) -> click.Command:
    """The parser of a command, named like its file."""
    return parser_for(with_options(command), command.__module__.rpartition(".")[2])


def parser_for(function: Command, name: str) -> click.Command:
    """The parser of a function whose parameters are declared as typer takes them."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    app.command(name, cls=_Parser)(function)
    parser = typer.main.get_command(app)
    declared = inspect.signature(function).parameters
    for parameter in parser.params:  # click 8.5 drops the help of arguments
        parameter.__dict__["help"] = get_args(declared[str(parameter.name)].annotation)[1].help
    return parser


def with_options(command: Command) -> Command:
    """The command as typer takes it, with options in place of classes."""
    hints = get_type_hints(command, include_extras=True)
    classes: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        cls = get_args(hints[name])[0] if get_origin(hints[name]) is Given else hints[name]
        if isinstance(cls, type) and fields_of(cls):
            classes[name] = cls
            parameters += _parameters(cls)
        else:
            kind, info = get_args(hints[name])
            parameters.append(_parameter(name, kind, copy.copy(info), parameter.default))

    def run(**values: object) -> int | None:
        for value in values.values():
            if isinstance(value, Path):
                check_path(value)
        arguments: dict[str, object] = {}
        for name, cls in classes.items():
            fields, of = _take(values, cls), command.__module__.rpartition(".")[2]
            arguments[name] = fields if get_origin(hints[name]) is Given else build(cls, fields, of=of)
        return command(**arguments, **values)

    run.__doc__ = command.__doc__
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    return run


def check_path(path: Path) -> None:
    """Refuse a path that no file can have, before anything is done for it."""
    parts = [os.fsencode(part) for part in path.parts]
    if max(map(len, parts), default=0) > MAX_NAME or len(os.fsencode(path)) > MAX_PATH:
        raise UserError(f"{shown(str(path))} cannot be the name of a file or folder; give a shorter one.")


def fields_in(command: Command, cls: type[T], words: Sequence[str]) -> Given[T]:
    """What the words of a command give to the fields of a class. Words that are for something else are refused."""
    values = dict(parser_of(command).make_context(None, [*words]).params)
    fields: Given[T] = Given(_take(values, cls))
    if others := [name for name, value in values.items() if value not in (None, False, [], ())]:
        raise UserError(f"--{others[0].replace('_', '-')} has no place here; leave it out.")
    return fields


def _parameters(cls: type, prefix: str = "") -> list[inspect.Parameter]:
    """One parameter per field. A field that is a class itself becomes a switch, followed by its own fields."""
    parameters = []
    for name, field in fields_of(cls).items():
        option, inner = option_of(name, field, prefix), nested_class(field)
        kind: Any = bool if inner else _kind(field)
        names = f"{option}/--no-{option[2:]}" if kind is bool else option
        default = default_of(field)
        text = _with_default(field.description or _choices(field), ("on" if default else None) if inner else default)
        info = typer.Option(names, help=text, metavar=None if kind is bool else _METAVARS.get(kind, "TEXT"))
        parameters.append(_parameter(prefix + name, kind | None, info, None))
        parameters += _parameters(inner, f"{prefix}{name}_") if inner else []
    return parameters


def _parameter(name: str, kind: object, info: ParameterInfo, default: object) -> inspect.Parameter:
    info.help, info.show_default = _with_default(info.help or "", default), False
    kinds = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kinds, default=default, annotation=Annotated[kind, info])


def _kind(field: FieldInfo) -> Any:
    """What typer reads the option as; the class checks the value again."""
    kind, *others = types_of(field)
    if get_origin(kind) is tuple:
        return str if _is_numeric(kind) else list[str]
    return kind if not others and kind in (bool, int, float, Path) else str


def _is_numeric(kind: object) -> bool:
    """Numbers stand in one option, with commas; texts are given by repeating it."""
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    return (get_args(item)[0] if get_origin(item) is Annotated else item) in (int, float)


def _take(values: dict[str, object], cls: type, prefix: str = "") -> Given[object]:
    """Move the values of the fields of a class out of `values`; what was not given is left out."""
    fields: Given[object] = Given()
    for name, field in fields_of(cls).items():
        value, inner, option = values.pop(prefix + name), nested_class(field), option_of(name, field, prefix)
        if inner:
            parts = _take(values, inner, f"{prefix}{name}_")
            if value is False and parts:
                raise UserError(f"--no-{option[2:]} leaves nothing for {option}-{next(iter(parts))} to set.")
            if parts or value is not None:
                fields[name] = None if value is False else parts
        elif isinstance(value, str) and _is_numeric(types_of(field)[0]):
            fields[name] = _numbers(value, option)
        elif value is not None and value != []:
            fields[name] = value
    return fields


def _numbers(text: str, option: str) -> list[int | float]:
    try:
        return [float(part) if set(part) & set(".en") else int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        raise UserError(f"{option} {text}: write numbers with commas between.") from None


def _choices(field: FieldInfo) -> str:
    """`quick, standard or thorough.`"""
    words = [str(v) for kind in types_of(field) if get_origin(kind) is Literal for v in get_args(kind)]
    return f"{', '.join(words[:-1])} or {words[-1]}." if len(words) > 1 else ""


def _with_default(text: str, default: object) -> str:
    values = default if isinstance(default, (tuple, list)) else [default]
    shown = [str(value) for value in values if not any(value is none for none in _NO_DEFAULT)]
    return f"{text} [{', '.join(shown)}]" if shown and not text.endswith("]") else text
