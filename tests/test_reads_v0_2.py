"""Files that headrace 0.2 wrote are read, resumed, merged and played as 0.2 did.

``data/v0_2/make.py`` wrote them, and ``expected.json`` with what 0.2 made of them. What no network computes must be
equal to the last bit. Where a network acts, another processor may round otherwise: rows are compared within a
tolerance here, and bit for bit with a checkout of 0.2 on this machine in ``test_equals_v0_2.py``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.__main__ import main
from headrace.bench import CompareCfg, read_bundle
from headrace.bench.figures import metrics
from headrace.recording import EpisodeDataset
from headrace.replay import ReplayBuffer
from v0_2_values import dataset_values, digest, store_values, weights_of

DATA = Path(__file__).parent / "data/v0_2"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
EXACT = ("class", "function")
"""Journals of policies without a network."""
LIBRARIES = tuple(EXPECTED["runs"])
MODULES = {"headrace": "torch", "sb3": "stable_baselines3"}
SMALL = ("--num-envs", "2", "--threads", "1")
SHORT = ("--set", "episode_length=60", "--set", "max_angle=0.2")
TRAINING = (
    *("--num-envs", "4", "--threads", "1", "--seed", "2", "--set", "max_angle=0.3", "--ppo", "hidden=[8]"),
    *("--ppo", "steps=16", "--ppo", "minibatches=2", "--ppo", "epochs=2"),
)

pytestmark = pytest.mark.filterwarnings("ignore:.*played under other circumstances")  # of versions and processors


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a copy of the files, with the policies of ``planner.py`` at hand."""
    shutil.copytree(DATA, tmp_path / "v0_2", ignore=shutil.ignore_patterns("*.py"))
    monkeypatch.chdir(tmp_path / "v0_2")
    monkeypatch.syspath_prepend(DATA)


def _options(settings: dict[str, Any]) -> list[str]:
    """Settings of an evaluation as they stand on the command line."""
    words = [word for name, value in settings.get("overrides", {}).items() for word in ("--set", f"{name}={value}")]
    for name in settings.keys() - {"overrides"}:
        words += [f"--{name}", str(settings[name])]
    return words


def _evaluate(task: str, policy: str | None, *more: str) -> dict[str, Any]:
    """Evaluate from the command line; returns the saved evaluation."""
    words = ["evaluate", task, *([] if policy is None else ["--policy", policy]), *SMALL, *more]
    assert main([*words, "--output", "found.json"]) == 0
    return json.loads(Path("found.json").read_text())


