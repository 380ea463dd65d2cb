"""``headrace.bench.demo``: the whole story on one page, with real parts and real files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DataError, HeadraceError, MissingExtraError
from headrace.evaluation.cfg import JournalCfg, PlayCfg
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from headrace.bench.reporting.page import Saving
    from headrace.envs.recipe import EnvRecipe
    from headrace.evaluation import Evaluation
    from headrace.policies.protocol import ChunkContext
    from headrace.replay import ReplayBuffer
    from headrace.types import Obs

SCHEDULERS = {
    "whole batch when any needs it": "whole-batch-on-any",
    "all together, when all need it": "synchronized",
    "each when it needs it": "greedy",
}
"""Who is inferred → the admission rule; the first is the usual way, the last is ours."""
_SEED, _EXECUTE = 1, 16
_PLAY = PlayCfg(execute=_EXECUTE)
_STACKED = {"frame_stack": 4, "pixels": 48}
"""The images of the replay buffer."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo left behind."""

    page: Path
    film: Path
    evaluations: dict[str, Evaluation]
    """Who is inferred → the same episodes under that scheduler."""
    savings: tuple[Saving, ...]


def _quiet(shown: RenderableType) -> None:
    del shown


def demo(
    output: str | Path = "outputs/demo",
    *,
    quick: bool = False,
    on_scene: Callable[[str], None] = _quiet,
    show: Callable[[RenderableType], None] = _quiet,
) -> DemoResult:
    """Play the three scenes of the demo and put what they show on one page.

    The robot is ALOHA where gym-aloha's model files are installed, else ``pusher-solid``.

    Args:
        output: new directory for the page, the film, journals, evaluations and a dataset.
        quick: fewer episodes, to see what it shows.
        on_scene: called with the title of each scene as it begins.
        show: called with what a scene has to show: rich tables and text.

    Returns:
        ``page`` and ``film`` (files), ``evaluations`` by policy, and ``savings``: what the library did not compute.
    """
    import headrace
    from headrace.bench.reporting.page import Film, Story

    folder = Path(output)
    episodes, slots = (12, 4) if quick else (64, 16)
    on_scene("1 of 3: a chunk policy under three schedulers")
    recipe, policy = choose_task(slots, show)
    evaluations = schedule(recipe, policy, episodes, folder)
    show(scheduler_table(recipe, evaluations))
    film = folder / "film.mp4"
    shown = recipe.replace(num_envs=4)
    headrace.evaluate(shown, policy, episodes=4, play=_PLAY, film=FilmCfg(video=film), progress=False)
    films = [Film(film, f"The policy on {recipe.source}, four environments")]
    if policy is not None:
        films.append(Film(film_expert(folder / "expert.mp4"), "The scripted expert that it learned from"))
    usual, *_, ours = evaluations.values()
    savings = chunk_savings(usual, ours)

    on_scene("2 of 3: the same evaluation killed, resumed and merged")
    killed_at = cut_and_merge(recipe, policy, episodes, ours, folder)
    same = (
        f"A process that played the {episodes} episodes was killed with SIGKILL after {killed_at}. Resumed from its "
        "journal, and merged with the rest played in another batch size, it gave the same table, bit for bit."
    )
    show(same)

    on_scene("3 of 3: replay and recording")
    buffer = fill_buffer(60 if quick else 400)
    savings.append(replay_saving(buffer))
    replayed = record_and_replay(folder / "dataset", 16 if quick else 32)
    kept = (
        f"{len(buffer):,} transitions of stacked images take {buffer.nbytes / 2**20:.1f} MiB. {replayed} recorded "
        "episodes were simulated again from their actions: every state is equal to the last bit."
    )
    show(kept)

    for num_envs in (4, 16) if quick else (16, 64, 256):
        headrace.bench.runtime(
            "ant",
            num_envs=num_envs,
            num_steps=20 if quick else 60,
            run=headrace.RunCfg(output=folder / f"ant-{num_envs}"),
        )
    rate = ours.success_rate
    reached = "" if rate is None else f" It succeeds in {rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}]."
    opening = (
        f"The shipped chunk policy played {episodes} episodes of {recipe.source} in {slots} environments under three "
        f"schedulers.{reached} Inferring and drawing only the environments whose chunk has run out took "
        f"{ours.counters.rows_inferred:,} rows and {ours.counters.frames_drawn:,} images, instead of "
        f"{usual.counters.rows_inferred:,} and {usual.counters.frames_drawn:,}."
    )
    story = Story(
        sentences=(opening, same, kept),
        savings=savings,
        films=films,
    )
    page = headrace.bench.report([folder], output=folder / "report.html", title="headrace demo", story=story).path
    return DemoResult(page=page, film=film, evaluations=evaluations, savings=tuple(savings))


