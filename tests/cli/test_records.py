"""Options made from settings records, and records made from what was given."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest

from headrace.cli.records import Only, Positional, add_options, build, field_docs, keywords, make_record
from headrace.errors import ConfigError


class Place(TypedDict, total=False):
    seed: int | None
    """Seed of the place (default: 0)."""


@dataclass(frozen=True, kw_only=True)
class Inner:
    path: str | Path | None = None
    """File to write, with ``markup``."""
    deep: float = 0.5
    """How deep."""
    hidden: NotImported | None = None  # noqa: F821  # a type that only type checkers import
    """Left out."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    window: int = 20
    """Steps that count."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a command was given."""

    task: Annotated[str, Positional("TASK")]
    env: Place
    inner: Annotated[Inner, Only("path", "deep")]
    rule: Rule | None = None
    kind: Literal["a", "b"] = "a"
    """Which of two."""
    keep: bool = True
    """Keep it."""
    quick: bool = False
    """PPO in a hurry: 100 % of it."""
    pair: tuple[str, str] | None = None
    """Two words."""
    labels: Sequence[str] = ()
    """Some words."""
    settings: Mapping[str, object] | None = None
    """Settings by name."""
    span: Annotated[range | None, lambda text: range(int(text))] = None
    """How far."""
    sizes: Annotated[Mapping[str, int] | None, lambda texts: {text: len(text) for text in [texts]}] = None
    """Lengths of words."""


def parse(*words: str) -> Given:
    return build(Given, parser().parse_args(words))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_options(made, Given)
    return made


def test_what_is_not_given_has_the_default_of_the_record() -> None:
    assert parse("ant") == Given(task="ant", env={}, inner=Inner())


def test_every_kind_of_field_is_read() -> None:
    words = (
        "ant --seed 3 --path out --deep 2 --window 7 --kind b --no-keep --quick --pair x y --labels l --labels m "
        "--settings a=1 --settings b=(2,) --span 4 --sizes four"
    )
    assert parse(*words.split()) == Given(
        task="ant",
        env={"seed": 3},
        inner=Inner(path="out", deep=2.0),
        rule=Rule(window=7),
        kind="b",
        keep=False,
        quick=True,
        pair=["x", "y"],  # pyright: ignore[reportArgumentType]  # as argparse gives it
        labels=["l", "m"],
        settings={"a": 1, "b": (2,)},
        span=range(4),
        sizes={"four": 4},
    )


def test_a_record_that_may_be_none_is_made_of_its_options_even_where_they_equal_the_defaults() -> None:
    assert parse("ant").rule is None
    assert parse("ant", "--window", "20").rule == Rule()


def test_help_is_the_docstring_with_its_default_and_without_markup() -> None:
    shown = " ".join(parser().format_help().split())
    for line in (
        "--seed N seed of the place (default: 0)",
        "--path PATH file to write, with markup",
        "--deep X how deep (default: 0.5)",
        "--kind {a,b} which of two (default: a)",
        "--quick PPO in a hurry: 100 % of it",
        "--no-keep do not keep it",
        "--labels LABELS some words; repeatable",
        "--settings NAME=VALUE settings by name; repeatable",
    ):
        assert line in shown, shown
    assert "hidden" not in shown


def test_a_field_without_help_is_an_error_when_the_parser_is_made() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare:
        unexplained: int = 0

    with pytest.raises(KeyError, match="unexplained"):
        add_options(argparse.ArgumentParser(), Bare)
    assert field_docs(Rule) == {"window": "steps that count"}


def test_keywords_of_the_environment_stand_among_the_others() -> None:
    found: dict[str, Any] = keywords(parse("ant", "--seed", "3"))
    assert (found["task"], found["seed"], "env" in found) == ("ant", 3, False)


def test_settings_by_name_are_checked() -> None:
    assert make_record(Rule, {"window": 3}, "setting", "--rule") == Rule(window=3)
    with pytest.raises(ConfigError, match="unknown setting 'windov'; did you mean 'window'"):
        make_record(Rule, {"windov": 3}, "setting", "--rule")
    with pytest.raises(ConfigError, match="unknown setting 'window'"):
        make_record(Rule, {"window": 3}, "setting", "--rule", without="window")
