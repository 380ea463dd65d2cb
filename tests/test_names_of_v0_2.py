"""Names that people have in scripts are those of headrace 0.2, or the changelog says where they went."""

from __future__ import annotations

import importlib
import json
import pydoc
import re
import tomllib
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import headrace
from headrace.__main__ import main
from v0_2_values import options_of

ROOT = Path(__file__).resolve().parents[1]
NAMES: dict[str, Any] = json.loads((ROOT / "tests/data/v0_2/names.json").read_text())
RENAMED = {
    "headrace.testing.check_resume_continues_exactly": "check_episodes_do_not_depend_on_the_batch",
    "headrace.RunOptions": "RunCfg",
    "headrace.rollout.load_chunk_policy": "load_policy",
    "headrace.serving.WireMapping": "ObservationMap",
}
GONE = {
    *("headrace.adapters.CurveTags", "headrace.adapters.read_curves", "headrace.bench.register_formatter"),
    *("headrace.envs.CompiledRows", "headrace.envs.TaskArrays", "headrace.vision.FrameStackVector"),
    "headrace.bench.Saving",
    "headrace.buffers.DelayBuffer",
    "headrace.testing.check_row_simulator",
    "headrace.recording.StepFeed",
    "headrace.recording.TiledVideo",
    "headrace.recording.contact_sheet",
    *("headrace.learning.td0", "headrace.learning.monte_carlo", "headrace.replay.delta_error_bound"),
    "headrace.learning.MinGRU",
    *("headrace.chunking.Periodic", "headrace.chunking.Threshold"),
    *("headrace.chunking.register_admission", "headrace.chunking.register_engine"),
}
"""Names without a successor: the changelog says so."""
SOURCES = {file: file.read_text() for file in Path(headrace.__file__).parent.rglob("*.py")}


def _moves() -> str:
    """What the changelog says of the versions after 0.2."""
    return (ROOT / "CHANGELOG.md").read_text().partition("\n## 0.2.0")[0]


@pytest.mark.parametrize("command", NAMES["options"])
def test_a_command_has_its_options(command: str) -> None:
    found = options_of(main, command)
    if command == "completion":  # gone: the changelog says so
        assert f"`headrace {command}`" in _moves()
        assert not found
        return
    assert "--help" in found
    gone = [option for option in NAMES["options"][command] if option not in found]
    unsaid = [option for option in gone if not re.search(rf"`[^`]*{option}(?![\w-])[^`]*`", _moves())]
    assert not unsaid


def test_gymnasium_ids_are_registered() -> None:
    assert set(NAMES["ids"]) <= gymnasium.registry.keys()


@pytest.mark.parametrize("name", [*NAMES["variables"], '"headrace.tasks"', '"headrace.libraries"'])
def test_environment_variables_and_entry_points_are_read(name: str) -> None:
    assert any(name in text for text in SOURCES.values())


def test_the_command_is_installed_by_its_name() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["headrace"].partition(":")
    assert getattr(importlib.import_module(module), function) is main


@pytest.mark.parametrize("name", NAMES["python"])
def test_a_public_name_is_where_it_was_or_an_error_names_its_new_place(name: str) -> None:
    if name in GONE:
        assert f"`{name.rpartition('.')[2]}`" in _moves()
        return
    value: object = headrace
    parts = name.split(".")[1:]
    while parts and hasattr(value, parts[0]):
        value = getattr(value, parts.pop(0))
    if not parts:
        return
    part, *below = parts  # below: what was read of a package that has moved
    with pytest.raises(AttributeError, match="; it is headrace") as error:
        getattr(value, part)
    places = re.findall(r"headrace(?:\.\w+)+", str(error.value).partition("; it is ")[2])
    assert all(pydoc.locate(place) is not None for place in places)
    leaf = RENAMED.get(name, name.rpartition(".")[2])
    assert any(place.endswith(f".{leaf}") or pydoc.locate(".".join([place, *below])) is not None for place in places)
