"""Records of runs with a policy: training curves, checkpoints, episodes played."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from headrace.bench._statistic import Record


class LibraryDescriptor(Record):
    """The RL library of a run and the settings it was given."""

    name: str = Field(description="as in --library: rsl_rl, rl_games, skrl, sb3, headrace")
    version: str | None
    algorithm: str | None = None
    settings: dict[str, JsonValue] = Field(default_factory=dict, description="hyper-parameters as the library got them")
    differences: list[str] = Field(
        default_factory=list, description="where the library cannot do what the shared settings say"
    )


class LearningCurve(Record):
    """One quantity over the iterations."""

    final_raw: float | None = Field(description="the last iteration in which an episode finished")
    final_ema: float | None
    series_per_iter: list[float | None] | None = Field(
        description="raw mean over the episodes that finished in each iteration; null where none did"
    )
    series_ema: list[float | None] | None = Field(
        default=None, description="exponential moving average; holds its value over iterations without episodes"
    )


class Learning(Record):
    """Curves, all with one entry per iteration. Series are null with --no-series."""

    ema_alpha: float
    reward: LearningCurve | None = Field(description="undiscounted return of finished episodes")
    ep_length: LearningCurve | None
    success_rate: LearningCurve | None = Field(description="null where the task has no success measure")
    frames: list[int] | None = Field(default=None, description="frames collected up to the end of each iteration")
    wall_time_s: list[float] | None = Field(default=None, description="seconds since training began, likewise")
    episodes: list[int] | None = Field(default=None, description="episodes finished in each iteration")


class TrainingTime(Record):
    """Seconds of a training, which add up to its wall time."""

    collection: float
    learning: float
    other: float = Field(description="checkpoints, logging, everything between")


class EarlyStop(Record):
    """The success rule of a training."""

    enabled: bool
    success_threshold: float | None
    success_window: int | None = Field(description="iterations that the rule looks at")
    rule: Literal["mean", "each"] | None = Field(
        default=None,
        description="mean: over all episodes of the window. each: in every iteration of it, as Isaac Lab has it",
    )
    reached: bool
    iteration: int | None = Field(description="iterations completed when the rule was met")


class CheckpointInfo(Record):
    """The file a policy is from, or went to."""

    path: str = Field(description="the local file; for a callable its module:name")
    source: Literal["explicit", "latest", "best", "published", "saved"]
    uri: str | None = Field(default=None, description="where it was fetched from")
    sha256: str | None = None
    library: str | None = None
    task: str | None = None
    iteration: int | None = None
    score: float | None = Field(default=None, description="mean return that the training reported for it")


class PolicyDescriptor(Record):
    """How actions were chosen."""

    kind: str = Field(description="checkpoint, torchscript, onnx, callable or chunk")
    name: str
    deterministic: bool | None = Field(description="the mean action, not a sample; null where nobody said")
    recurrent: bool = False
    chunk_horizon: int | None = None
    chunk_execute: int | None = None


class EpisodeCounts(Record):
    """How episodes ended. Those still running at the end are unfinished, and nothing else counts them."""

    completed: int
    terminated: int | None = None
    truncated: int | None = None
    diverged: int | None = None
    unfinished: int | None = None


class EpisodePlan(Record):
    """What was to be played."""

    kind: Literal["episodes", "steps"] = Field(description="episodes: each of a list counted once. steps: by the clock")
    episodes_planned: int | None
    num_steps: int | None
    first_episode_id: int | None = None
    max_episode_length: int | None = None
    shorter_than_episode: bool = Field(
        description="num_steps is less than an episode may take: long episodes cannot be among the completed"
    )


class PerEnv(Record):
    """Completed episodes of each environment, by index. Means are null where an environment completed none."""

    episodes: list[int]
    reward_mean: list[float | None]
    length_mean: list[float | None]
    successes: list[int] | None


class PerEpisode(Record):
    """Completed episodes in the order of their ids: what two plays of the same episodes are compared by."""

    episode_ids: list[int]
    rewards: list[float]
    lengths: list[int]
    successes: list[bool | None] | None
