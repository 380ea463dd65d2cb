"""``EnvRecipe``: what an environment is, as a value that can be stored, sent to a worker and made again.

Names of what environments are made of, checked without importing anything heavy.

Overrides: one setting of a task by its path, from Python or from the command line.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib.metadata import entry_points
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, cast, get_args

from headrace._gymnasium_ids import ENTRY, FOREIGN, GYMNASIUM, IDS
from headrace._named import import_module
from headrace.envs.tasks.libero.names import LIBERO, split_name
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.files import read_json, read_text, write_whole

if TYPE_CHECKING:
    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.task import TaskCfg

_LARGEST_YAML = 1 << 20
_MOST_ENTRIES = 100_000
ENTRY_POINTS = "headrace.tasks"
"""Entry points by which installed packages add tasks: ``my-task = "my_package.tasks:MY_TASK"``, a ``TaskEntry``."""


def resolve_source(text: str) -> str:
    """Return the source of a recipe under the name that it is registered by: ``headrace/Ant-v0`` and ``ant-Play`` are
    ``ant``.

    An unknown name raises an error that suggests the nearest. A module in it (``module:task``, ``gym:module:Id-v0``) is
    imported, as is that of an installed package's task; for names of ours and of Gymnasium nothing heavy is.
    """
    if text.startswith(FOREIGN):  # what it has is known over there
        return text
    if text.startswith(LIBERO):
        split_name(text)
        return text
    module, colon, name = text.removeprefix(GYMNASIUM).rpartition(":")
    if colon:
        import_module(module, f"task {text!r}")
    if text.startswith(GYMNASIUM):
        _check_gym_id(name)
        return text
    known = [*IDS.values(), *(point.name for point in entry_points(group=ENTRY_POINTS))]
    # a name that is not ours is that of an installed package, which may register renderers, too, or of this process
    foreign = set(spellings(name)) & (set(known) - set(IDS.values()))
    if colon or "headrace.envs.registry" in sys.modules or foreign:
        from headrace.envs.registry import task_entry

        found = task_entry(text).name
        return f"{module}:{name}" if colon else found
    return match_name(name, known)


def check_told(source: str, whose: str, option: str) -> None:
    """Refuse the source of a file that would import a module, or start a program, which the user did not name.

    Args:
        source: that the file names.
        whose: the file, or what it is, for the error.
        option: how to say it oneself, for the error.
    """
    module = source.removeprefix(GYMNASIUM).rpartition(":")[0]
    if source.startswith(FOREIGN):
        what, advice = "which program is started, or connected to", f"pass it ({option}), as a recipe file for example"
    elif module and module not in sys.modules:
        what, advice = "which module is imported", f"import {module} first, or pass the task ({option} {source})"
    else:
        return
    raise ConfigError(f"{whose} names {source!r}, and a file must not decide {what}; if you trust it, {advice}")


def match_name(name: str, known: list[str]) -> str:
    """Return which of ``known`` a task's name means; an unknown one raises an error that suggests the nearest."""
    found = next((spelled for spelled in spellings(name) if spelled in known), None)
    if found is None:
        import gymnasium

        meant = f"{GYMNASIUM}{name}" if name in gymnasium.registry else re.sub(r"\.(?=\w+$)", ":", name)
        raise UnknownNameError("task", name, known if meant == name else [*known, meant])
    return found


def spellings(name: str) -> list[str]:
    """Return what a task may be called: its name, its Gymnasium id, either with a namespace before or ``-Play`` after
    it."""
    played = re.sub(r"-Play(?=-v\d+$|$)", "", name)
    plain = [name, played, played.rpartition("/")[2]]
    return [*plain, *(IDS[spelled] for spelled in (played, f"headrace/{plain[-1]}") if spelled in IDS)]


def _check_gym_id(name: str) -> None:
    import gymnasium

    try:
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownNameError("Gymnasium environment", name, gymnasium.registry) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"{name!r}: Gymnasium does not accept this id: {error}") from error


_T = TypeVar("_T")


def with_overrides(cfg: _T, overrides: Mapping[str, object]) -> _T:
    """Return a copy of a (nested) dataclass with some settings changed; the checks of the dataclass run again.

    Args:
        cfg: a frozen dataclass, possibly with dataclasses and mappings inside.
        overrides: path → value, for example ``{"episode_length": 50, "rewards.alive.weight": 2.0}``.
    """
    for path, value in overrides.items():
        cfg = cast("_T", _replace_field(cfg, path.split("."), value, path))
    return cfg


