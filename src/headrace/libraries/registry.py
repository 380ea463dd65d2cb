"""What an RL library is to headrace, and the libraries that there are. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

from headrace.errors import ConfigError, DataError, HeadraceError, UnknownNameError, UnsupportedError, require_extra
from headrace.files import read_json

if TYPE_CHECKING:
    from headrace.learning.actor_critic import GroupKind, MemoryKind, ReadGroups
    from headrace.learning.ppo import PPOCfg
    from headrace.libraries.learner import AnyEnv, Learner

ENTRY_POINTS = "headrace.libraries"
"""The group of entry points by which another package adds a library: name → ``module:SPEC``."""


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
    marks: frozenset[str]
    """Entries by which its checkpoint files are recognized: keys of a torch file, else members of a zip archive."""
    suffix: str = ".pt"
    """Of its checkpoint files."""
    reads: Mapping[MemoryKind, frozenset[GroupKind]] = field(default_factory=lambda: {"none": EVERY_GROUP})
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
    agent: str | None = None
    """What ``--agent`` may hold, in words; the learner is then called with it as third argument. None for nothing."""
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


BUILT_IN = {
    spec.name: spec
    for spec in (
        LibrarySpec(
            name="headrace",
            distribution="headrace",
            learner="headrace.libraries.learner:OwnLearner",
            marks=frozenset({"format", "network", "state_dict"}),
            loader="headrace.libraries.learner:read_policy",
            reads={"none": EVERY_GROUP, "gru": EVERY_GROUP},
            cannot_honor={"reward_scale": "it normalizes value targets instead, whatever the scale of the rewards"},
            differences=(
                "the learning rate adapts to the KL divergence of an epoch; learning_rate is where it begins",
                "minibatches are whole slices of environments, not shuffled steps",
                "value targets are normalized; rewards are not scaled",
                "images go through a layer of image_features before the hidden layers",
            ),
        ),
        LibrarySpec(
            name="rl_games",
            distribution="rl-games",
            module="rl_games",
            extra="rl-games",
            learner="headrace.libraries.rl_games:RlGamesLearner",
            suffix=".pth",
            marks=frozenset({"model", "optimizer", "epoch"}),
            reads={"none": EVERY_GROUP, "gru": EVERY_GROUP - {"image"}},
            agent="the params of its own file, with a2c_continuous",
            cannot_honor=NOT_OURS,
            differences=(
                "a truncated episode bootstraps from the value of the last observation but one",
                "minibatches are the same runs of steps in each epoch, not shuffled",
            ),
        ),
        LibrarySpec(
            name="rsl_rl",
            distribution="rsl-rl-lib",
            module="rsl_rl",
            extra="rsl-rl",
            learner="headrace.libraries.rsl_rl:RslRlLearner",
            marks=frozenset({"actor_state_dict", "critic_state_dict"}),
            meta_key=("infos", "headrace"),
            reads={"none": EVERY_GROUP, "gru": EVERY_GROUP - {"image"}},
            agent="the configuration of its OnPolicyRunner",
            cannot_honor=NOT_OURS,
            differences=(
                "a truncated episode bootstraps from the value of the last observation but one",
                "max_grad_norm holds for actor and critic separately",
            ),
        ),
        LibrarySpec(
            name="sb3",
            distribution="stable-baselines3",
            module="stable_baselines3",
            extra="sb3",
            learner="headrace.libraries.sb3._learner:Sb3Learner",
            suffix=".zip",
            marks=frozenset({"policy.pth", "_stable_baselines3_version"}),
            agent="keyword arguments of PPO, or of SAC, TD3 or DQN with algorithm: SAC, TD3 or DQN",
            cannot_honor=NOT_OURS,
            differences=("advantages are normalized per minibatch", "no recurrent policies"),
        ),
        LibrarySpec(
            name="skrl",
            distribution="skrl",
            module="skrl",
            extra="skrl",
            learner="headrace.libraries.skrl:SkrlLearner",
            marks=frozenset({"policy"}),
            agent="the configuration of its Runner, for PPO or SAC",
            cannot_honor=NOT_OURS,
            differences=("no recurrent policies",),
        ),
    )
}
"""The libraries that there are without further packages. ``headrace`` is our own small learner."""
_NUMBER = re.compile(r"[+-]?\d+\.?\d*[eE][+-]?\d+")
_PLAIN = re.compile(r"(torch\.)?(nn\.)?[\w\- /]*|concatenate\(\[[A-Z_, ]+\]\)|tanh\([A-Z_]+\)")
_KINDS: dict[GroupKind, str] = {
    "vector": "vectors",
    "image": "images",
    "several": "more than one group",
    "critic": "groups of the critic alone",
}


def library_names() -> list[str]:
    """Return what ``--library`` takes: the built-in libraries, and those of installed packages."""
    return sorted({**BUILT_IN, **_find_installed()})


def libraries() -> list[LibrarySpec]:
    """Every library that there is, installed or not."""
    return [library(name) for name in library_names()]


@cache
def library(name: str) -> LibrarySpec:
    """Return a library by name; an unknown one raises an error that suggests the nearest."""
    added = _find_installed()
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name not in added:
        raise UnknownNameError("library", name, library_names())
    found: object = added[name].load()
    if not isinstance(found, LibrarySpec) or found.name != name:
        got = f"one named {found.name!r}" if isinstance(found, LibrarySpec) else type(found).__name__
        raise ConfigError(f"entry point {name!r} of {ENTRY_POINTS}: expected a LibrarySpec of that name, got {got}")
    return found


def read_agent(agent: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a library's own configuration, as JSON has it: of a YAML or JSON file, or of a dictionary."""
    if isinstance(agent, (str, Path)):
        from headrace.envs.recipe import read_yaml

        return _numbers(dict(read_yaml(Path(agent), "--agent", "a library's configuration")))
    try:
        return cast("dict[str, Any]", json.loads(json.dumps(agent, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"agent: expected numbers, words, lists and dictionaries, as in a file: {error}") from error


def _numbers(value: Any) -> Any:
    """Return numbers for words such as 3e-4, which YAML reads as words."""
    if isinstance(value, dict):
        return {str(name): _numbers(each) for name, each in cast("dict[object, object]", value).items()}
    if isinstance(value, list):
        return [_numbers(each) for each in cast("list[object]", value)]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def check_agent(agent: Mapping[str, Any], where: object) -> None:
    """Refuse names of code in a configuration from another author's file: libraries import and run what it names.

    Names of the library's own, and of layers of ``torch.nn``, are not refused.
    """
    for name, value in agent.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                check_agent(cast("dict[str, Any]", each), where)
            elif isinstance(each, list):
                check_agent({name: each}, where)
            elif isinstance(each, str) and not _PLAIN.fullmatch(each):
                raise DataError(
                    f"{where}: its agent configuration has {name}={each!r}, which can execute arbitrary code. If you "
                    "trust its author, pass --trust-checkpoint (trust=True)"
                )


def make_learner(
    name: str, env: AnyEnv, settings: PPOCfg | None = None, agent: Mapping[str, Any] | None = None
) -> Learner:
    """Return a library's PPO over an environment. What the library cannot read or honor is refused.

    With ``agent``, the library's own configuration as :func:`read_agent` returns it, only ``seed``, ``actor_groups``
    and ``critic_groups`` of the settings apply, and the steps of an iteration are those of the configuration.

    Make and use it inside :func:`headrace.libraries.library_run`: libraries draw from torch's, numpy's and Python's
    global random streams, and change global settings.
    """
    from headrace.learning.actor_critic import read_groups
    from headrace.learning.ppo import PPOCfg

    spec, settings = library(name), settings or PPOCfg()
    spec.require()
    if agent is not None and spec.agent is None:
        takes = "; ".join(f"{each.name} takes {each.agent}" for each in libraries() if each.agent is not None)
        raise ConfigError(f"agent (--agent): {name} takes no configuration of its own here, only ppo (--ppo); {takes}")
    spec.check_settings(settings)
    groups = read_groups(env.single_observation_space, settings.actor_groups, settings.critic_groups)
    spec.check_groups(groups, settings.memory)
    build = cast("Callable[..., Learner]", resolve_name(spec.learner))
    if agent is None:
        return build(env, settings)
    try:
        # libraries change what they are given
        learner = build(env, replace(settings, reward_scale=1.0), read_agent(dict(agent)))
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError, ImportError) as error:
        if isinstance(error, HeadraceError):
            raise
        raise ConfigError(f"agent (--agent): {name} refused it: {type(error).__name__}: {error}") from error
    learner.agent_cfg = dict(agent)
    return learner


def _find_installed() -> dict[str, EntryPoint]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    for name in found:
        if name in BUILT_IN:
            raise ConfigError(
                f"entry point {name!r} of {ENTRY_POINTS} ({found[name].value}): headrace has a library of that name; "
                "rename the entry point"
            )
    return found


def read_library(run: Path) -> str:
    """Return the library of the training in a directory, without importing it."""
    path = run / "checkpoint.json"
    if not path.is_file():
        raise DataError(f"{run}: expected the directory of a training, got one without {path.name}")
    return str(read_json(path).get("library"))
