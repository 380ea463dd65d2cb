"""Profiles: names without folders, the most costly first."""

from __future__ import annotations

import cProfile
import sysconfig
import time

import pytest

from headrace.bench._profiling import top_functions
from headrace.bench._startup_worker import _entries


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
    entry = {"file": file, "line": 1, "function": function, "calls": 1, "own": 1.0, "cum": 1.0}
    assert top_functions([entry], 1)[0].name == name  # type: ignore[list-item]  # an entry of cProfile, which is untyped
