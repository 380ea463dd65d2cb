"""``headrace evaluate`` as its user sees it."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.cli.main import build_parser, main
from headrace.errors import ConfigError, PolicyError
from headrace.policies.act import ActCfg, ActPolicy, save_policy
from headrace.policies.protocol import ChunkContext
from headrace.policies.step_policy import policy_hash
from headrace.recording import EpisodeDataset, FilmCfg
from headrace.types import Obs


class Shove(nn.Module):
    """Pushes the cart a little, at random."""

    horizon = 8

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        return context.noise(8, 1) * 0.2


class Lazy(nn.Module):
    """Its weights are made at its first call."""

    horizon = 4

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(4)

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        del context
        return self.net(obs["policy"]).reshape(-1, 4, 1)


def breaks(obs: Obs, context: ChunkContext) -> Tensor:
    if bool((context.chunk_index > 2).any()):
        raise ValueError("no idea")
    return torch.zeros(len(context.env_ids), 8, 1)


def _run(*words: str) -> int:
    parser = build_parser("evaluate")
    arguments = parser.parse_args(["evaluate", "cartpole", "--threads", "1", "--set", "episode_length=40", *words])
    return int(arguments.handler(arguments))


POLICY = f"{__name__}:Shove"


@pytest.mark.parametrize(
    "rule",
    [
        "greedy",
        "immediate",
        "whole-batch-on-any",
        "synchronized",
    ],
)
def test_every_rule_can_be_named(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--policy", POLICY, "--episodes", "4", "--num-envs", "2", "--admission", rule) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 episodes, completed" in shown
    assert "success rate" in shown


def test_strict_tables_on_disk_are_equal_whatever_the_batch_and_the_engine(tmp_path: Path) -> None:
    tables = []
    for num_envs, engine in (("1", "inline"), ("5", "thread")):
        file = tmp_path / f"{num_envs}.csv"
        words = ["--policy", POLICY, "--episodes", "9", "--num-envs", num_envs, "--engine", engine]
        assert _run(*words, "--execute", "6", "--latency", "2", "--csv", str(file)) == 0
        tables.append(file.read_text())
    assert tables[0] == tables[1]
    rows = list(csv.DictReader(tables[0].splitlines()))
    assert [row["episode_id"] for row in rows] == [str(i) for i in range(9)]
    assert list(rows[0]) == ["episode_id", "seed", "reward", "length", "success", "diverged", "instruction"]


def test_a_checkpoint_is_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_policy(ActPolicy(ActCfg(obs_dim=4, action_dim=1)), tmp_path / "policy.pt", task="cartpole")
    assert _run("--policy", str(tmp_path / "policy.pt"), "--episodes", "2", "--ensemble", "0.01") == 0
    assert "2 of 2 episodes" in capsys.readouterr().out


def test_a_task_with_a_shipped_policy_needs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "pusher-solid", "--episodes", "3", "--num-envs", "3"]) == 0
    assert "3 of 3 episodes, completed" in capsys.readouterr().out


def test_a_policy_is_found_in_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planner_of_this_folder.py").write_text(
        "import torch\ndef plan(obs): return torch.zeros(len(obs['policy']), 8, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert _run("--policy", "planner_of_this_folder:plan", "--horizon", "8", "--episodes", "2") == 0
    assert "2 of 2 episodes" in capsys.readouterr().out


def test_a_policy_that_raises_shows_what_was_finished(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", f"{__name__}:breaks", "--horizon", "8", "--set", "max_angle=0.2", "--num-envs", "3"]
    with pytest.raises(PolicyError, match="no idea; it was asked for environments"):
        _run(*words)
    assert "of 100 episodes, failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "nowhere.pt"], "expected a file, or a task that ships with one, got 'nowhere.pt': no such file"),
        (["--policy", "nowhere:nothing"], "cannot be imported"),
        (["--policy", POLICY, "--admission", "clock"], "unknown admission rule 'clock'"),
        (["--policy", POLICY, "--admission", "no_such_module:Rule"], "--admission: module 'no_such_module' cannot be"),
        (["--policy", POLICY, "--admission", "greedy:hold"], "'greedy:hold' is gone; use greedy"),
        (["--policy", POLICY, "--admission", "periodic:4"], "'periodic:4' is gone; use greedy"),
        (
            ["--policy", POLICY, "--csv", "no/such/folder/table.csv"],
            "--csv: expected a file in a directory that exists",
        ),
        (["--policy", POLICY, "--execute", "9"], "horizon: expected at least"),
        (["--policy", POLICY, "--horizon", "9"], "horizon: expected 9, got a policy with horizon 8"),
    ],
)
def test_requests_that_cannot_be_met_say_why(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _run(*words)


def test_a_chunk_without_a_stated_horizon_is_an_error_that_names_the_option() -> None:
    with pytest.raises(PolicyError, match=r"expected one action per row.*got \(16, 8, 1\); state.*--horizon"):
        _run("--policy", f"{__name__}:breaks")


def test_a_task_without_a_published_policy_needs_one() -> None:
    arguments = build_parser("evaluate").parse_args(["evaluate", "humanoid"])
    with pytest.raises(ConfigError, match="expected one, since we ship none for 'humanoid', only for aloha-transfer"):
        arguments.handler(arguments)


def test_an_evaluation_can_be_filmed_and_never_over_another_film(tmp_path: Path) -> None:
    from headrace.recording._video import frame_times

    film = tmp_path / "film.mp4"
    words = ("--policy", POLICY, "--episodes", "3", "--num-envs", "2", "--video", str(film))
    assert _run(*words) == 0
    # two environments play three episodes of at most 40 steps
    assert 10 < len(frame_times(film)) <= 80
    with pytest.raises(ConfigError, match="already exists"):
        _run(*words)


def test_parts_of_a_plan_are_played_into_journals_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.evaluation import Evaluation

    words = ["evaluate", "cartpole", "--policy", POLICY, "--num-envs", "2", "--threads", "1", "--policy-id", "shove"]
    for ids in ("0:3", "3:5"):
        assert main([*words, "--episode-ids", ids, "--journal", str(tmp_path / ids)]) == 0
    rows = headrace.evaluation.merge(tmp_path / "0:3", tmp_path / "3:5").episodes
    assert [row.episode_id for row in rows] == [0, 1, 2, 3, 4]
    assert main([*words, "--episodes", "5", "--journal", str(tmp_path / "0:3"), "--resume"]) == 0
    assert "5 of 5 episodes" in capsys.readouterr().out
    assert Evaluation.load(tmp_path / "0:3").episodes == rows
    with pytest.raises(ConfigError, match="--episode-ids: expected FIRST:END"):
        _run("--policy", POLICY, "--episode-ids", "5")


def test_a_number_of_episodes_next_to_their_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="--episodes, --episode-ids: expected one of them, got both"):
        _run("--policy", POLICY, "--episodes", "100", "--episode-ids", "0:5")


def test_parts_are_merged_into_the_table_of_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "cartpole", "--policy", POLICY, "--num-envs", "2", "--threads", "1"]
    whole, first, second, merged = (str(tmp_path / name) for name in ("whole.csv", "first", "second.json", "all.json"))
    assert main([*words, "--episodes", "5", "--csv", whole]) == 0
    assert main([*words, "--episode-ids", "0:3", "--journal", first]) == 0
    assert main([*words, "--episode-ids", "2:5", "--output", second]) == 0
    capsys.readouterr()
    assert main(["merge", first, second, "-o", merged, "--csv", str(tmp_path / "merged.csv")]) == 0
    assert "5 of 5 episodes, completed" in capsys.readouterr().out
    assert (tmp_path / "merged.csv").read_bytes() == Path(whole).read_bytes()
    assert main(["merge", merged]) == 0
    # the journal of a part that lacks its last episode
    cut = Path(first).read_text().splitlines(keepends=True)[:-1]
    (tmp_path / "cut").write_text("".join(cut))
    capsys.readouterr()
    assert main(["merge", str(tmp_path / "cut")]) == 1
    shown = capsys.readouterr().out
    assert "2 of 3 episodes, interrupted" in shown
    assert "1: no rates" in shown


def test_what_cannot_be_merged_or_saved_is_an_error_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"output .*already exists"):
        _run("--policy", POLICY, "--output", str(tmp_path / "there.json"))
    with pytest.raises(ConfigError, match=r"ray_address .*expected a number of workers"):
        _run("--policy", POLICY, "--ray-address", "auto")
    with pytest.raises(ConfigError, match="--batch-size: expected no --fast"):
        _run("--policy", POLICY, "--fast", "--batch-size", "4")
    with pytest.raises(ConfigError, match="--resize: expected --map"):
        _run("--policy", POLICY, "--resize", "8x8")
    assert main(["merge", str(tmp_path / "there.json")]) == 2
    assert main(["merge", str(tmp_path / "absent")]) == 2
    said = capsys.readouterr().err
    assert "expected a saved evaluation" in said
    assert "absent: cannot be read" in said


def test_a_policy_with_lazy_layers_has_a_journal_and_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lazy = ("--policy", f"{__name__}:Lazy", "--num-envs", "2", "--journal", "rows.jsonl")
    for more in (("--episodes", "2"), ("--episodes", "4", "--resume")):
        torch.manual_seed(0)
        assert _run(*lazy, *more) == 0
    assert "4 of 4 episodes" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has no weights before the policy is called"):
        policy_hash(Lazy())
    few = ["--set", "episode_length=9", "--num-envs", "2", "--output", "played", "--warmup-steps", "2"]
    assert main(["play", "cartpole", "--policy", f"{__name__}:Lazy", *few]) == 0


def test_what_is_evaluated_is_recorded_and_every_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows = tmp_path / "set", tmp_path / "rows.csv"
    few = ("--policy", POLICY, "--episodes", "5", "--num-envs", "2")
    assert _run(*few, "--record", str(folder), "--csv", str(rows)) == 0
    shown = capsys.readouterr().out
    assert shown.index("mean reward") < shown.index(f"wrote {rows}") < shown.index(f"wrote {folder}")
    recorded = {episode.meta.episode_id: episode.meta.length for episode in EpisodeDataset(folder)}
    with rows.open() as file:
        assert recorded == {int(row["episode_id"]): int(row["length"]) for row in csv.DictReader(file)}
    assert main(["record", "replay", str(folder)]) == 0
    with pytest.raises(ConfigError, match="expected no --workers and no --film"):
        _run(*few, "--record", str(tmp_path / "other"), "--film", "1")


def test_the_table_comes_before_the_films_and_their_files_after_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    films = []

    def film_again(filming: FilmCfg, *_: object) -> None:
        films.append(filming.episode_path(1))
        assert "mean reward" in capsys.readouterr().out

    monkeypatch.setattr("headrace.evaluation.evaluating.film_again", film_again)
    few = ("--policy", POLICY, "--episodes", "2", "--num-envs", "2")
    assert _run(*few, "--film", "1", "--films", str(tmp_path / "films")) == 0
    assert capsys.readouterr().out == f"wrote {films[0]}\n"
