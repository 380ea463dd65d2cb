"""What an RL library is to headrace, and the libraries that there are. Nothing heavy is imported here."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from headrace.errors import ConfigError, DataError, UnknownNameError, UnsupportedError, require_extra
from headrace.files import read_json

if TYPE_CHECKING:
    from headrace.learning.actor_critic import MemoryKind
    from headrace.learning.groups import GroupKind, ReadGroups
    from headrace.learning.ppo import PPOCfg
    from headrace.libraries.learner import AnyEnv, Learner

BUILT_IN = {
    "headrace": "headrace.libraries.own:LIBRARY",
    "rl_games": "headrace.libraries.rl_games:LIBRARY",
    "rsl_rl": "headrace.libraries.rsl_rl:LIBRARY",
    "sb3": "headrace.libraries.sb3:LIBRARY",
    "skrl": "headrace.libraries.skrl:LIBRARY",
}
"""Name as in ``--library`` → where its :class:`LibrarySpec` is. ``headrace`` is our own small learner."""
ENTRY_POINTS = "headrace.libraries"
"""The group of entry points by which another package adds a library: name → ``module:SPEC``."""


class CurveTags(NamedTuple):
    """The TensorBoard tags of a library's learning curves, and what it counts along their x axis."""

    reward: str
    length: str
    axis: Literal["iterations", "steps", "frames"]
    """``steps`` of the batch; ``frames`` are steps times environments."""


OWN_CURVES = CurveTags("Train/mean_reward", "Train/mean_episode_length", "iterations")
"""The tags that every run is written under, so that runs of different libraries can be compared."""

EVERY_GROUP: frozenset[GroupKind] = frozenset({"vector", "image", "several", "critic"})
"""What a library reads that takes any observation."""
NOT_OURS: Mapping[str, str] = {
    "target_kl": "its learning rate is constant here",
    "max_learning_rate": "its learning rate is constant here",
    "guess_weight": "its actor learns no guess of what the critic reads",
    "image_features": "it has no layer between convolutions and hidden layers",
}
"""Settings that only our own learner honors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySpec:
    """One RL library: everything that the commands need to know of it, readable without importing it."""

    name: str
    """As in ``--library``."""
    distribution: str
    """The installed package whose version a bundle records."""
    learner: str
    """``module:Class`` of its :class:`headrace.libraries.Learner`; called with (environment, ``PPOCfg``)."""
    suffix: str
    """Of its checkpoint files."""
    marks: frozenset[str]
    """Entries by which its checkpoint files are recognized: keys of a torch file, else members of a zip archive."""
    curves: CurveTags
    reads: Mapping[MemoryKind, frozenset[GroupKind]]
    """Which observation groups it can read with which kind of memory; a kind that is missing is refused."""
    module: str | None = None
    """What it is imported as; None where the core is enough."""
    extra: str | None = None
    """The extra of headrace that installs it; None where the package that brings the adapter does."""
    meta_key: tuple[str, ...] = ("headrace",)
    """Where our description is in its torch files; an archive has it as the member ``headrace.json``."""
    loader: str | None = None
    """``module:function`` that reads a policy, (path, deterministic, trust) → policy; None to load it into a
    learner."""
    cannot_honor: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings of ``PPOCfg`` that it refuses to have changed, and why."""
    differences: tuple[str, ...] = ()
    """Where it computes something else than the settings suggest; recorded in every bundle."""

    def require(self) -> None:
        """Raise an error that names the extra where the library is missing. Nothing is imported where it is there."""
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            require_extra(self.module, extra=self.extra or self.name, purpose=f"--library {self.name}")

    def check_settings(self, settings: PPOCfg) -> None:
        """Refuse settings that this library cannot honor, with those that it can and the libraries that can."""
        defaults = type(settings)()
        for name, reason in self.cannot_honor.items():
            if getattr(settings, name) != getattr(defaults, name):
                honored = [item.name for item in fields(settings) if item.name not in self.cannot_honor]
                others = [spec.name for spec in libraries() if name not in spec.cannot_honor]
                raise ConfigError(
                    f"{name}: {self.name} cannot honor {name}={getattr(settings, name)!r}: {reason}. Leave it at "
                    f"{getattr(defaults, name)!r}, or use a library that can: {', '.join(others) or 'there is none'}. "
                    f"Settings that {self.name} honors: {', '.join(honored)}"
                )
        if settings.memory == "none" and settings.memory_size != defaults.memory_size:
            raise ConfigError(
                f"memory_size: expected a memory with it, got memory='none' and memory_size={settings.memory_size}; "
                "choose a memory, such as 'gru'"
            )
        if settings.memory not in self.reads:
            able = [spec.name for spec in libraries() if settings.memory in spec.reads]
            raise ConfigError(
                f"memory: {self.name} has no recurrent PPO with {settings.memory!r} here, expected one of "
                f"{', '.join(self.reads)}; use {', '.join(able) or 'none'} for {settings.memory!r}"
            )

    def check_groups(self, groups: ReadGroups, memory: MemoryKind = "none") -> None:
        """Refuse observation groups that this library cannot read, by name."""
        readable = self.reads[memory]
        for kind, example in groups.kinds().items():
            if kind not in readable:
                able = [spec.name for spec in libraries() if kind in spec.reads.get(memory, ())]
                raise UnsupportedError(
                    f"observation group {example!r}: {self.name} cannot read {_KINDS[kind]}"
                    f"{'' if memory == 'none' else f' with memory={memory!r}'}; use {', '.join(able) or 'none'}, or "
                    f"choose what it reads with actor_groups and critic_groups from {', '.join(groups.all)}"
                )


