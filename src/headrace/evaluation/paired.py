"""``evaluate_paired``: two policies over the same episodes, interleaved, and what differs episode by episode."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from rich.console import Console

from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError
from headrace.evaluation._result import EpisodeResult, Evaluation, format_number, format_percent
from headrace.evaluation._result_files import total_counters
from headrace.evaluation.cfg import PlayCfg
from headrace.evaluation.evaluating import NUM_ENVS, film_again
from headrace.evaluation.player import Player, check_engine, open_player
from headrace.evaluation.scheduling import EpisodePlan
from headrace.files import check_new, write_whole
from headrace.policies.load_policy import find_policy
from headrace.recording.film import FilmCfg
from headrace.statistics import Interval, bootstrap_interval, paired_interval

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.policies.load_policy import PolicySource

ARMS = "policy", "against"
_PER_ENV = 4
"""Episodes of a block per environment: one arm plays a block, then the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEvaluation:
    """Two tables over the same episodes. Differences are those of ``policy`` less ``against``."""

    policy: Evaluation
    against: Evaluation

    @property
    def pairs(self) -> list[tuple[EpisodeResult, EpisodeResult]]:
        """The episodes that both have finished, in the order of their ids."""
        others = {row.episode_id: row for row in self.against.episodes}
        return [(row, others[row.episode_id]) for row in self.policy.episodes if row.episode_id in others]

    @property
    def flipped(self) -> list[tuple[EpisodeResult, EpisodeResult]]:
        """The pairs of which one succeeded and the other did not."""
        return [(row, other) for row, other in self.pairs if {row.success, other.success} == {True, False}]

    @property
    def success_difference(self) -> Interval | None:
        """With a paired 95 % interval; None where the task has no success measure, or the plan is not completed."""
        known = [(row.success, other.success) for row, other in self.pairs if None not in (row.success, other.success)]
        if not known or self._unfinished:
            return None
        outcomes = (True, True), (False, True), (True, False), (False, False)
        return paired_interval(*map(known.count, outcomes))

    @property
    def reward_difference(self) -> Interval | None:
        """Mean with a paired bootstrap 95 % interval; None while the plan is not completed."""
        pairs = self.pairs
        if not pairs or self._unfinished:
            return None
        return bootstrap_interval(np.array([row.reward - other.reward for row, other in pairs]))

    @property
    def _unfinished(self) -> int:
        return self.policy.unfinished + self.against.unfinished

    def to_csv(self, path: str | Path) -> None:
        """Write a row per pair, with a header, in place of what is there."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["episode_id", "seed", "reward", "against", "difference", "success", "success_against"])
        for row, other in self.pairs:
            figures = row.reward, other.reward, row.reward - other.reward
            writer.writerow([row.episode_id, row.seed, *figures, row.success, other.success])
        write_whole(Path(path), text.getvalue())

    def summary(self) -> Table:
        """Return the figures of both arms and their differences as a table to print."""
        from rich.table import Table

        pairs, flipped = self.pairs, self.flipped
        table = Table(title=f"{len(pairs)} of {self.policy.planned} pairs of episodes")
        for name in ("", *ARMS, "difference"):
            table.add_column(name, justify="left" if not name else "right")
        rates, rewards = ([getattr(arm, name) for arm in (self.policy, self.against)] for name in _FIGURES)
        table.add_row("success rate", *map(format_percent, (*rates, self.success_difference)))
        table.add_row("mean reward", *map(format_number, (*rewards, self.reward_difference)))
        wins = sum(row.success is True for row, _ in flipped)
        table.add_row("episodes that flipped", str(wins), str(len(flipped) - wins), _ids(flipped))
        gains = [row.reward - other.reward for row, other in pairs]
        better, worse = (sum(sign * gain > 0 for gain in gains) for sign in (1, -1))
        table.add_row("higher reward", str(better), str(worse), f"{len(gains) - better - worse} equal")
        return table


_FIGURES = "success_rate", "mean_reward"


def evaluate_paired(
    env: str | EnvRecipe,
    policy: PolicySource = None,
    against: PolicySource = None,
    *,
    episodes: int | Iterable[int] = 100,
    num_envs: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, object] | None = None,
    play: PlayCfg = PlayCfg(),
    against_play: PlayCfg | None = None,
    films: str | Path | None = None,
    progress: bool = True,
) -> PairedEvaluation:
    """Play every episode of a plan with two policies, or with one in two ways, and compare pair by pair.

    The arms take turns in blocks of episodes, so that what changes on the machine meets both, and Ctrl-C leaves pairs.

    Args:
        env: a task name, ``module:NAME``, ``gym:ID``, or a recipe.
        policy: as for :func:`headrace.evaluate`.
        against: likewise; None for the one that ships.
        episodes: how many (ids from 0), or the ids.
        num_envs: environments in the batch; None for the recipe's, else 16.
        seed: of the episodes and of the policies' noise.
        overrides: task settings by path.
        play: how the policy is played.
        against_play: how the other one is played (another instruction, map, …); None for ``play``.
        films: new directory for films of the episodes that flipped, of both arms.
        progress: show the preflights and progress bars.
    """
    recipe = EnvRecipe.of(env, NUM_ENVS, num_envs=num_envs, seed=seed, overrides=overrides)
    found = [find_policy(source, recipe.source) for source in (policy, against)]
    cfgs = [play, play if against_play is None else against_play]
    if found[0].overrides != found[1].overrides:
        raise ConfigError(
            f"policies: expected two that were trained with the same settings of the task, got {found[0].overrides} "
            f"and {found[1].overrides}; both must play the same environment"
        )
    recipe = recipe.replace(overrides=found[0].overrides | dict(recipe.overrides))
    directories = [None if films is None else Path(films) / arm for arm in ARMS]
    plan = EpisodePlan(episodes).ids
    for directory in filter(None, directories):
        check_new(directory, "films")
        FilmCfg(episodes=tuple(plan), directory=directory).check_episodes(plan, recipe)
    parts: list[list[Evaluation]] = [[], []]
    with ExitStack() as stack:
        made = stack.enter_context(closing(recipe.make(autoreset="disabled", final_obs=False)))
        players: list[Player] = []
        for source, cfg in zip(found, cfgs, strict=True):
            check_engine(source, cfg)
            players.append(stack.enter_context(open_player(made, source, cfg, recipe.seed)))
            if progress:
                Console(stderr=True).print(players[-1].preflight.table())
        size = _PER_ENV * recipe.num_envs
        for begin in range(0, len(plan), size):
            for player, rows in zip(players, parts, strict=True):
                rows.append(player.play(plan[begin : begin + size], progress=progress))
                if rows[-1].interrupt is not None:
                    return _join(parts, plan)
    result = _join(parts, plan)
    flips = tuple(row.episode_id for row, _ in result.flipped)
    for directory, source, cfg, arm in zip(directories, found, cfgs, ARMS, strict=True):
        if directory is not None and flips:
            filming = FilmCfg(episodes=flips, directory=directory)
            film_again(filming, recipe, source, cfg, cast("Evaluation", getattr(result, arm)))
    return result


def _join(parts: list[list[Evaluation]], plan: Iterable[int]) -> PairedEvaluation:
    """Return the tables of both arms; that of an arm whose turn did not come has no rows."""
    last = parts[0][-1]
    stopped = next((part for rows in parts for part in rows if part.interrupt is not None), last)
    arms = [
        replace(
            rows[-1] if rows else last,
            episodes=sorted(row for part in rows for row in part.episodes),
            plan=tuple(sorted(plan)),
            counters=total_counters([part.counters for part in rows]),
            status=stopped.status,
            interrupt=stopped.interrupt,
        )
        for rows in parts
    ]
    return PairedEvaluation(policy=arms[0], against=arms[1])


def _ids(pairs: list[tuple[EpisodeResult, EpisodeResult]]) -> str:
    return ", ".join(str(row.episode_id) for row, _ in pairs[:8]) + (", …" if len(pairs) > 8 else "")
