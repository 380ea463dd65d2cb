"""Profiles: names without folders, patterns that must match, trees whose times add up."""

from __future__ import annotations

import cProfile
import sysconfig
import time
from pathlib import Path

import pytest

from headrace.bench._profiling import call_tree, import_tree, read_whitelist, top_functions, whitelisted
from headrace.bench._startup_worker import _entries
from headrace.errors import ConfigError, DataError, UnknownNameError


def _spin(seconds: float) -> None:
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        pass


def _outer() -> None:
    _spin(0.02)
    _inner()


def _inner() -> None:
    _spin(0.06)


def profiled() -> list[dict[str, object]]:
    profile = cProfile.Profile()
    profile.runcall(_outer)
    return _entries(profile)


def test_the_functions_that_cost_most_come_first() -> None:
    spin, clock = sorted(top_functions(profiled(), 2), key=lambda found: found.calls)  # type: ignore[arg-type]  # entries of cProfile, which are untyped
    assert clock.name == "builtins:time.perf_counter"
    assert spin.name.endswith("test_profiling:_spin")
    assert spin.calls == 2
    assert spin.cum_time_s >= 0.08  # longer on a busy machine, never shorter
    assert len(top_functions(profiled(), 1)) == 1  # type: ignore[arg-type]  # entries of cProfile, which are untyped


def test_a_whitelist_keeps_what_matches_and_refuses_what_matches_nothing() -> None:
    entries = profiled()
    found = whitelisted(entries, ["*:_inner", "*:_outer"], "first_step")  # type: ignore[arg-type]  # entries of cProfile, which are untyped
    assert sorted(function.name.split(":")[1] for function in found) == ["_inner", "_outer"]
    with pytest.raises(ConfigError, match=r"'torch\.\*' of phase 'first_step' matches none"):
        whitelisted(entries, ["*:_inner", "torch.*"], "first_step")  # type: ignore[arg-type]  # entries of cProfile, which are untyped


def test_the_tree_shares_a_callee_out_among_its_callers() -> None:
    tree = call_tree("first_step", 0.08, profiled())  # type: ignore[arg-type]  # entries of cProfile, which are untyped
    outer = next(node for node in tree.children if node.name.endswith(":_outer"))
    children = {node.name.split(":")[1]: node for node in outer.children}
    assert children["_spin"].cum_time_s < children["_inner"].cum_time_s
    inner = children["_inner"].children[0]
    assert inner.name.endswith(":_spin")
    # a third of the time in _spin is the outer function's
    assert children["_spin"].cum_time_s + inner.cum_time_s == pytest.approx(0.08, rel=0.5)
    assert outer.cum_time_s >= children["_spin"].cum_time_s + children["_inner"].cum_time_s


def test_recursion_ends() -> None:
    def countdown(left: int) -> None:
        _spin(0.001)
        if left:
            countdown(left - 1)

    profile = cProfile.Profile()
    profile.runcall(countdown, 20)
    tree = call_tree("phase", 0.02, _entries(profile))  # type: ignore[arg-type]  # entries of cProfile, which are untyped
    assert len(tree.model_dump_json()) < 5000


def test_the_tree_of_imports_is_read_from_pythons_own_report() -> None:
    report = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:      3000 |       3000 |     inner\n"
        "import time:      4000 |       7000 |   middle\n"
        "import time:      5000 |      12000 | outer\n"
        "something else\n"
        "import time:     20000 |      20000 | other\n"
    )
    tree = import_tree(report)
    assert tree.cum_time_s == pytest.approx(0.032)
    assert [node.name for node in tree.children] == ["other", "outer"]
    (middle,) = tree.children[1].children
    assert (middle.name, middle.own_time_s, middle.children[0].name) == ("middle", 0.004, "inner")


@pytest.mark.parametrize(
    ("file", "function", "name"),
    [
        ("/a/lib/python3.11/site-packages/torch/nn/__init__.py", "f", "torch.nn:f"),
        (f"{sysconfig.get_path('stdlib')}/json/decoder.py", "decode", "json.decoder:decode"),
        ("/home/me/headrace/src/headrace/envs/registry.py", "make", "headrace.envs.registry:make"),
        ("<frozen importlib._bootstrap>", "_load", "importlib._bootstrap:_load"),
        ("~", "<built-in method posix.stat>", "builtins:posix.stat"),
        ("~", "<method 'read' of '_io.FileIO' objects>", "builtins:read of _io.FileIO"),
        ("~", "<built-in method __new__ of type object at 0x7f00aa>", "builtins:__new__ of type object"),
    ],
)
def test_names_have_no_folder_of_the_machine(file: str, function: str, name: str) -> None:
    entry = {"file": file, "line": 1, "function": function, "calls": 1, "own": 1.0, "cum": 1.0, "callers": []}
    assert top_functions([entry], 1)[0].name == name  # type: ignore[list-item]  # an entry of cProfile, which is untyped


def test_a_whitelist_file_is_checked_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "patterns.yaml"
    path.write_text("python_imports: ['torch*']\nfirst_step: '*:step'\n")
    assert read_whitelist(path) == {"python_imports": ["torch*"], "first_step": ["*:step"]}
    for text, error in (
        ("python_import: ['x']", UnknownNameError),
        ("python_imports: []", DataError),
        ("python_imports: [3]", DataError),
        ("just words", DataError),
        ("a: [", DataError),
    ):
        path.write_text(text)
        with pytest.raises(error):
            read_whitelist(path)