def warm_up() -> None:
    """Use a little of everything, so that what the first run on a machine compiles is compiled at one place."""
    import torch

    import headrace

    for recipe in (choose_task(2, _quiet)[0], headrace.EnvRecipe("ant", num_envs=2)):
        env = recipe.make()
        env.reset()
        env.step(torch.from_numpy(env.action_space.sample()))
        env.close()
    fill_buffer(1).sample(1)


def schedule(recipe: EnvRecipe, policy: str | None, episodes: int, folder: Path) -> dict[str, Evaluation]:
    """Play the same episodes under each scheduler; the results are saved where the report finds them."""
    import headrace

    found: dict[str, Evaluation] = {}
    for name, rule in SCHEDULERS.items():
        saved = folder / rule / "evaluation.json"
        found[name] = headrace.evaluate(
            recipe, policy, episodes=episodes, play=replace(_PLAY, admission=rule), output=saved
        )
    return found


def scheduler_table(recipe: EnvRecipe, evaluations: dict[str, Evaluation]) -> RenderableType:
    """Success with its interval, and what it cost, by scheduler."""
    from rich.table import Table

    table = Table(title=f"{recipe.source}, {recipe.num_envs} environments, chunks of {_EXECUTE}")
    for column in ("who is inferred", "success", "model calls", "rows", "images", "seconds"):
        table.add_column(column, justify="left" if column.startswith("who") else "right")
    for name, result in evaluations.items():
        counters, rate = result.counters, result.success_rate
        reached = "–" if rate is None else f"{rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}]"
        counts = (counters.model_calls, counters.rows_inferred, counters.frames_drawn)
        table.add_row(name, reached, *(f"{count:,}" for count in counts), f"{counters.seconds:.1f}")
    return table


