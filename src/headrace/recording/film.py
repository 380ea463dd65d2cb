"""Settings of films: of a whole run, or of episodes that are played again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import ConfigError, require_extra
from headrace.files import check_new, check_writable

if TYPE_CHECKING:
    from headrace.envs.recipe import AnyEnv, EnvRecipe
    from headrace.recording._video import VideoObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmCfg:
    """What to film, where to, and what draws it; only tasks of ours can be filmed."""

    video: str | Path | None = None
    """Film the first environments into this file, which must be new."""
    episodes: Literal["failures"] | tuple[int, ...] | None = None
    """Episodes to play again afterwards, bit for bit, and to film: ``failures`` for those without success, or ids."""
    directory: str | Path = "films"
    """Directory for the films of episodes, ``episode-ID.mp4``, each of which must be new."""
    renderer: str = "native"
    """What draws: ``native``, ``gl`` (MuJoCo's own images) or ``warp``."""
    on_table: Callable[[Any], None] | None = None
    """Called with the table of the evaluation before its episodes are played again."""
    interval: int = 50
    """Iterations of a training from one filmed to the next; filming takes time, which is in the figures."""

    def __post_init__(self) -> None:
        if isinstance(self.episodes, str) and self.episodes != "failures":
            raise ConfigError(f"film (--film): expected 'failures' or episode ids, got {self.episodes!r}")
        if self.interval < 1:
            raise ConfigError(f"video_interval (--video-interval): expected at least 1, got {self.interval}")

    def check(self) -> None:
        """Raise a ConfigError if the film of the run cannot be drawn or written, or its file already exists."""
        if self.renderer != "native":
            from headrace.sim.camera.names import check_camera_name

            check_camera_name(self.renderer)
        self._check_file(self.video)

    def check_episodes(self, planned: Iterable[int], recipe: EnvRecipe | None) -> None:
        """Raise a ConfigError if :attr:`episodes` are not of the plan, or cannot be played again and filmed.

        Args:
            planned: ids of the plan.
            recipe: what makes the environment again; None if it is not known.
        """
        if self.episodes is None:
            return
        if recipe is None or recipe.bridged:
            raise ConfigError("film (--film): expected a task of ours, by name or recipe")
        ids = set(planned)
        for episode in ids if isinstance(self.episodes, str) else self.episodes:
            if episode not in ids:
                raise ConfigError(f"film (--film): expected episodes of the plan, got {episode}")
            self._check_file(self.episode_path(episode))
        check_writable(Path(self.directory))

    def selects(self, episode: int, success: bool | None) -> bool:
        """Return whether an episode that ended so is one of :attr:`episodes`."""
        if self.episodes is None or isinstance(self.episodes, str):
            return self.episodes is not None and success is False
        return episode in self.episodes

    def episode_path(self, episode: int) -> Path:
        """Return the file for the film of an episode."""
        return Path(self.directory) / f"episode-{episode:06d}.mp4"

    @contextmanager
    def film(self, env: AnyEnv, path: str | Path | None = None) -> Generator[VideoObserver | None]:
        """Film the first environments while the block runs; yields the observer, None where there is nothing to film.

        Args:
            env: a batch of a task of ours.
            path: file to write; None for :attr:`video`.
        """
        file = self.video if path is None else path
        if file is None:
            yield None
            return
        from headrace.envs.batch_env import BatchEnv
        from headrace.recording._video import VideoObserver

        if not isinstance(env, BatchEnv):
            raise ConfigError(f"video (--video): expected a task of ours to film, got {type(env).__name__}")
        render = env.open_renderer(self.renderer)
        with VideoObserver(Path(file), render, fps=1.0 / env.task.dt) as observer:
            env.attach(observer)
            try:
                yield observer
            finally:
                env.detach(observer)

    def _check_file(self, path: str | Path | None) -> None:
        if path is not None:
            require_extra("av", extra="record", purpose="video (--video)")
            check_new(Path(path), "video")
