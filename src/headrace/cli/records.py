"""Options of commands, made from settings records: a field is an option, its docstring the help text.

A record is a dataclass or a ``TypedDict``. A field that is a record itself adds its options to the
others; one that may be None is made if one of its options is given. Fields are
annotated where their type is not enough: ``Annotated[str, Positional("TASK")]`` is given without a name,
``Annotated[FilmCfg, Only("video")]`` takes some fields of a record, and ``Annotated[range, parse]`` is what ``parse``
makes of the text. A mapping is given as ``NAME=VALUE``, repeated.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from rich.console import Console

from headrace._progress import say
from headrace.envs.recipe import parse_assignments
from headrace.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from headrace.bench.schema import Bundle


T = TypeVar("T")
_FLAGS = {
    "FilmCfg.directory": "--films",
    "FilmCfg.episodes": "--film",
    "FilmCfg.interval": "--video-interval",
    "SuccessRule.kind": "--success-rule",
    "SuccessRule.threshold": "--success-threshold",
    "SuccessRule.window": "--success-window",
    "NewOptions.model": "--from",
    "cameras": "--camera-name",
    "ensemble_decay": "--ensemble",
    "formatters": "--formatter",
    "metrics": "--metric",
    "overrides": "--set",
    "stacks": "--stack",
}
"""Options that are not named like their field."""
_METAVARS = {"--commits": ("A", "B"), "--max-wait": "MS", "--set": "PATH=VALUE", "--vary": "OPTION=V1,V2"}
"""What the help calls a value where the type of the field, or the name of the option, does not do."""


class Shared:
    """Help texts of fields that several commands have, for those without a docstring of their own."""

    batch_size: int
    """Rows of every batch in strict mode (default: 16)."""
    execute: int
    """Actions executed of each chunk (default: all)."""
    fast: bool
    """Batches of varying size, without padding rows; the last bits of an answer depend on the rest of its batch."""
    episodes: int
    """Episodes to play, with ids from 0, each counted once."""
    library: str
    """RL library: headrace (our own small PPO), rl_games, rsl_rl, sb3, skrl, or one that an installed package adds."""
    num_envs: int
    """Environments in the batch."""
    num_steps: int
    """Steps of the batch."""
    output: str
    """Where to write the result: a new file, or a new directory of several files."""
    overrides: Mapping[str, object]
    """Settings of the task by path, or arguments of a Gymnasium environment."""
    port: int
    """Port to listen on; 0 for any free one."""
    record: str
    """New directory to record every finished episode in; physics states, too, of a task of ours."""
    renderer: str
    """What draws: native, gl (MuJoCo's own images) or warp."""
    resume: bool
    """Continue what was cut short: do only what its journal or checkpoint lacks."""
    seed: int
    """Seed of episodes and of everything else that is random."""
    task: str
    """A name from 'headrace tasks', module:NAME, gym:ID, or a recipe file (.yaml, .json)."""
    video: str
    """Film the first environments into this file, which must be new."""
    warmup_steps: int
    """Steps before measuring, at least; more until the step time is steady."""


class Positional(NamedTuple):
    """Marks a field that is given without the name of an option."""

    metavar: str | None = None
    rest: bool = False
    """Whether it takes all that follows, options included."""


class Only:
    """Names the fields of a record that a command takes."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Command(NamedTuple):
    """A command: its record, whose docstring describes it, and what it does with one."""

    record: type[Any]
    handle: Callable[[Any], int]


class _Field(NamedTuple):
    name: str
    option: str
    kind: Any
    """The type, without None."""
    default: Any
    """``MISSING`` where it must be given."""
    marks: tuple[Any, ...]
    """What the type is annotated with."""

    def mark(self, kind: type[T]) -> T | None:
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


@cache
def field_docs(record: type[Any]) -> dict[str, str]:
    """Return the docstring of every field of a class: on one line, without markup and the last period."""
    docs: dict[str, str] = {}
    for line, after in pairwise(
        cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]).body
    ):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr):
            text = " ".join(ast.literal_eval(after.value).split()).replace("``", "").removesuffix(".")
            docs[line.target.id] = text[0].lower() + text[1:] if text[1:2] in " " or text[1].islower() else text
    return docs


@cache
def _fields(record: type[Any], only: Only | None) -> tuple[_Field, ...]:
    entries = {entry.name: entry for entry in fields(record)} if is_dataclass(record) else {}
    found: list[_Field] = []
    for name, annotation in record.__annotations__.items():
        if only is not None and name not in only.names:
            continue
        # each by itself: a field that is left out may have a type that is imported for type checkers only
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        kind = get_type_hints(holder, vars(sys.modules[record.__module__]), include_extras=True)[name]
        marks: list[Any] = []
        if get_origin(kind) is Annotated:
            kind, *marks = get_args(kind)
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(part for part in get_args(kind) if part is not types.NoneType)
        default: Any = None
        if (entry := entries.get(name)) is not None and entry.default_factory is MISSING:
            default = entry.default
        option = f"--{'no-' if default is True else ''}{name.replace('_', '-')}"
        option = _FLAGS.get(f"{record.__name__}.{name}") or _FLAGS.get(name) or option
        found.append(_Field(name, option, kind, default, tuple(marks)))
    return tuple(found)


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "__total__")


def add_options(parser: argparse.ArgumentParser, record: type[Any], only: Only | None = None) -> None:
    """Add the options of a record, or those of some of its fields, to a parser."""
    docs = field_docs(Shared) | field_docs(record)
    for field in _fields(record, only):
        if _is_record(field.kind):
            add_options(parser, field.kind, field.mark(Only))
            continue
        given, text = _argument(field), docs[field.name]
        if field.kind is not bool and field.default not in (None, MISSING, ()):
            shown = field.default if isinstance(field.default, str | int | float) else ", ".join(field.default)
            text = f"{text} (default: {shown})"
        if field.default is True:
            text = f"do not {text}"
        if given.get("action") == "append":
            text = f"{text}; repeatable"
        if (place := field.mark(Positional)) is not None:
            count = argparse.REMAINDER if place.rest else given.get("nargs")
            if field.default is not MISSING and not place.rest:
                count = "*" if count == "+" else "?"
            given |= {"metavar": place.metavar, "nargs": count}
            names = (field.name,)
        else:
            names = (field.option, "-o") if field.option == "--output" else (field.option,)
            given |= {"dest": field.option, "required": field.default is MISSING}
        # a value that is not given stays None, that of a flag, too: the record has the default
        parser.add_argument(*names, default=None, help=text.replace("%", "%%"), **given)


def _argument(field: _Field) -> dict[str, Any]:
    """Return what argparse has to know of the values of a field."""
    kind, origin = field.kind, get_origin(field.kind)
    if kind is bool:
        return {"action": "store_false" if field.default is True else "store_true"}
    word = field.option.lstrip("-").upper().replace("-", "_")
    if any(map(callable, field.marks)):
        return {"metavar": _METAVARS.get(field.option, word)}
    if origin is Literal:
        return {"choices": get_args(kind)}
    usual = {int: "N", float: "X", Path: "PATH", Mapping: "NAME=VALUE"}.get(origin or kind, word)
    given: dict[str, Any] = {"metavar": _METAVARS.get(field.option, usual)}
    if origin is tuple and ... not in get_args(kind):
        given["nargs"] = len(get_args(kind))
    elif origin is not None:
        given |= {"nargs": "+"} if field.mark(Positional) else {"action": "append"}
    elif kind in (int, float, Path):
        given["type"] = kind
    return given


def build(record: type[T], parsed: argparse.Namespace, only: Only | None = None) -> T:
    """Make a record of what a command was given; fields that were not given have their defaults."""
    found, values = vars(parsed), dict[str, Any]()
    for field in _fields(record, only):
        given = found.get(field.name if field.mark(Positional) else field.option)
        if _is_record(field.kind):
            inner = field.mark(Only)
            if field.default is MISSING or any(found[below.option] is not None for below in _fields(field.kind, inner)):
                values[field.name] = build(field.kind, parsed, inner)
        elif given is not None:
            convert = next(filter(callable, field.marks), None)
            if convert is None and get_origin(field.kind) is Mapping:
                convert = partial(parse_assignments, option=field.option)
            values[field.name] = given if convert is None else convert(given)
    return record(**values)


def keywords(record: object) -> dict[str, Any]:
    """Return the fields of a command's record as arguments; those of ``env`` stand among them."""
    found = {entry.name: getattr(record, entry.name) for entry in fields(cast("Any", record))}
    return found | cast("dict[str, Any]", found.pop("env", {}))


def make_record(record: type[T], settings: Mapping[str, object], kind: str, option: str, without: str = "") -> T:
    """Make a record of settings by name; an unknown one is refused with the nearest, as is a wrong type of value."""
    known = {entry.name for entry in fields(cast("Any", record))} - {without}
    for name in settings:
        if name not in known:
            raise UnknownNameError(kind, name, known)
    try:
        return record(**settings)
    except TypeError as error:
        raise ConfigError(f"{option}: {error}") from error


def show_bundle(bundle: Bundle, paths: Sequence[Path]) -> None:
    """Print the summary box of a bundle, and the files it was written to."""
    from headrace.bench.figures import summary_table

    Console().print(summary_table(bundle))
    for path in paths:
        say(f"wrote {path}")