_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}
"""What YAML and JSON call them, beside Python's own names."""


def parse_assignments(assignments: Iterable[str], option: str = "--set") -> dict[str, object]:
    """``path=value`` texts from a command line as overrides.

    Values are Python literals, ``true``, ``false`` or ``null`` in any case, or text as it stands.
    """
    parsed: dict[str, object] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(f"{option}: expected path=value, such as episode_length=50, got {assignment!r}")
        if text.lower() in _WORDS:
            parsed[path] = _WORDS[text.lower()]
            continue
        try:
            parsed[path] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            parsed[path] = text
    return parsed


def read_yaml(path: Path, whose: str, form: str = "settings as 'path: value' lines") -> Mapping[object, object]:
    """Return a mapping from a YAML file; ``whose`` names it in errors, ``form`` says what was expected."""
    import yaml

    text = read_text(path.resolve(), limit=_LARGEST_YAML)
    try:
        found: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{whose} {path}: expected YAML, got: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{whose} {path}: expected {form}, got {type(found).__name__}")
    if _count_entries(found, {}) > _MOST_ENTRIES:
        raise DataError(f"{whose} {path}: expected at most {_MOST_ENTRIES:,} entries, got more by its aliases")
    return cast("Mapping[object, object]", found)


def _count_entries(value: object, known: dict[int, int]) -> int:
    """Return how many entries a value has with its aliases written out, without doing that."""
    parts = cast("dict[object, object]", value).values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_ENTRIES  # of one that holds itself
        known[id(value)] = 1 + sum(_count_entries(part, known) for part in cast("Iterable[object]", parts))
    return known[id(value)]


def _replace_field(node: object, path: list[str], value: object, whole: str) -> object:
    name, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        entries = dict(cast("Mapping[str, object]", node))
        if name not in entries:
            raise UnknownNameError(f"setting in {whole!r}:", name, entries)
        entries[name] = (
            _replace_field(entries[name], rest, value, whole) if rest else _fit_value(entries[name], value, (), whole)
        )
        return entries
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        raise ConfigError(f"{whole!r}: {name!r} has no settings below it; it is {node!r}")
    known = [field.name for field in dataclasses.fields(node)]
    if name not in known:
        raise UnknownNameError(f"setting in {whole!r}:", name, known)
    old: object = getattr(node, name)
    hints = _alternatives(node, name)
    choices = typing.get_args(hints[0]) if len(hints) == 1 and typing.get_origin(hints[0]) is typing.Literal else ()
    if choices and value not in choices:
        raise UnknownNameError(f"value of {whole!r}:", str(value), map(str, choices))
    kinds = tuple(typing.get_origin(hint) or hint for hint in hints)
    new = _replace_field(old, rest, value, whole) if rest else _fit_value(old, value, kinds, whole)
    return dataclasses.replace(node, **{name: new})


def _fit_value(old: object, value: object, alternatives: tuple[object, ...], path: str) -> object:
    """``value`` if it can stand in for ``old``.

    It can if it has the same type, if it is an integer where a float is, if both are functions (terms), or
    if the annotation of the setting allows for its type beside that of ``old``, such as None. A list stands for a
    tuple: JSON and YAML have no tuples, and settings have no lists.
    """
    if isinstance(value, list) and (isinstance(old, tuple) or tuple in alternatives):
        value = tuple(cast("list[object]", value))
    if isinstance(old, tuple) and isinstance(value, tuple):
        olds, values = cast("tuple[object, ...]", old), cast("tuple[object, ...]", value)
        pairs = zip(values, olds[: len(values)] + olds[-1:] * (len(values) - len(olds)), strict=bool(olds))
        return tuple(_fit_value(was, new, (), path) for new, was in pairs) if olds else values
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and (isinstance(old, float) or (not isinstance(old, int) and float in alternatives)):
        return float(cast("int", value))
    if type(value) is type(old) or (callable(old) and callable(value)):
        return value
    if any(isinstance(value, kind) for kind in alternatives if isinstance(kind, type)) and not isinstance(value, bool):
        return value
    raise ConfigError(f"{path}: expected {type(old).__name__} like {old!r}, got {type(value).__name__} {value!r}")


def _alternatives(node: object, name: str) -> tuple[object, ...]:
    """Return what the annotation of a dataclass field unites: ``float | None`` → (float, NoneType)."""
    try:
        hint = typing.get_type_hints(type(node)).get(name)
    except NameError:
        # a dataclass whose annotations name types that only a type checker sees
        return ()
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


