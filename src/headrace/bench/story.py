"""``headrace.bench.story.demo``: a chunk policy under three schedulers on one page, with real parts and real files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DataError, MissingExtraError
from headrace.evaluation.cfg import PlayCfg
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from headrace.bench.reporting.page import Film
    from headrace.envs.recipe import EnvRecipe
    from headrace.evaluation import Evaluation
    from headrace.policies.protocol import ChunkContext
    from headrace.types import Obs

SCHEDULERS = {
    "whole batch when any needs it": "whole-batch-on-any",
    "all together, when all need it": "synchronized",
    "each when it needs it": "greedy",
}
"""Who is inferred → the admission rule; the first is the usual way, the last is ours."""
_SEED = 1
_LIBERO = "libero_object/0"
_PLAY = PlayCfg(execute=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo left behind."""

    page: Path
    film: Path
    evaluations: dict[str, Evaluation]
    """Who is inferred → the same episodes under that scheduler."""


def _quiet(shown: RenderableType) -> None:
    del shown


def demo(
    output: str | Path = "outputs/demo",
    *,
    quick: bool = False,
    show: Callable[[RenderableType], None] = _quiet,
) -> DemoResult:
    """Play a chunk policy under three schedulers, film it, and put what they show on one page.

    The robot is ALOHA where gym-aloha's model files are installed, else ``pusher-solid``; where tasks of LIBERO are
    exported, the page begins with a film of one.

    Args:
        output: new directory for the page, the films and evaluations.
        quick: fewer episodes, to see what it shows.
        show: called with what there is to show: rich tables and text.

    Returns:
        ``page`` and ``film`` (files), and ``evaluations`` by scheduler.
    """
    import headrace
    from headrace.bench.reporting.page import Film, Story
    from headrace.imitation.experts import expert_for

    folder = Path(output)
    episodes, slots = (12, 4) if quick else (64, 16)
    recipe, policy = choose_task(slots, show)
    evaluations = schedule(recipe, policy, episodes, folder, show)
    film = folder / "film.mp4"
    shown = recipe.replace(num_envs=4)
    headrace.evaluate(shown, policy, episodes=4, play=_PLAY, film=FilmCfg(video=film), progress=False)
    films = [Film(film, f"The policy on {recipe.source}, four environments")]
    if policy is not None:
        task, path = "aloha-transfer-cube-state", folder / "expert.mp4"
        shown = headrace.EnvRecipe(task, num_envs=2, seed=_SEED)
        headrace.evaluate(shown, expert_for(task), episodes=2, film=FilmCfg(video=path), progress=False)
        films.append(Film(path, "The scripted expert that it learned from"))
    films = [*film_libero(folder, show), *films]
    usual, *_, ours = evaluations.values()
    rate = ours.success_rate
    reached = "" if rate is None else f" It succeeds in {rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}]."
    opening = (
        f"The shipped chunk policy played {episodes} episodes of {recipe.source} in {slots} environments under three "
        f"schedulers.{reached} Inferring and drawing only the environments whose chunk has run out took "
        f"{ours.counters.rows_inferred:,} rows and {ours.counters.frames_drawn:,} images, instead of "
        f"{usual.counters.rows_inferred:,} and {usual.counters.frames_drawn:,}."
    )
    story = Story(sentences=(opening,), films=films)
    page = headrace.bench.report([folder], output=folder / "report.html", title="headrace demo", story=story).path
    return DemoResult(page=page, film=film, evaluations=evaluations)


def film_libero(folder: Path, show: Callable[[RenderableType], None]) -> list[Film]:
    """Film a task of LIBERO where it is exported, and the files that its model names are there."""
    import headrace
    from headrace.bench.reporting.page import Film
    from headrace.envs.tasks.libero.exported import exported_file
    from headrace.imitation.experts import expert_for

    if not exported_file(_LIBERO).is_file():
        return []
    path, shown = folder / "libero.mp4", headrace.EnvRecipe(_LIBERO, num_envs=4, seed=_SEED)
    try:
        expert = expert_for(_LIBERO)
    except DataError as error:
        show(f"LIBERO is left out: {error}")
        return []
    found = headrace.evaluate(shown, expert, episodes=4, film=FilmCfg(video=path), progress=False)
    solved = sum(row.success is True for row in found.episodes)
    return [Film(path, f"{_LIBERO} by its scripted expert, natively: {solved} of 4 episodes succeed")]


def warm_up() -> None:
    """Step the task once, so that what the first run on a machine compiles is compiled before anything is timed."""
    import torch

    env = choose_task(2, _quiet)[0].make()
    env.reset()
    env.step(torch.from_numpy(env.action_space.sample()))
    env.close()


def schedule(
    recipe: EnvRecipe, policy: str | None, episodes: int, folder: Path, show: Callable[[RenderableType], None]
) -> dict[str, Evaluation]:
    """Play the same episodes under each scheduler; the results are saved where the report finds them."""
    import headrace

    found: dict[str, Evaluation] = {}
    for name, rule in SCHEDULERS.items():
        saved = folder / rule / "evaluation.json"
        found[name] = headrace.evaluate(
            recipe, policy, episodes=episodes, play=replace(_PLAY, admission=rule), output=saved
        )
        did = found[name].counters
        counts = f"{did.model_calls:,} model calls, {did.rows_inferred:,} rows, {did.frames_drawn:,} images"
        show(f"{name}: {counts}, {did.seconds:.1f} seconds")
    return found


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
