"""Evaluation over Ray workers: the table is that of one process, to the last bit, whoever dies meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from worker_policies import RECIPE, Confused, Deadly, Lonely, Shove

import headrace
from faulty_disk import FaultyDisk
from flat import evaluate
from headrace import files
from headrace.errors import ConfigError, HeadraceError, PolicyError, StorageError
from headrace.evaluation import EpisodeResult, Evaluation
from headrace.evaluation._journal import read_journal

pytestmark = pytest.mark.ray

EPISODES = 24
PROGRAM = Path(__file__).with_name("driver_program.py")


def _distributed(policy: object, **more: object) -> Evaluation:
    settings = {"episodes": EPISODES, "workers": 2, "progress": False, **more}
    return evaluate(RECIPE, policy, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def alone() -> list[EpisodeResult]:
    """The table of one process."""
    return evaluate(RECIPE, Shove(), episodes=EPISODES, progress=False).episodes


@pytest.mark.usefixtures("cluster")
class TestTables:
    @pytest.mark.slow
    @pytest.mark.parametrize(("workers", "block"), [(2, None), (4, 1), (2, 7)])
    def test_do_not_depend_on_workers_and_blocks(
        self, workers: int, block: int | None, alone: list[EpisodeResult]
    ) -> None:
        found = _distributed(Shove(), workers=workers, block=block)
        assert found.episodes == alone
        assert (found.status, found.unfinished) == ("completed", 0)
        assert found.mean_reward is not None
        assert found.circumstances is not None
        assert found.circumstances["workers"] == workers
        assert found.counters.env_steps == sum(row.length for row in alone)

    @pytest.mark.slow
    def test_of_policies_by_name_are_found_by_each_worker_and_merge_with_those_of_one_process(
        self, tmp_path: Path, alone: list[EpisodeResult]
    ) -> None:
        policy = "worker_policies:Shove"
        evaluate(RECIPE, policy, episodes=range(8), workers=2, output=tmp_path / "a.json", progress=False, execute=8)
        evaluate(RECIPE, policy, episodes=range(8, EPISODES), journal=tmp_path / "b.jsonl", progress=False)
        with pytest.warns(UserWarning, match="workers"):
            merged = headrace.evaluation.merge(tmp_path / "a.json", tmp_path / "b.jsonl")
        assert merged.episodes == alone

    @pytest.mark.slow
    def test_survive_ctrl_c_in_the_driver_and_are_completed_from_its_journal(
        self, tmp_path: Path, alone: list[EpisodeResult]
    ) -> None:
        journal = tmp_path / "journal"

        def press(rows: list[EpisodeResult]) -> None:
            raise KeyboardInterrupt

        part = _distributed(Shove(), journal=journal, on_episodes=press, block=2)
        assert part.status == "interrupted"
        assert 0 < len(part.episodes) < EPISODES
        assert part.mean_reward is None
        assert _distributed(Shove(), journal=journal, resume=True).episodes == alone
        again = _distributed(Shove(), journal=journal, resume=True)
        assert (again.episodes, again.counters.env_steps) == (alone, 0)


@pytest.mark.usefixtures("cluster")
class TestDeadWorkers:
    def test_leave_their_unfinished_episodes_to_others(self, tmp_path: Path, alone: list[EpisodeResult]) -> None:
        policy = Deadly(tmp_path, episode=4, chunk=3)
        seen: list[EpisodeResult] = []

        def see(rows: list[EpisodeResult]) -> None:
            seen.extend(rows)
            assert len(read_journal(tmp_path / "journal").rows) == len(seen)

        found = _distributed(policy, block=6, journal=tmp_path / "journal", on_episodes=see)
        assert policy.deaths == 1
        assert found.episodes == alone
        assert sorted(seen) == alone  # each reported once
        assert (found.status, found.unfinished) == ("completed", 0)
        assert found.mean_reward is not None
        assert found.circumstances is not None
        assert found.circumstances["workers"] == 2
        _await(lambda: not any(map(_alive, policy.processes)))

    def test_that_die_of_the_same_block_three_times_give_it_up_and_the_plan_has_no_rates(
        self, tmp_path: Path, alone: list[EpisodeResult]
    ) -> None:
        policy = Deadly(tmp_path, episode=4, chunk=0, times=9)
        found = _distributed(policy, workers=1, episodes=9, block=3, journal=tmp_path / "journal")
        assert policy.deaths == 3
        assert found.status == "failed"
        assert found.given_up == (3, 4, 5)
        assert found.unfinished == 3
        assert found.mean_reward is found.success_rate is None
        assert found.episodes == [row for row in alone[:9] if row.episode_id not in (3, 4, 5)]
        found.save(tmp_path / "saved.json")
        assert Evaluation.load(tmp_path / "saved.json") == found

    def test_are_told_apart_from_policies_that_raise(self) -> None:
        with pytest.raises(PolicyError, match="no idea") as caught:
            _distributed(Confused(episode=10), workers=1, block=4)
        finished = caught.value.finished
        assert isinstance(finished, Evaluation)
        assert (finished.status, finished.planned, finished.mean_reward) == ("failed", EPISODES, None)
        assert len(finished.episodes) >= 4

    @pytest.mark.slow
    @pytest.mark.parametrize("moment", range(10))
    def test_at_ten_random_moments_change_nothing(
        self, moment: int, tmp_path: Path, alone: list[EpisodeResult]
    ) -> None:
        draw = np.random.default_rng(moment)
        policy = Deadly(tmp_path, episode=-1)
        after = int(draw.integers(0, 20))
        count = 0
        killed: list[int] = []

        def kill(rows: list[EpisodeResult]) -> None:
            nonlocal count
            count += len(rows)
            if count > after and not killed:
                time.sleep(float(draw.uniform(0.0, 0.05)))
                killed.append(int(draw.choice(sorted(policy.processes))))
                os.kill(killed[0], signal.SIGKILL)

        found = _distributed(policy, block=int(draw.integers(1, 9)), on_episodes=kill)
        assert killed
        assert found.episodes == alone


@pytest.mark.usefixtures("cluster")
class TestWorkers:
    @pytest.mark.slow
    def test_share_a_batching_server_and_its_batches_change_nothing(self, alone: list[EpisodeResult]) -> None:
        from headrace.policies import PolicyServer, ServeCfg

        with PolicyServer(Shove(), ServeCfg(port=0, max_wait=0.05)) as server:
            found = _distributed(server.address, workers=4, block=2, policy_id="shove")
            assert server.stats.shared > 0
        assert found.episodes == alone
        assert found.identity is not None
        assert found.identity["policy"] == "shove"

    @pytest.mark.slow
    def test_join_when_there_is_room(self, tmp_path: Path, alone: list[EpisodeResult]) -> None:
        import ray

        @ray.remote(num_cpus=3)  # of four: one worker has room
        class Guest:
            def here(self) -> bool:
                return True

        guest = Guest.remote()
        assert ray.get(guest.here.remote())
        policy = Lonely(tmp_path)

        def leave(rows: list[EpisodeResult]) -> None:
            if not (tmp_path / "wait").exists():
                assert len(policy.seen("made")) == 1
                (tmp_path / "wait").touch()
                ray.kill(guest)

        found = _distributed(policy, workers=2, block=1, on_episodes=leave)
        assert len(policy.seen("played")) == 2
        assert found.episodes == alone

    @pytest.mark.slow
    def test_with_other_policies_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"worker \d .*expected an evaluation of policy"):
            _distributed("worker_policies:Unlike", block=1)

    @pytest.mark.slow
    def test_that_cannot_be_made_say_why(self) -> None:
        with pytest.raises(ConfigError, match="module 'no_such_module' cannot be imported"):
            _distributed("no_such_module:policy")
        with pytest.raises(HeadraceError, match="episode_lenght"):
            evaluate(RECIPE.replace(overrides={"episode_lenght": 3}), Shove(), workers=1, progress=False)


def test_what_cannot_be_met_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for change, message in (
        ({"workers": 0}, "workers: expected at least 1, got 0"),
        ({"block": 0}, "block: expected at least 1, got 0"),
        ({"cpus": 0}, "cpus: expected at least 1"),
        ({"engine": object()}, "engine: expected a name"),
        ({"journal": tmp_path / "there"}, "already exists; pass resume=True"),
        ({"episodes": []}, "episodes: expected at least one"),
    ):
        with pytest.raises(ConfigError, match=message):
            _distributed(Shove(), **change)
    with pytest.raises(ConfigError, match=r"policy_id .*of openpi://nowhere:1"):
        _distributed("openpi://nowhere:1")
    with pytest.raises(ConfigError, match="workers: expected environments by name or recipe"):
        evaluate(RECIPE, Shove(), workers=2, video=tmp_path / "film.mp4")


def test_a_full_disk_under_the_journal_is_a_clear_error_and_it_is_resumed_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: list[EpisodeResult], cluster: str
) -> None:
    journal = tmp_path / "journal"
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", FaultyDisk(errno.ENOSPC, room=1500))
        with pytest.raises(
            StorageError, match="the disk is full; make room and resume: the rows before are safe"
        ) as hit:
            _distributed(Shove(), journal=journal, block=2)
    assert isinstance(hit.value.finished, Evaluation)
    assert hit.value.finished.mean_reward is None
    kept = read_journal(journal).rows
    assert 0 < len(kept) < EPISODES
    _evaluate_by_command(tmp_path / "evaluation.json", "--journal", journal, "--resume", "--ray-address", cluster)
    assert Evaluation.load(tmp_path / "evaluation.json").episodes == alone
    found = read_journal(journal).rows
    assert sorted(found) == alone  # each once
    assert found[: len(kept)] == kept


def _evaluate_by_command(output: Path, *more: object) -> None:
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "headrace", "evaluate", "cartpole", "--policy", "worker_policies:Shove"]
    command += ["--episodes", str(EPISODES), "--num-envs", "3", "--seed", "5", "--set", "episode_length=60"]
    command += ["--workers", "2", "--output", str(output), *map(str, more)]
    environment = os.environ | {"PYTHONPATH": ":".join(places)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"{EPISODES} of {EPISODES} episodes, completed" in ran.stdout


@pytest.mark.slow
def test_workers_from_the_command_line_need_no_cluster(tmp_path: Path, alone: list[EpisodeResult]) -> None:
    _evaluate_by_command(tmp_path / "evaluation.json")
    assert Evaluation.load(tmp_path / "evaluation.json").episodes == alone


def _killed_driver(cluster: str, journal: Path, *, after: int, pause: float = 0.0) -> None:
    """Start a driver of its own, and kill it when its journal has more than ``after`` rows."""
    command = [sys.executable, str(PROGRAM), cluster, str(journal), str(journal.parent), str(EPISODES)]
    with subprocess.Popen(command) as driver:
        _await(lambda: _rows(journal) > after or driver.poll() is not None)
        time.sleep(pause)
        assert driver.poll() in (None, 0), "the driver failed by itself"
        driver.kill()


def _rows(journal: Path) -> int:
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _await(true: object, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _completed(journal: Path) -> Evaluation:
    return _distributed(Deadly(journal.parent, episode=-1), journal=journal, resume=True)


def test_a_killed_driver_leaves_no_workers_and_its_journal_is_completed(
    cluster: str, tmp_path: Path, alone: list[EpisodeResult]
) -> None:
    journal = tmp_path / "journal"
    _killed_driver(cluster, journal, after=3)
    _await(lambda: not any(map(_alive, Deadly(tmp_path, episode=-1).processes)))
    assert 3 < _rows(journal) < EPISODES
    assert _completed(journal).episodes == alone


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
def test_a_driver_that_is_killed_at_ten_random_moments_is_resumed_to_the_same_table(
    moment: int, cluster: str, tmp_path: Path, alone: list[EpisodeResult]
) -> None:
    draw = np.random.default_rng(moment)
    journal = tmp_path / "journal"
    _killed_driver(cluster, journal, after=int(draw.integers(-1, 20)), pause=float(draw.uniform(0.0, 0.1)))
    assert _completed(journal).episodes == alone