Autoreset = Literal["same_step", "disabled"]
Executor = Literal["inline", "threads", "processes"]
SimName = Literal["mujoco", "warp", "robosuite", "mujoco-3.3"]
"""The physics: MuJoCo on the CPU, or MuJoCo Warp; of a task of LIBERO also genuine LIBERO on robosuite, or headrace's
plain reference in its MuJoCo, in the interpreter that has them."""
SIMS: tuple[str, ...] = get_args(SimName)
FOREIGN_SIMS = ("robosuite", "mujoco-3.3")
AnyEnv: TypeAlias = "BatchEnv | BridgeEnv"
"""What a recipe makes."""


class EpisodeRules(TypedDict, total=False):
    """Which episodes environments run, and when; each as the argument of :func:`headrace.make` of that name."""

    seed: int
    autoreset: Autoreset
    final_obs: bool
    episode_stride: int | None


class EnvKeywords(TypedDict, total=False):
    """Fields of an :class:`EnvRecipe` that functions take as keywords next to a task; None is as if it were not given.

    Where the task is given as a recipe, that recipe is complete: a keyword with another value is refused.
    """

    num_envs: int | None
    """Environments in the batch (default: the recipe's, else 64; 9 in a view)."""
    seed: int | None
    """Seed of episodes and of everything else that is random (default: the recipe's, else 0)."""
    overrides: Mapping[str, object] | None
    """Settings of the task by path, or arguments of a Gymnasium environment."""
    threads: int | None
    """Physics threads; of a Gymnasium environment, threads that step it (default: the recipe's, else all cores, or one
    thread)."""
    device: str | None
    """Device of the tensors: ``cpu``, or ``cuda`` with ``sim="warp"`` (default: the recipe's, else ``cpu``)."""
    sim: str | None
    """Physics: ``mujoco`` or ``warp`` (default: the recipe's, else ``mujoco``)."""


_MOST_ENVS = 1 << 24
_MOST_THREADS = 1 << 12