_KINDS: dict[GroupKind, str] = {
    "vector": "vectors",
    "image": "images",
    "several": "more than one group",
    "critic": "groups of the critic alone",
}


def library_names() -> list[str]:
    """Return what ``--library`` takes: the built-in libraries, and those of installed packages."""
    return sorted({**BUILT_IN, **_installed()})


def libraries() -> list[LibrarySpec]:
    """Every library that there is, installed or not."""
    return [library(name) for name in library_names()]


@cache
def library(name: str) -> LibrarySpec:
    """Return a library by name; an unknown one raises an error that suggests the nearest."""
    added = _installed()
    if name in BUILT_IN:
        return cast("LibrarySpec", resolve(BUILT_IN[name]))
    if name not in added:
        raise UnknownNameError("library", name, library_names())
    found: object = added[name].load()
    if not isinstance(found, LibrarySpec) or found.name != name:
        got = f"one named {found.name!r}" if isinstance(found, LibrarySpec) else type(found).__name__
        raise ConfigError(f"entry point {name!r} of {ENTRY_POINTS}: expected a LibrarySpec of that name, got {got}")
    return found


def make_learner(name: str, env: AnyEnv, settings: PPOCfg | None = None) -> Learner:
    """Return a library's PPO over an environment. What the library cannot read or honor is refused.

    Make and use it inside :func:`headrace.libraries.library_run`: libraries draw from torch's, numpy's and Python's
    global random streams, and change global settings.
    """
    from headrace.learning.groups import read_groups
    from headrace.learning.ppo import PPOCfg

    spec, settings = library(name), settings or PPOCfg()
    spec.require()
    spec.check_settings(settings)
    groups = read_groups(env.single_observation_space, settings.actor_groups, settings.critic_groups)
    spec.check_groups(groups, settings.memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # rl_games imports parts of torch.jit, which warn
        build = cast("Callable[[AnyEnv, PPOCfg], Learner]", resolve(spec.learner))
    return build(env, settings)


def resolve(target: str) -> Any:
    """Return what ``module:name`` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _installed() -> dict[str, EntryPoint]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    for name in found:
        if name in BUILT_IN:
            raise ConfigError(
                f"entry point {name!r} of {ENTRY_POINTS} ({found[name].value}): headrace has a library of that name; "
                "rename the entry point"
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCurves:
    """The curves of one run, as its library logged them; n points."""

    at: list[int]
    """Where the points are, counted in what :attr:`headrace.libraries.CurveTags.axis` says."""
    reward: list[float]
    """Mean return of recent episodes, as the library averages."""
    length: list[float]


def read_curves(directory: Path, library_name: str) -> LoggedCurves:
    """Return the curves that a library logged below a directory; of several runs there, the newest.

    For runs that were made with the library itself. What ``headrace train`` learned is in ``training.json``.

    Args:
        directory: the log directory, or any above it: rl_games writes to ``summaries``, SB3 to ``PPO_1``, ``PPO_2``, ….
        library_name: whose tags to look for.
    """
    events: Any = require_extra(
        "tensorboard.backend.event_processing.event_accumulator", extra="tensorboard", purpose="reading curves"
    )
    tags = library(library_name).curves
    files = sorted(directory.rglob("*tfevents*"), key=lambda file: (file.stat().st_mtime, file.name), reverse=True)
    seen: set[str] = set()
    for file in files:
        found = events.EventAccumulator(str(file), size_guidance={"scalars": 0})
        found.Reload()
        names = set(found.Tags()["scalars"])
        if {tags.reward, tags.length} <= names:
            reward, length = found.Scalars(tags.reward), found.Scalars(tags.length)
            return LoggedCurves(
                at=[point.step for point in reward],
                reward=[point.value for point in reward],
                length=[point.value for point in length],
            )
        seen |= names
    if not files:
        raise DataError(f"{directory}: expected TensorBoard files of {library_name} below it, got none")
    raise DataError(
        f"{directory}: expected the curve {tags.reward!r} of {library_name}, got {sorted(seen) or 'no curves'}"
    )


def recorded_library(run: Path) -> str:
    """Return the library of the training in a directory, without importing it."""
    path = run / "checkpoint.json"
    if not path.is_file():
        raise DataError(f"{run}: expected the directory of a training, got one without {path.name}")
    return str(read_json(path).get("library"))