class SeesCube:
    """The policy that ships for ALOHA without a camera, on the task with one: ``critic`` has what it reads."""

    obs_steps = 1

    def __init__(self) -> None:
        from headrace.policies.load_policy import load_policy

        self._policy = load_policy("aloha-transfer-cube-state")
        self.horizon, self.action_dim = self._policy.horizon, self._policy.action_dim

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan as the policy does."""
        return self._policy({"policy": obs["critic"]}, context)


def choose_task(slots: int, show: Callable[[RenderableType], None]) -> tuple[EnvRecipe, str | None]:
    """Return what to evaluate, and by which policy: ALOHA where its model files are, else ``pusher-solid``."""
    from headrace.envs.recipe import EnvRecipe
    from headrace.envs.tasks.aloha import aloha_assets

    try:
        aloha_assets()
    except MissingExtraError as missing:
        show(f"pusher-solid instead of ALOHA: {missing}")
        return EnvRecipe("pusher-solid", num_envs=slots, seed=_SEED, overrides={"camera": True}), None
    size = {"width": 128, "height": 96}
    recipe = EnvRecipe("aloha-transfer-cube", num_envs=slots, seed=_SEED, overrides=size)
    return recipe, "headrace.bench.story:SeesCube"


def film_expert(path: Path) -> Path:
    """Film the scripted expert of ALOHA; returns the file."""
    import headrace
    from headrace.imitation.experts import expert_for
    from headrace.policies.protocol import as_chunk_policy

    task = "aloha-transfer-cube-state"
    expert = expert_for(task)

    def follow(obs: Obs, context: ChunkContext) -> Tensor:
        del context
        return expert(obs)[:, None]

    recipe = headrace.EnvRecipe(task, num_envs=2, seed=_SEED)
    policy = as_chunk_policy(follow, horizon=1, action_dim=14)
    headrace.evaluate(recipe, policy, episodes=2, film=FilmCfg(video=path), progress=False)
    return path


def chunk_savings(usual: Evaluation, ours: Evaluation) -> list[Saving]:
    """Return what the last scheduler saved compared with the first."""
    from headrace.bench.reporting.page import Saving

    names = {"model_calls": "model calls", "rows_inferred": "rows inferred", "frames_drawn": "images drawn"}
    way = next(iter(SCHEDULERS))
    return [
        Saving(what, way, getattr(usual.counters, name), getattr(ours.counters, name)) for name, what in names.items()
    ]


def cut_and_merge(recipe: EnvRecipe, policy: str | None, episodes: int, whole: Evaluation, folder: Path) -> str:
    """Kill an evaluation in another process, go on with its journal, and merge it with parts; returns when it died."""
    import headrace

    journal, cut = folder / "killed.jsonl", folder / "cut.jsonl"
    _kill_midway(recipe, policy, episodes, journal)
    cut.write_bytes(journal.read_bytes())
    before = headrace.evaluation.merge(cut)
    done = {row.episode_id for row in before.episodes}
    left = [episode for episode in range(episodes) if episode not in done] or [0]

    def play(num_envs: int, ids: Sequence[int], journal: Path) -> Evaluation:
        batch = recipe.replace(num_envs=num_envs)
        return headrace.evaluate(
            batch, policy, episodes=ids, play=_PLAY, journal=JournalCfg(path=journal, resume=True), progress=False
        )

    with warnings.catch_warnings():
        # other sizes of the batch are the point here, and are warned about
        warnings.filterwarnings("ignore", message=".*played under other circumstances")
        resumed = play(recipe.num_envs, range(episodes), journal)
        merged = headrace.evaluation.merge(before, play(5, left, folder / "rest.jsonl"))
    for name, found in (("resumed", resumed), ("merged", merged)):
        if found.episodes != whole.episodes:
            raise DataError(f"demo: the {name} evaluation differs from the one that was not cut; please report this")
    return f"{len(done)} of them"


def _kill_midway(recipe: EnvRecipe, policy: str | None, episodes: int, journal: Path) -> None:
    settings = [f"--set={path}={value}" for path, value in recipe.overrides.items()]
    settings += [] if policy is None else ["--policy", policy]
    command: Sequence[str] = (
        *(sys.executable, "-m", "headrace", "evaluate", recipe.source, *settings, "--episodes", str(episodes)),
        *("--num-envs", "3", "--seed", str(recipe.seed), "--execute", str(_EXECUTE), "--journal", str(journal)),
    )
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        limit = time.monotonic() + _PATIENCE_S
        # a header, then a line per finished episode
        while process.poll() is None and time.monotonic() < limit:
            if journal.exists() and journal.read_bytes().count(b"\n") > 1 + episodes // 4:
                break
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if not journal.exists():
        raise HeadraceError(f"demo: {' '.join(command)} ended without a journal; run it to see why")


def fill_buffer(steps: int) -> ReplayBuffer:
    """Return a replay buffer with ``steps`` steps of four camera environments."""
    import torch

    import headrace
    from headrace.replay import ReplayBuffer
    from headrace.types import StackSpec

    env = headrace.make("cartpole-camera", 4, seed=0, overrides=_STACKED)
    spaces = env.single_observation_space, env.single_action_space
    buffer = ReplayBuffer(4 * steps, 4, *spaces, stack={"policy": StackSpec(frames=4, dim=-1)})
    obs, _ = env.reset()
    for _ in range(steps):
        active, action = env.active, torch.rand(4, 1) * 2 - 1
        step = env.step(action)
        buffer.extend(obs, action, step, active)
        obs = step.obs
    env.close()
    return buffer


def replay_saving(buffer: ReplayBuffer) -> Saving:
    """Bytes per transition, compared with keeping ``obs`` and ``next_obs``."""
    from headrace.bench.reporting.page import Saving

    sample = buffer.sample(min(32, len(buffer)))
    usual = sum(2 * sample["observation", group][0].nbytes for group in ("policy", "critic"))
    return Saving("bytes per transition", "obs and next_obs stored", usual, buffer.bytes_per_transition, " B")


def record_and_replay(folder: Path, slots: int) -> int:
    """Record the first episodes of ``slots`` environments and simulate them again; returns how many."""
    import headrace
    from headrace.recording.dataset import EpisodeDataset
    from headrace.recording.playback import replay_dataset

    headrace.bench.run("cartpole", num_envs=slots, num_steps=100, record=folder)
    replays = [replay for _, replay in replay_dataset(EpisodeDataset(folder))]
    if not replays or not all(replay.exact for replay in replays):
        raise DataError(f"demo: an episode in {folder} could not be replayed to the last bit; please report this")
    return len(replays)