@dataclass(frozen=True)
class EnvRecipe:
    """Everything that makes a batch of environments, except the episodes to run in it.

    Picklable, and JSON by :meth:`to_json`. The arguments of :func:`headrace.make` and :func:`headrace.bridge` by name;
    ``env.recipe`` is the recipe of an environment that was made from a name.
    """

    source: str
    """A task name, ``module:NAME`` for a task of your own, ``gym:ID`` for a bridged Gymnasium environment,
    ``entry:my_envs:make`` for one in another interpreter (``python``), or ``tcp://host:port`` for one elsewhere."""
    _: KW_ONLY
    num_envs: int = 1
    seed: int = 0
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    """Task settings by path; of a Gymnasium environment, arguments for ``gymnasium.make``."""
    threads: int | None = None
    """Native physics threads of a task; None for all cores. Refused of a bridged environment, as are device and sim."""
    device: str = "cpu"
    sim: SimName = "mujoco"
    autoreset: Autoreset = "same_step"
    final_obs: bool = True
    episode_stride: int | None = None
    """From an environment's episode id to its next one; None for ``num_envs``."""
    executor: Executor = "inline"
    """What steps bridged environments; refused of a task, as is workers."""
    workers: int | None = None
    """Threads or processes of the executor; None for one per core."""
    python: str | None = None
    """The interpreter of ``entry:…``."""
    timeout: float = 300.0
    """Seconds that a call to another interpreter or machine may take, making its environments included."""

    def __post_init__(self) -> None:
        for name, kind in (("source", str), ("overrides", Mapping), ("device", str), ("final_obs", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name}: expected a {kind.__name__}, got {getattr(self, name)!r}")
        check_count("num_envs", self.num_envs, most=_MOST_ENVS)
        for name, most in (("threads", _MOST_THREADS), ("workers", _MOST_THREADS), ("episode_stride", None)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), most=most)
        check_autoreset(self.autoreset)
        if (self.python is not None) != self.source.startswith(ENTRY):
            raise ConfigError(
                f"python: expected an interpreter with a source {ENTRY}module:name, and with no other, got "
                f"{self.python!r} with {self.source!r}; a recipe file says both (python: python for that on the PATH)"
            )
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:  # pyright: ignore[reportUnnecessaryIsInstance]  # files say anything
            raise ConfigError(f"timeout: expected more than 0 seconds, got {self.timeout!r}")
        if self.timeout != _USUAL["timeout"] and not self.source.startswith(FOREIGN):
            raise ConfigError(f"timeout: expected none with {self.source!r}, which is made in this process")
        for name, known in (("sim", SIMS), ("executor", get_args(Executor))):
            if getattr(self, name) not in known:
                raise UnknownNameError(name, getattr(self, name), known)
        if self.sim in FOREIGN_SIMS and not self.source.startswith(LIBERO):
            raise ConfigError(f"sim: expected a task of LIBERO with {self.sim!r}, got {self.source!r}")
        other = "a bridged environment" if self.bridged else "a task"
        hint = (
            "it brings its own physics, on the CPU; executor= and workers= say what steps it"
            if self.bridged
            else "threads= says what steps it"
        )
        for name in ("threads", "device", "sim") if self.bridged else ("executor", "workers"):
            if getattr(self, name) != _USUAL[name]:
                raise ConfigError(f"{name}: expected none with {other}, got {getattr(self, name)!r}; {hint}")
        if self.executor != "inline" and self.bridged and not self.source.startswith(GYMNASIUM):
            raise ConfigError(
                f"executor: expected none with {self.source!r}, whose environments are stepped where they are, got "
                f"{self.executor!r}"
            )
        object.__setattr__(self, "overrides", dict(self.overrides))
        object.__setattr__(self, "seed", check_seed(self.seed))

    def __eq__(self, other: object) -> bool:
        """Return whether every field is the same.

        A list in overrides, which JSON makes of a tuple, equals that tuple.
        """
        return isinstance(other, EnvRecipe) and all(
            _without_lists(getattr(self, entry.name)) == _without_lists(getattr(other, entry.name))
            for entry in dataclasses.fields(self)
        )

    @classmethod
    def of(cls, source: str | EnvRecipe, default_envs: int = 1, **changes: Any) -> EnvRecipe:
        """Return the recipe of a name, a recipe file or a recipe, with some fields changed; its source exists.

        A name and a recipe file take every change; a recipe is complete, so that a change to another value is refused.

        Args:
            source: a task name, another source, a recipe, or the name of a recipe file.
            default_envs: environments in the batch of a name.
            **changes: fields of the recipe; None leaves a field as it is. ``overrides`` are added to those of a recipe
                file; ``threads`` of a bridged environment step it.
        """
        changes = {name: value for name, value in changes.items() if value is not None}
        if isinstance(source, EnvRecipe):
            for name, value in changes.items():
                if source.replace(**{name: value}) != source:
                    raise ConfigError(
                        f"{name}: expected that of the recipe, {getattr(source, name)!r}, got {value!r}; "
                        f"use recipe.replace({name}=…)"
                    )
            return source.resolve()
        named = cls.load(source) if is_recipe_file(source) else cls(source, num_envs=default_envs)
        threads = changes.pop("threads", None) if named.bridged else None
        if threads is not None and (threads != 1 or named.workers is not None):
            changes["workers"] = threads
            if not named.source.startswith(FOREIGN) and named.executor == "inline":
                changes["executor"] = "threads"
        if "overrides" in changes:
            changes["overrides"] = {**named.overrides, **changes["overrides"]}
        return named.replace(**changes).resolve()

    @property
    def bridged(self) -> bool:
        """Whether it is an environment over a bridge, not a task of ours."""
        return self.source.startswith((GYMNASIUM, *FOREIGN))

    @property
    def maker(self) -> str:
        """The module that makes the environments; importing it takes most of the time before they are made."""
        return "headrace.bridges.make" if self.bridged else "headrace.envs.registry"

    def resolve(self) -> EnvRecipe:
        """Return the same with the name that the source is registered by.

        An unknown source is refused with a suggestion.
        """
        return self.replace(source=resolve_source(self.source))

    def cfg(self) -> TaskCfg | None:
        """Return the settings of the task, with the overrides, checked; None of a bridged environment."""
        if self.bridged:
            return None
        from headrace.envs.registry import task_cfg

        return task_cfg(self.source, self.overrides)

    def identity(self) -> dict[str, Any]:
        """Return what decides an episode beside its seed and id, as JSON that :meth:`from_json` reads.

        The source with its interpreter, its overrides and the physics, as far as they are not as usual; not how many
        environments there are, nor what steps them.
        """
        said = self.to_json()
        names = ("source", "overrides", "sim", "python")
        return {name: said[name] for name in names if said[name] not in ({}, None, _USUAL["sim"])}

    def make(self, **changes: Any) -> AnyEnv:
        """Make the environments, with some fields of the recipe changed: ``recipe.make(num_envs=1)``."""
        recipe = self.replace(**changes)
        if recipe.sim in FOREIGN_SIMS:
            from headrace.bridges.libero import make_libero

            return make_libero(recipe)
        names = ["num_envs", "seed", "autoreset", "final_obs", "episode_stride"]
        names += ["workers"] if recipe.bridged else ["threads", "device", "sim", "overrides"]
        shared: dict[str, Any] = {name: getattr(recipe, name) for name in names}
        if not recipe.bridged:
            from headrace.envs.registry import make

            return make(recipe.source, **shared)
        from headrace.bridges.make import bridge

        where: dict[str, Any] = {"source": recipe.source.removeprefix(GYMNASIUM), "executor": recipe.executor}
        if recipe.python is not None:
            where = {"python": recipe.python, "entry": recipe.source.removeprefix(ENTRY), "timeout": recipe.timeout}
        elif recipe.source.startswith(FOREIGN):
            where = {"address": recipe.source.split(","), "timeout": recipe.timeout}
        return bridge(**where, env_kwargs=recipe.overrides, **shared)

    def replace(self, **changes: Any) -> EnvRecipe:
        """Return a copy with some fields changed."""
        known = [entry.name for entry in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise UnknownNameError("field of EnvRecipe", name, known)
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, with every field; :meth:`from_json` reads it back. Tuples in overrides become lists."""
        plain = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        try:
            return json.loads(json.dumps(plain, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"EnvRecipe: expected overrides that JSON can hold, got {self.overrides!r}") from error

    @classmethod
    def from_json(cls, data: object) -> EnvRecipe:
        """Read the JSON form."""
        known = [entry.name for entry in dataclasses.fields(cls)]
        if not isinstance(data, Mapping) or "source" not in data:
            raise DataError(f"recipe: expected an object with source and any of {known[1:]}, got {data!r}")
        unknown = sorted(set(map(str, data)) - set(known))  # pyright: ignore[reportUnknownArgumentType]  # JSON's keys
        if unknown:
            raise DataError(f"recipe: {UnknownNameError('field', unknown[0], known)}")
        try:
            return cls(**data)  # pyright: ignore[reportUnknownArgumentType]  # __post_init__ checks the values
        except ConfigError as error:
            raise DataError(f"recipe: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the JSON form to a file, as far as it is not as usual; commands take the file as their TASK."""
        said = {name: value for name, value in self.to_json().items() if name == "source" or value != _EMPTY[name]}
        write_whole(Path(path), json.dumps(said, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> EnvRecipe:
        """Read a recipe file: the JSON form, or the same fields in YAML (``.yaml``, ``.yml``)."""
        file = Path(path)
        if file.suffix == ".json":
            content: object = read_json(file)
        else:
            content = read_yaml(file, "recipe")
        try:
            return cls.from_json(content)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error


_FILES = (".json", ".yaml", ".yml")


def is_recipe_file(source: str) -> bool:
    """Return whether a source is the name of a recipe file; a name that could be nothing else must be there."""
    if not source.endswith(_FILES) or source.startswith((GYMNASIUM, *FOREIGN)):
        return False
    if not Path(source).is_file():
        raise ConfigError(f"recipe: expected a file, got {source!r}: there is none")
    return True


_USUAL = {entry.name: entry.default for entry in dataclasses.fields(EnvRecipe)}
_EMPTY = _USUAL | {"overrides": dict[str, object]()}


def _without_lists(value: object) -> object:
    """``value`` with every list in it as a tuple."""
    if isinstance(value, Mapping):
        return {name: _without_lists(part) for name, part in cast("Mapping[str, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return tuple(_without_lists(part) for part in cast("list[object]", value))
    return value


def check_count(name: str, value: object, *, most: int | None = None) -> None:
    """Refuse what is not a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise ConfigError(f"{name}: expected at least 1, got {value}")
    if most is not None and value > most:
        raise ConfigError(f"{name}: expected at most {most:,}, got {value:,}; memory is allocated for all of them")


def check_seed(seed: object) -> int:
    """Return a seed as a Python integer; refuse what is not one number of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**63:
        raise ConfigError(
            f"seed (--seed): expected a number of 64 bits, got {seed!r}; pass 0, 1, 2, …; a suite has several seeds"
        )
    return int(seed)


def check_autoreset(autoreset: str) -> None:
    """Refuse unknown modes."""
    if autoreset not in ("same_step", "disabled"):
        raise UnknownNameError("autoreset mode", autoreset, ("same_step", "disabled"))
