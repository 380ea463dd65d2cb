"""Bundles, as others read them: the published JSON Schema, golden files, older and newer versions."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from examples import EXAMPLES, play_bundle, runtime_bundle

from headrace.bench import read_bundle
from headrace.bench._bundle_files import (
    bundle_paths,
    json_schemas,
    parse_bundle,
    read_bundles,
)
from headrace.bench.figures import isaaclab_text
from headrace.bench.schema import BUNDLES, SCHEMA_VERSION, bundle_text
from headrace.errors import DataError

PUBLISHED = Path(__file__).parents[2] / "docs" / "schema"
GOLDEN = Path(__file__).parent / "golden"


def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((PUBLISHED / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("kind", BUNDLES)
def test_the_published_schema_is_that_of_the_code(kind: str) -> None:
    """If this fails: python -m headrace.bench._bundle_files docs/schema"""
    assert json.loads((PUBLISHED / f"{kind}.json").read_text()) == json_schemas()[f"{kind}.json"]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_kind_of_bundle_is_valid_for_others(kind: str) -> None:
    validator(kind).validate(json.loads(bundle_text(EXAMPLES[kind]())))


@pytest.mark.parametrize("kind", EXAMPLES)
def test_golden_bundles_stay_valid_and_read_back_to_the_letter(kind: str) -> None:
    path = GOLDEN / f"{kind}-{SCHEMA_VERSION}.json"
    validator(kind).validate(json.loads(path.read_text()))
    bundle = read_bundle(path)
    assert bundle.kind == kind
    assert bundle_text(bundle) == path.read_text()


@pytest.mark.parametrize("kind", EXAMPLES)
def test_older_bundles_are_read_and_lack_only_what_is_new_and_what_is_not_read_any_more(
    kind: str,
) -> None:
    old = json.loads((GOLDEN / f"{kind}-3.0.json").read_text())
    new = json.loads(bundle_text(read_bundle(GOLDEN / f"{kind}-3.0.json")))
    assert new.pop("schema_version") == SCHEMA_VERSION
    del old["schema_version"]
    gone = {"per_env", "tree", "chunk_horizon", "chunk_execute"}
    added = {"git_dirty_files", "headrace_commit", "order_seed", "cpu_s", "instructions", "policy_id"}

    def same(before: object, after: object) -> bool:
        if not isinstance(before, dict) or not isinstance(after, dict):
            return before == after
        more = after.keys() - before.keys()
        return (
            more <= added
            and all(after[name] is None for name in more)
            and before.keys() - after.keys() <= gone
            and all(same(before[k], after[k]) for k in before.keys() - gone)
        )

    assert same(old, new)


def test_the_published_schema_can_say_no() -> None:
    data = json.loads(bundle_text(runtime_bundle()))
    assert validator("runtime").is_valid(data)
    for path, value in (
        (("run", "status"), "fine"),
        (("run", "num_envs"), "many"),
        (("runtime", "total_wall_time_s"), None),
        (("surprise",), 1),
    ):
        broken = json.loads(json.dumps(data))
        where = broken
        for name in path[:-1]:
            where = where[name]
        where[path[-1]] = value
        assert not validator("runtime").is_valid(broken), path


def test_nan_and_infinity_are_refused() -> None:
    data = json.loads(bundle_text(runtime_bundle()))
    data["runtime"]["total_wall_time_s"] = float("nan")
    with pytest.raises(DataError, match="total_wall_time_s"):
        parse_bundle(json.dumps(data))


# --- versions ---


def test_a_newer_schema_is_refused_with_a_word_on_what_to_do() -> None:
    data = json.loads(bundle_text(runtime_bundle()))
    data["schema_version"] = "9.7"
    with pytest.raises(DataError, match=r"schema_version 3\.2 or 3\.0, got '9\.7'; .*pip install -U"):
        parse_bundle(json.dumps(data))


# --- Isaac Lab ---


def close(found: object, expected: object) -> bool:
    """Equal, fields in the same order; numbers up to rounding."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and list(found) == list(expected)
            and all(close(found[name], expected[name]) for name in expected)
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, float):
        return isinstance(found, (int, float)) and found == pytest.approx(expected, rel=1e-12)
    return found == expected and type(found) is type(expected)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_isaaclab_form_is_its_schema_1_3_field_by_field(kind: str) -> None:
    """The golden files were typed from Isaac Lab's documented fields and the numbers of the examples."""
    expected = json.loads((GOLDEN / f"isaaclab-1.3-{kind}.json").read_text())
    found = json.loads(isaaclab_text(EXAMPLES[kind]()))
    for section in expected:
        assert close(found.get(section), expected[section]), (section, found.get(section), expected[section])
    assert list(found) == list(expected)


# --- files that are no bundles ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (r'{"schema_version": "3.0", "run": {"task": "\ud800"}}', "not JSON"),
        ("[1, 2]", "with schema_version and run"),
        ("{}", "with schema_version and run"),
        ('{"schema_version": "3.0", "run": {}, "kind": "dance"}', "one of runtime"),
        ('{"schema_version": "3.0", "run": {}, "kind": "play"}', "not a valid play bundle"),
        ('{"schema_version": [2], "run": {}}', "schema_version 3.2 or 3.0"),
        ('{"schema_version": "3.0", "run": {}, "kind": ["play"]}', "one of runtime"),
    ],
)
def test_a_file_that_is_no_bundle_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "thing.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_bundle(path)
    assert "thing.json" in str(caught.value)


def test_a_picture_and_a_missing_file_are_no_bundles(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(DataError, match="not text"):
        read_bundle(tmp_path / "picture.png")
    with pytest.raises(DataError, match="no such file"):
        read_bundle(tmp_path / "nothing.json")


def test_a_folder_means_the_bundles_anywhere_in_it(tmp_path: Path) -> None:
    for name in ("b/runtime.json", "a/0/play.json", "a/0/play_osmo.json", "notes.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert bundle_paths(tmp_path) == [tmp_path / "a/0/play.json", tmp_path / "b/runtime.json"]
    with pytest.raises(DataError, match="found none"):
        bundle_paths(_empty(tmp_path))
    with pytest.raises(DataError, match="nothing there"):
        bundle_paths(tmp_path / "nowhere")


def test_a_broken_file_in_a_directory_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "runtime.json").write_text(bundle_text(runtime_bundle()))
    (tmp_path / "runtime.json").write_text('{"schema_version": "3.0", "run": ')
    found, notes = read_bundles([tmp_path])
    assert len(found) == 1
    (note,) = notes
    assert "runtime.json" in note
    with pytest.raises(DataError, match="not JSON"):
        read_bundles([tmp_path / "runtime.json"])
    (tmp_path / "good" / "runtime.json").unlink()
    with pytest.raises(DataError, match="at least one valid bundle"):
        read_bundles([tmp_path])


def _empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_episodes_are_counted_by_hand() -> None:
    bundle = play_bundle()
    assert (bundle.success_rate.successes, bundle.success_rate.n) == (1, 3)
    assert bundle.runtime.episodes.model_dump() == {
        "completed": 3, "terminated": 1, "truncated": 1, "diverged": 1, "unfinished": 2
    }  # fmt: skip