def _assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Rows that a network played: rewards within 1 %, lengths within two steps, all else equal."""
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        near = {
            "reward": pytest.approx(other["reward"], rel=0.01, abs=0.01),
            "length": pytest.approx(other["length"], abs=2),
        }
        assert row == other | near


def _rows(journal: Path) -> list[dict[str, Any]]:
    """The whole rows of a journal, by id."""
    lines = [line for line in journal.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
    return sorted(map(json.loads, lines), key=lambda row: row["episode_id"])


@pytest.mark.parametrize("name", EXPECTED["journals"])
def test_a_journal_is_resumed_to_the_table_of_the_whole_plan(name: str) -> None:
    plan, journal = EXPECTED["journals"][name], Path(f"journals/{name}.jsonl")
    before = _rows(journal)
    options = (*_options(plan["settings"]), "--episodes", "8", "--journal", str(journal), "--resume")
    found = _evaluate(plan["task"], plan.get("policy"), *options)
    played = {row["episode_id"] for row in before}
    assert before == [row for row in plan["rows"] if row["episode_id"] in played]
    assert before == [row for row in found["episodes"] if row["episode_id"] in played]
    fresh = [row for row in found["episodes"] if row["episode_id"] not in played]
    assert found["counters"]["env_steps"] == sum(row["length"] for row in fresh)
    if name in EXACT:
        assert found["episodes"] == plan["rows"]
    _assert_close(found["episodes"], plan["rows"])
    journal.rename("whole.jsonl")
    assert main(["merge", "whole.jsonl", "--output", "merged.json"]) == 0  # is whole: has no torn line, lacks nothing
    assert json.loads(Path("merged.json").read_text())["episodes"] == found["episodes"]


@pytest.mark.parametrize("name", EXPECTED["journals"])
def test_a_journal_is_merged_with_episodes_that_are_played_now(name: str) -> None:
    plan = EXPECTED["journals"][name]
    played = [row["episode_id"] for row in _rows(Path(f"journals/{name}.jsonl"))]
    assert played == list(range(len(played)))
    first = 1 if name in EXACT else len(played)  # rows that are in both must be equal to the last bit
    _evaluate(plan["task"], plan.get("policy"), *_options(plan["settings"]), "--episode-ids", f"{first}:8")
    for number, parts in enumerate(
        (["found.json", f"journals/{name}.jsonl"], [f"journals/{name}.jsonl", "found.json"])
    ):
        assert main(["merge", *parts, "--output", f"merged-{number}.json"]) == 0
        merged = json.loads(Path(f"merged-{number}.json").read_text())["episodes"]
        _assert_close(merged, plan["rows"])


def test_a_journal_of_another_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "cartpole", "--policy", "planner:Lean", *SMALL, "--episodes", "8", "--execute", "1"]
    more = _options(EXPECTED["journals"]["function"]["settings"] | {"horizon": 4})
    assert main([*words, *more, "--journal", "journals/function.jsonl", "--resume"]) != 0
    assert "expected an evaluation of" in capsys.readouterr().err


def test_the_journals_of_a_suite_are_resumed() -> None:
    words = ["evaluate", "suite.toml", "--policy", "planner:Lean", *SMALL, "--execute", "4"]
    assert main([*words, "--journal", "suite", "--resume", "--output", "found"]) == 0
    for name, rows in EXPECTED["suite"].items():
        found = json.loads(Path(f"found/{name}/evaluation.json").read_text())
        assert found["episodes"] == rows
        assert bool(found["counters"]["env_steps"]) is (name != "short-0")


@pytest.mark.parametrize("name", EXPECTED["evaluations"])
def test_a_saved_evaluation_is_loaded_and_saved_with_equal_content(name: str) -> None:
    saved = json.loads(Path(f"evaluations/{name}.json").read_text())
    assert saved["episodes"] == EXPECTED["evaluations"][name]
    found = headrace.evaluation.merge(f"evaluations/{name}.json")
    assert saved["counters"].pop("held_steps") == 0  # no rule holds environments any more
    assert found.to_json() == saved


def test_parts_of_a_plan_are_merged() -> None:
    assert main(["merge", "evaluations/first.json", "evaluations/second.json", "--output", "merged.json"]) == 0
    merged, whole = (json.loads(Path(file).read_text()) for file in ("merged.json", "evaluations/whole.json"))
    for key in ("episodes", "plan", "status", "summary", "identity"):
        assert merged[key] == whole[key]


@pytest.mark.parametrize("name", EXPECTED["datasets"])
def test_a_dataset_is_read_verified_and_replayed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = EpisodeDataset(f"datasets/{name}")
    assert dataset_values(dataset) == EXPECTED["datasets"][name]
    assert dataset.info.instruction == "keep the pole up"
    assert main(["record", "verify", f"datasets/{name}"]) == 0
    assert main(["record", "replay", f"datasets/{name}"]) == 0
    file = next(Path(f"datasets/{name}/episodes").iterdir())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["record", "verify", f"datasets/{name}"]) == 1
    capsys.readouterr()


def test_a_stopped_imitation_is_resumed_and_its_policy_played() -> None:
    said = EXPECTED["imitation"]
    _assert_close(_evaluate("cartpole", "imitation/policy.pt", *SHORT, "--episodes", "3")["episodes"], said["rows"])
    settings = dict(said["settings"])
    settings["settings"] = {**settings["settings"], "updates": settings.pop("updates")}
    whole = headrace.imitation.imitate(output="imitation/policy.pt", resume=True, **settings)
    updates, _, held_out = said["losses"][-1]
    assert whole.losses[-1].updates == updates
    assert whole.losses[-1].held_out == pytest.approx(held_out, rel=5e-5)


@pytest.mark.parametrize("file", [name for name in EXPECTED["bundles"]["metrics"] if "_isaaclab" not in name])
def test_a_bundle_has_the_numbers_that_it_had(file: str) -> None:
    bundle = read_bundle(file)
    assert {metric.path: metric.value for metric in metrics(bundle)} == EXPECTED["bundles"]["metrics"][file]
    now, then = json.loads(bundle.model_dump_json()), _without_old_fields(json.loads(Path(file).read_text()))
    assert _without_new_nulls(now, then) == then | {"schema_version": now["schema_version"]}


def _without_old_fields(then: Any) -> Any:
    """What is read of a bundle of 0.2."""
    gone = {"per_env", "tree", "chunk_horizon", "chunk_execute"}
    return {k: _without_old_fields(v) for k, v in then.items() if k not in gone} if isinstance(then, dict) else then


def _without_new_nulls(now: object, then: object) -> object:
    """What a bundle of today has beyond one of 0.2 is null."""
    if not isinstance(now, dict) or not isinstance(then, dict):
        return now
    return {k: _without_new_nulls(v, then.get(k)) for k, v in now.items() if k in then or v is not None}


def test_bundles_and_evaluations_are_compared_with_the_same_verdicts() -> None:
    compared = {
        "bundles": headrace.compare("bundles/a", "bundles/b", rule=CompareCfg(allow=("settings", "library"))),
        "evaluations": headrace.compare(
            "evaluations/whole.json", "evaluations/rest.json", rule=CompareCfg(allow=("settings",))
        ),
    }
    verdicts = {
        f"{name} {found.kind}": {row.path: [row.verdict, row.effect] for row in found.rows}
        for name, result in compared.items()
        for found in result.comparisons
    }
    assert verdicts == EXPECTED["bundles"]["verdicts"]
    words = ["compare", "bundles/a", "bundles/b", "--allow", "settings", "--allow", "library"]
    assert main(words) == int(compared["bundles"].regressed)
    assert main(["report", "bundles", "evaluations/whole.json", "trainings", "--output", "page.html"]) == 0
    page = Path("page.html").read_text()
    for file in [*Path("bundles").rglob("*.json"), *Path("trainings").rglob("training.json")]:
        assert json.loads(file.read_text())["run"]["run_id"] in page


def _require(library: str) -> None:
    pytest.importorskip(MODULES.get(library, library))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_training_is_played(library: str) -> None:
    _require(library)
    expected = EXPECTED["runs"][library]["rows"]
    folder = f"trainings/{library}"
    _assert_close(_evaluate("cartpole", folder, "--episodes", "4")["episodes"], expected)
    words = ["play", "cartpole", "--policy", folder, "--episodes", "4", "--warmup-steps", "0", *SMALL]
    assert main([*words, "--output", "played"]) == 0
    played = json.loads(Path("played/play.json").read_text())
    assert played["library"]["name"] == library
    assert played["run"]["config"]["overrides"] == {"max_angle": 0.3}
    assert played["per_episode"]["rewards"] == pytest.approx([row["reward"] for row in expected], rel=0.01)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_training_is_resumed(library: str) -> None:
    _require(library)
    words = ["train", "cartpole", "--library", library, "--iterations", "1", *TRAINING]
    assert main([*words, "--resume-from", f"trainings/{library}", "--output", "more"]) == 0
    found = json.loads(Path("more/training.json").read_text())
    resumed = found["run"]["resumed_from"]
    assert (resumed["iteration"], resumed["changed"]) == (3, {})
    assert resumed["run_id"] == json.loads(Path(f"trainings/{library}/training.json").read_text())["run"]["run_id"]
    assert found["checkpoint"]["iteration"] == 4
    learning, expected = found["learning"], EXPECTED["runs"][library]["learning"]
    assert learning["episodes"] == expected["episodes"]
    for curve in ("reward", "ep_length"):
        assert learning[curve]["final_raw"] == pytest.approx(expected[curve]["final_raw"], rel=0.01)
    weights, after = weights_of(Path("more")), EXPECTED["runs"][library]["weights"]
    assert weights.keys() == after.keys()
    for name, sums in weights.items():
        assert sums == pytest.approx(after[name], rel=0.01, abs=1e-3), name


def test_stable_baselines_reads_a_checkpoint_itself() -> None:
    ppo = pytest.importorskip("stable_baselines3").PPO
    model = ppo.load("trainings/sb3/checkpoints/last.zip", device="cpu")
    action, _ = model.predict(torch.zeros(1, 4).numpy(), deterministic=True)
    assert action.shape == (1, 1)


def test_a_store_on_disk_is_opened_sampled_and_extended() -> None:
    store = ReplayBuffer.open("stores/live")
    assert store_values(store) == EXPECTED["stores"]["live"]
    env = headrace.make("cartpole", 2, seed=6, threads=1)
    obs, _ = env.reset()
    action = torch.zeros(2, 1)
    before = store.written
    store.extend(obs, action, env.step(action), torch.ones(2, dtype=torch.bool), {"log_prob": torch.zeros(2)})
    store.close()
    assert torch.equal(ReplayBuffer.open("stores/live").written, before + 1)


def test_a_saved_store_is_loaded_with_its_samplers() -> None:
    store = ReplayBuffer.load("stores/saved", verify=True)
    assert store_values(store) == EXPECTED["stores"]["saved"]


def test_the_state_of_environments_is_loaded_and_goes_on() -> None:
    env = headrace.make("cartpole-camera", 3, seed=8, threads=1, overrides={"pixels": 8, "episode_length": 12})
    env.load_state_dict(torch.load("state.pt", weights_only=True))
    assert env.active.tolist() == [True, False, True]
    steps = [env.step(torch.full((3, 1), 0.2)) for _ in range(2)]
    assert {name: digest(values) for name, values in steps[-1].obs.items()} == EXPECTED["state"]


def test_a_recipe_file_is_read() -> None:
    expected = headrace.EnvRecipe("pusher-words", num_envs=2, seed=4, overrides={"goal_range": 0.1}, threads=1)
    assert headrace.EnvRecipe.load("recipe.json") == expected
