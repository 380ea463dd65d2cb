"""One setting of a task by its path, from Python and as ``--set path=value``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.envs.recipe import parse_assignments, with_overrides
from headrace.envs.registry import make, task_cfg
from headrace.envs.tasks.cartpole import cartpole_terms
from headrace.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Leaf:
    weight: float = 1.0
    count: int = 3
    name: str = "leaf"
    on: bool = False
    limit: float | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    names: tuple[str, ...] = ()
    where: str | Path = "here"
    either: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError("count: expected at least 0")


@dataclass(frozen=True, kw_only=True)
class Tree:
    leaf: Leaf = field(default_factory=Leaf)
    leaves: dict[str, Leaf] = field(default_factory=lambda: {"first": Leaf(), "second": Leaf(weight=2.0)})
    shelves: dict[str, dict[str, Leaf]] = field(default_factory=lambda: {"top": {"left": Leaf()}})


def test_a_list_of_json_or_yaml_stands_for_a_tuple() -> None:
    leaf = with_overrides(Leaf(), {"pair": [3, 4.0], "names": ["a", "b"], "either": [1, 2]})
    assert (leaf.pair, leaf.names, leaf.either) == ((3.0, 4.0), ("a", "b"), (1, 2))
    with pytest.raises(ConfigError, match="expected int like 3, got list"):
        with_overrides(Leaf(), {"count": [3]})


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("leaf.weight", 2.5, lambda tree: tree.leaf.weight),
        ("leaf.count", 7, lambda tree: tree.leaf.count),
        ("leaf.name", "oak", lambda tree: tree.leaf.name),
        ("leaf.on", True, lambda tree: tree.leaf.on),
        ("leaf.limit", 0.5, lambda tree: tree.leaf.limit),
        ("leaf.pair", (3.0, 4.0), lambda tree: tree.leaf.pair),
        ("leaf.names", ("a", "b"), lambda tree: tree.leaf.names),
        ("leaf.where", Path("there"), lambda tree: tree.leaf.where),
        ("leaves.second.weight", 9.0, lambda tree: tree.leaves["second"].weight),
        ("shelves.top.left.count", 5, lambda tree: tree.shelves["top"]["left"].count),
        ("leaves.first", Leaf(name="new"), lambda tree: tree.leaves["first"]),
    ],
)
def test_a_path_changes_one_setting_of_a_copy(path, value, read) -> None:
    tree = Tree()
    changed = with_overrides(tree, {path: value})
    assert read(changed) == value
    assert tree == Tree()
    assert with_overrides(changed, {path: read(tree)}) == tree


def test_several_paths_are_applied_together() -> None:
    tree = with_overrides(Tree(), {"leaf.weight": 3.0, "leaves.first.weight": 4.0, "leaves.first.count": 1})
    assert (tree.leaf.weight, tree.leaves["first"].weight, tree.leaves["first"].count) == (3.0, 4.0, 1)
    assert tree.leaves["second"] == Leaf(weight=2.0)


def test_an_integer_may_stand_in_for_a_float_and_becomes_one() -> None:
    tree = with_overrides(Tree(), {"leaf.weight": 2, "leaf.limit": 3, "leaf.pair": (1, 2)})
    assert [type(value) for value in (tree.leaf.weight, tree.leaf.limit, *tree.leaf.pair)] == [float] * 4


def test_none_is_taken_only_where_the_annotation_allows_it() -> None:
    limited = with_overrides(Tree(), {"leaf.limit": 1.0})
    assert with_overrides(limited, {"leaf.limit": None}).leaf.limit is None
    with pytest.raises(ConfigError, match=r"leaf\.count: expected int like 3, got NoneType"):
        with_overrides(Tree(), {"leaf.count": None})


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("leaf.weight", "heavy", "float like 1.0, got str 'heavy'"),
        ("leaf.weight", True, "float like 1.0, got bool True"),
        ("leaf.count", 2.5, "int like 3, got float 2.5"),
        ("leaf.count", True, "int like 3, got bool True"),
        ("leaf.on", 1, "bool like False, got int 1"),
        ("leaf.name", 3, "str like 'leaf', got int 3"),
        ("leaf.limit", "x", "NoneType like None, got str 'x'"),
        ("leaf.pair", 3, "tuple like \\(0.0, 1.0\\), got int 3"),
        ("leaf.pair", [1.0, "x"], "float like 1.0, got str 'x'"),
        ("leaf.pair", (1.0, "x"), "float like 1.0, got str 'x'"),
        ("leaf", 3, "Leaf like Leaf.*got int 3"),
        ("leaves.first", 3, "Leaf like Leaf.*got int 3"),
    ],
)
def test_a_value_of_another_type_is_refused(path, value, expected) -> None:
    with pytest.raises(ConfigError, match=f"{path}: expected {expected}"):
        with_overrides(Tree(), {path: value})


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("leaf.wieght", "did you mean 'weight'"),
        ("leef.weight", "did you mean 'leaf'"),
        ("leaves.frist.weight", "did you mean 'first'"),
        ("shelves.tob.left.weight", "did you mean 'top'"),
        ("leaf.zzz", "choose from count, either, limit"),
    ],
)
def test_an_unknown_path_suggests_the_nearest(path, suggestion) -> None:
    with pytest.raises(UnknownNameError, match=suggestion):
        with_overrides(Tree(), {path: 1.0})


def test_a_path_that_goes_on_below_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no settings below it"):
        with_overrides(Tree(), {"leaf.weight.unit": 1.0})


def test_the_checks_of_the_settings_run_again() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        with_overrides(Tree(), {"leaf.count": -1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=3", 3),
        ("a=-0.5", -0.5),
        ("a=1e-3", 1e-3),
        ("a=True", True),
        ("a=None", None),
        ("a=(1, 2.5)", (1, 2.5)),
        ("a='quoted'", "quoted"),
        ("a=plain text", "plain text"),
        ("a=x=y", "x=y"),
        ("a=", ""),
        ("a=models/ant.xml", "models/ant.xml"),
    ],
)
def test_command_line_values_are_python_literals_or_text(text, value) -> None:
    parsed = parse_assignments([text])
    assert parsed == {"a": value}
    assert type(parsed["a"]) is type(value)


@given(st.floats(allow_nan=False) | st.integers() | st.booleans() | st.tuples(st.floats(allow_nan=False)))
def test_what_python_prints_is_read_back(value) -> None:
    assert parse_assignments([f"some.path={value!r}"]) == {"some.path": _finite(value)}


def _finite(value):
    """``inf`` is no Python literal: it is read as text."""
    return repr(value) if "inf" in repr(value) and not isinstance(value, tuple) else _tuple(value)


def _tuple(value):
    return repr(value) if isinstance(value, tuple) and "inf" in repr(value) else value


@pytest.mark.parametrize("text", ["episode_length", "=3", ""])
def test_an_assignment_without_path_or_equals_sign_is_refused(text) -> None:
    with pytest.raises(ConfigError, match="path=value"):
        parse_assignments([text])


def test_a_later_assignment_wins() -> None:
    assert parse_assignments(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}


def test_assignments_reach_a_class_task_and_a_table_task() -> None:
    env = make("ant", overrides=parse_assignments(["ctrl_cost_weight=0.25", "episode_length=7"]))
    assert (env.task.cfg.ctrl_cost_weight, env.task.cfg.episode_length) == (0.25, 7)
    cfg = task_cfg(
        "cartpole-terms",
        parse_assignments(
            ["rewards.alive.weight=2", "events.start.function.positions=(0.1, 0.2)", "terminations.fallen.high=0.4"]
        ),
    )
    assert cfg.rewards["alive"].weight == 2.0
    assert cfg.events["start"].function.positions == (0.1, 0.2)
    assert cfg.terminations["fallen"].high == 0.4
    assert cartpole_terms().rewards["alive"].weight == 1.0


def test_a_misspelt_setting_of_a_task_is_refused_by_make() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'ctrl_cost_weight'"):
        make("ant", overrides={"control_cost_weight": 0.1})
    with pytest.raises(UnknownNameError, match="did you mean 'alive'"):
        make("cartpole-terms", overrides={"rewards.alife.weight": 0.1})


def test_a_setting_of_a_few_words_takes_only_those() -> None:
    with pytest.raises(UnknownNameError, match="unknown value of 'color': 'grey'; did you mean 'gray'"):
        make("cartpole-camera", 2, overrides={"color": "grey"})
