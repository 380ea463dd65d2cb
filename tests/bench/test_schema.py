"""Bundles, as others read them: the published JSON Schema, golden files, older and newer versions."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from examples import EXAMPLES, play_bundle, runtime_bundle

from headrace.bench import _bundle_files as json_schema
from headrace.bench import read_bundle
from headrace.bench._bundle_files import (
    VERSIONS,
    bundle_paths,
    digest,
    json_schemas,
    parse_bundle,
    read_bundles,
    write_schemas,
)
from headrace.bench.formatters._isaaclab import isaaclab_text
from headrace.bench.schema import BUNDLES, SCHEMA_VERSION, bundle_text
from headrace.errors import ConfigError, DataError

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


def test_fields_do_not_change_without_a_new_version() -> None:
    """If this fails: raise SCHEMA_VERSION, keep a golden file of the old one, teach _bundle_files.py to read it."""
    published = json.loads((PUBLISHED / VERSIONS).read_text())
    assert published[SCHEMA_VERSION] == digest(json_schemas())


def test_publishing_other_fields_under_the_same_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_schemas(tmp_path)
    changed = json_schemas()
    del changed["play.json"]["properties"]["per_env"]  # type: ignore[attr-defined]  # plain JSON
    monkeypatch.setattr(json_schema, "json_schemas", lambda: changed)
    with pytest.raises(ConfigError, match="raise SCHEMA_VERSION"):
        write_schemas(tmp_path)


def test_another_wording_needs_no_new_version() -> None:
    changed = json_schemas()
    changed["play.json"]["description"] = "said better"
    assert digest(changed) == digest(json_schemas())


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
def test_bundles_of_schema_3_0_are_read_and_lack_only_what_is_new(kind: str) -> None:
    old = json.loads((GOLDEN / f"{kind}-3.0.json").read_text())
    new = json.loads(bundle_text(read_bundle(GOLDEN / f"{kind}-3.0.json")))
    assert new.pop("schema_version") == SCHEMA_VERSION
    del old["schema_version"]
    added = {"git_dirty_files", "headrace_commit", "order_seed", "cpu_s", "instructions", "policy_id"}

    def same(before: object, after: object) -> bool:
        if not isinstance(before, dict) or not isinstance(after, dict):
            return before == after
        more = after.keys() - before.keys()
        return (
            more <= added
            and all(after[name] is None for name in more)
            and all(same(before[k], after[k]) for k in before)
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
    with pytest.raises(DataError, match=r"schema_version 3\.1, 3\.0, 2\.0 .* got '9\.7'; .*pip install -U"):
        parse_bundle(json.dumps(data))


@pytest.mark.parametrize("kind", BUNDLES)
def test_bundles_of_schema_1_are_read(kind: str) -> None:
    bundle = read_bundle(GOLDEN / f"{kind}-1.3.json")
    assert bundle.kind == kind
    assert bundle.schema_version == SCHEMA_VERSION
    assert bundle.versions.packages["isaaclab"] == "3.0.0"
    validator(kind).validate(json.loads(bundle_text(bundle)))


def test_what_schema_1_did_not_keep_is_null() -> None:
    bundle = read_bundle(GOLDEN / "training-1.3.json")
    assert bundle.kind == "training"
    assert bundle.runtime.total_fps == 1000.0
    seconds = bundle.runtime.iteration_time_s
    assert (seconds.mean, seconds.std, seconds.n, seconds.samples, seconds.interval) == (6.0, 0.1, None, None, None)
    assert bundle.success_rate is not None
    assert (bundle.success_rate.rate, bundle.success_rate.n) == (0.25, None)
    assert bundle.resources.gpu_util_pct is None
    timing = bundle.runtime.environment_step_timing
    assert timing is not None
    assert timing.measurement_mode == "synchronized"
    assert bundle.extra["note"] == "kept"


def test_rates_of_schema_2_become_effective_rates() -> None:
    """It kept means of rates: 10.67 frames/s looked like 12, since short steps weigh as much as long ones."""
    bundle = read_bundle(GOLDEN / "runtime-2.0.json")
    assert bundle.schema_version == SCHEMA_VERSION
    assert bundle.runtime.total_fps == pytest.approx(16 / 1.875)
    assert bundle.runtime.collection_fps == pytest.approx(16 / 1.5)
    assert bundle.runtime.environment_step_timing.environment_step_fps == pytest.approx(16 / 1.5)
    training = read_bundle(GOLDEN / "training-2.0.json")
    assert training.runtime.collection_time_s.samples == [1.0, 1.0, 1.0]
    assert training.runtime.collection_fps == 64.0
    assert {read_bundle(GOLDEN / f"{kind}-2.0.json").kind for kind in BUNDLES} == set(BUNDLES)


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
def test_the_isaaclab_form_is_its_schema_1_2_field_by_field(kind: str) -> None:
    """The golden files were typed from Isaac Lab's documented fields and the numbers of the examples."""
    expected = json.loads((GOLDEN / f"isaaclab-1.2-{kind}.json").read_text())
    found = json.loads(isaaclab_text(EXAMPLES[kind]()))
    for section in expected:
        assert close(found.get(section), expected[section]), (section, found.get(section), expected[section])
    assert list(found) == list(expected)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_what_is_written_for_isaac_lab_is_read_back(kind: str) -> None:
    bundle = read_bundle(GOLDEN / f"isaaclab-1.2-{kind}.json")
    assert bundle.kind == kind
    assert bundle.run.task == "cartpole"
    assert bundle.run.config.rendering_backend is None
    validator(kind).validate(json.loads(bundle_text(bundle)))


def test_a_startup_bundle_of_isaac_lab_may_have_no_environments_and_name_its_whitelist() -> None:
    data = json.loads((GOLDEN / "isaaclab-1.2-startup.json").read_text())
    data["config"]["whitelist"] = "configs/whitelist.yaml"
    bundle = parse_bundle(json.dumps(data))
    assert bundle.run.num_envs is None
    assert bundle.config.whitelist is None
    assert bundle.extra["config.whitelist"] == "configs/whitelist.yaml"


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3"])
def test_fields_of_isaac_lab_that_we_do_not_know_are_kept_aside(version: str) -> None:
    data = json.loads((GOLDEN / "isaaclab-1.2-runtime.json").read_text())
    data["schema_version"] = version
    data["run"]["config"]["sensor_dtype"] = "rgb"
    data["runtime"]["environment_step_timing"]["warmup_steps"] = 50
    data["runtime"]["scope_timings"] = {"a": 1.0}
    del data["run"]["config"]["presets"], data["run"]["max_iterations"]
    bundle = parse_bundle(json.dumps(data))
    assert bundle.extra["run.config.sensor_dtype"] == "rgb"
    assert bundle.extra["runtime.environment_step_timing.warmup_steps"] == 50
    assert bundle.extra["runtime.scope_timings"] == {"a": 1.0}
    assert bundle.runtime.total_fps == pytest.approx(16 / 1.875)


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
        ('{"schema_version": [2], "run": {}}', "schema_version 3.1, 3.0, 2.0"),
        ('{"schema_version": "3.0", "run": {}, "kind": ["play"]}', "one of runtime"),
        ('{"schema_version": "2.0", "run": {}, "kind": "play", "runtime": {"collection_fps": 1}}', "of schema 2.0"),
        ('{"schema_version": "2.0", "run": {}, "runtime": {"environment_step_timing": {}}}', "of schema 2.0"),
        ('{"schema_version": "1.2", "run": {}, "runtime": {"total_fps": 1' + "0" * 400 + "}}", "of schema 1.2"),
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
    with pytest.raises(DataError, match="No such file"):
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


def test_per_env_figures_are_counted_by_hand() -> None:
    bundle = play_bundle()
    assert bundle.per_env.episodes == [2, 0, 0, 1]
    assert bundle.per_env.reward_mean == [15.0, None, None, 3.0]
    assert bundle.per_env.length_mean == [15.0, None, None, 3.0]
    assert bundle.per_env.successes == [1, 0, 0, 0]
    assert (bundle.success_rate.successes, bundle.success_rate.n) == (1, 3)
    assert bundle.runtime.episodes.model_dump() == {
        "completed": 3, "terminated": 1, "truncated": 1, "diverged": 1, "unfinished": 2
    }  # fmt: skip
