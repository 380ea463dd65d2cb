"""``bridge``: any Gymnasium environment under our contract."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import SyncVectorEnv, VectorEnv

from headrace._gymnasium_ids import BATCHED, ENTRY, ENVPOOL, GYMNASIUM, PLAYGROUND
from headrace._named import import_module
from headrace.bridges._batched import RowBackend, RowSimulator
from headrace.bridges._exchange import Array, Exchange, ExchangeLayout, as_action_space, exchange_layout, idle_action
from headrace.bridges._foreign import ForeignSource, foreign_backend
from headrace.bridges._group import AnyEnv, EnvFactory, EnvGroup
from headrace.bridges._vector import AnyVectorEnv, Restore, Save, VectorBackend, resets_some
from headrace.bridges._workers import process_backend
from headrace.bridges.bridge_env import BridgeEnv, environment_name
from headrace.bridges.executors import Backend, InlineBackend, ThreadBackend, available_cores
from headrace.envs.recipe import Autoreset, EnvRecipe, EpisodeRules, Executor, check_autoreset, check_count
from headrace.errors import ConfigError, DtypeError, UnknownNameError

_EXECUTORS = ("inline", "threads", "processes")
# a pool with a batch_size of its own answers for rows that were not requested
_BRIDGES_OWN = ("batch_size", "env_type", "num_envs", "seed", "task", "task_id")


def bridge(
    source: str | Sequence[EnvFactory] | AnyVectorEnv | RowSimulator | None = None,
    num_envs: int | None = None,
    *,
    seed: int = 0,
    autoreset: Autoreset = "same_step",
    final_obs: bool = True,
    executor: Executor = "inline",
    workers: int | None = None,
    env_kwargs: Mapping[str, object] | None = None,
    save: Save | None = None,
    restore: Restore | None = None,
    hold_action: Array | None = None,
    episode_stride: int | None = None,
    entry: str | None = None,
    python: str | os.PathLike[str] | None = None,
    address: str | Sequence[str] | None = None,
    timeout: float = 300.0,
) -> BridgeEnv:
    """Give Gymnasium environments the contract of :func:`headrace.make`: tensors, episode ids, suspend, resume.

    Args:
        source: a Gymnasium id, or ``module:ID`` of one that importing the module registers; a list of functions that
            each make one environment; or a vector environment, which the bridge takes over and closes. A
            ``SyncVectorEnv`` is taken apart: its single environments are used. Or a batched simulator: an object of the
            row protocol (:class:`headrace.bridges.RowSimulator`), taken over likewise, ``playground:NAME`` of
            MuJoCo Playground, or ``envpool:ID``. None with ``python`` or ``address``.
        num_envs: how many environments, N; with an id or another interpreter only.
        seed: with an episode's id, all that its randomness depends on.
        autoreset: ``same_step`` starts the next episode in the step that ended one; with ``disabled`` an ended
            environment is inactive until its reset.
        final_obs: False for callers that never bootstrap.
        executor: who steps single environments: this thread (``inline``), a pool of ``threads``, or spawned worker
            ``processes`` with shared memory. Results do not depend on it.
        workers: how many threads or processes; None for one per core.
        env_kwargs: further arguments for ``gymnasium.make`` or the entry.
        save: ``save(vector_env, i)`` gives the whole state of environment i of a vector environment.
        restore: ``restore(vector_env, i, saved)`` puts it back. With both, suspended environments are stepped, then put
            back (``fidelity == "restore"``); without, they are held (``"hold"``).
        hold_action: what suspended environments of a vector environment play; None for zeros or the nearest allowed.
        episode_stride: from an environment's episode id to its next one; None for ``num_envs``.
        entry: ``module:name`` or ``file.py:name`` of a function that makes one environment in another interpreter.
        python: that interpreter, ``…/bin/python``: Python 3.8 or newer with numpy, and no headrace.
        address: ``tcp://host:port`` (one or several) where ``child.py --listen`` runs, instead of ``python``; the token
            comes from the environment variable ``HEADRACE_TOKEN``.
        timeout: seconds that a call to another interpreter may take, making the environments included.
    """
    check_autoreset(autoreset)
    if not isinstance(final_obs, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        raise ConfigError(f"final_obs: expected True or False, got {final_obs!r}")
    episodes = EpisodeRules(seed=seed, autoreset=autoreset, final_obs=final_obs, episode_stride=episode_stride)
    if python is not None or address is not None or entry is not None:
        if source is not None or save is not None or restore is not None or hold_action is not None:
            raise ConfigError(
                "bridge: expected no source, save, restore or hold_action with another interpreter, whose environments "
                "come from its entry"
            )
        if executor != "inline":
            raise ConfigError(
                f"executor: expected none with another interpreter, which steps its environments itself, got "
                f"{executor!r}; workers= says how many there are"
            )
        python = os.fspath(python) if isinstance(python, os.PathLike) else python
        return _foreign_bridge(
            ForeignSource(python=python, address=address, entry=entry, kwargs=env_kwargs or {}, timeout=timeout),
            1 if num_envs is None else num_envs,
            workers=workers,
            **episodes,
        )
    batched = isinstance(source, str) and source.startswith(BATCHED)
    if batched or hasattr(source, "reset_rows"):
        others = {"save": save, "restore": restore, "hold_action": hold_action}
        _refuse_settings(source, num_envs, batched, executor, workers, env_kwargs, **others)
        simulator = cast("str | RowSimulator", source)
        return _row_bridge(simulator, 1 if num_envs is None else num_envs, env_kwargs or {}, **episodes)
    source = cast("str | Sequence[EnvFactory] | AnyVectorEnv | None", source)
    if source is None:
        raise ConfigError("bridge: expected a source, or python= and entry= of another interpreter, got neither")
    if executor not in _EXECUTORS:
        raise UnknownNameError("executor", executor, _EXECUTORS)
    if workers is not None and (workers < 1 or executor == "inline"):
        raise ConfigError(f'workers: expected at least 1, with executor="threads" or "processes", got {workers}')
    if not isinstance(source, str) and (num_envs is not None or env_kwargs is not None):
        raise ConfigError(
            f"num_envs, env_kwargs: expected none with {type(source).__name__}, which has its own, got "
            f"{num_envs=}, {env_kwargs=}; leave them out, or pass a Gymnasium id"
        )
    taken_apart = isinstance(source, SyncVectorEnv)
    if (save is None) != (restore is None):
        raise ConfigError(
            f"save and restore: expected both or neither, got only {'save' if restore is None else 'restore'}; what "
            "one takes the other puts back"
        )
    if (save is not None or hold_action is not None) and (taken_apart or not isinstance(source, VectorEnv)):
        raise ConfigError(
            "save, restore and hold_action are for vector environments that step all or none; "
            "the environments of this source are skipped when suspended"
        )
    if isinstance(source, VectorEnv) and executor != "inline":
        raise ConfigError(f"executor: expected none with a vector environment, which steps itself, got {executor!r}")

    if isinstance(source, VectorEnv):
        probe: AnyEnv | AnyVectorEnv = source
        name = environment_name(source.envs[0]) if taken_apart else environment_name(source)
        spaces = source.single_observation_space, source.single_action_space
        layout = exchange_layout(source.num_envs, *spaces)
        backend = _vector_backend(source, layout, autoreset, final_obs, save, restore, hold_action)
    else:
        factories = _factories(source, num_envs, env_kwargs)
        # a worker's environments are out of sight: make one here to see its spaces
        try:
            probe = factories[0]()
        except TypeError as error:
            if env_kwargs is None:
                raise
            raise ConfigError(f"bridge: {source} does not take {dict(env_kwargs)}: {error}") from error
        name = environment_name(probe)
        spaces = probe.observation_space, probe.action_space
        layout = exchange_layout(len(factories), *spaces)
        backend = _native_backend(factories, probe, layout, executor, workers)
    env = _owning(
        backend,
        not isinstance(source, VectorEnv),
        name=name,
        observation_space=spaces[0],
        action_space=spaces[1],
        render_mode=probe.render_mode,
        **episodes,
    )
    if isinstance(source, str):
        env.recipe = EnvRecipe(
            f"{GYMNASIUM}{source}",
            num_envs=env.num_envs,
            overrides=env_kwargs or {},
            executor=executor,
            workers=workers,
            **episodes,
        )
    return env


def _refuse_settings(
    source: object,
    num_envs: int | None,
    named: bool,
    executor: str,
    workers: int | None,
    env_kwargs: Mapping[str, object] | None,
    **others: object,
) -> None:
    given = [name for name, value in others.items() if value is not None]
    given += [name for name, value in (("executor", executor), ("workers", workers)) if value not in ("inline", None)]
    if not named:
        given += [name for name, value in (("num_envs", num_envs), ("env_kwargs", env_kwargs)) if value is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: expected none with a batched simulator ({source!r:.80}), which steps all of its rows "
            "itself; leave them out"
        )


def _foreign_bridge(
    source: ForeignSource, num_envs: int, *, workers: int | None, **episodes: Unpack[EpisodeRules]
) -> BridgeEnv:
    check_count("num_envs", num_envs)
    if workers is not None:
        check_count("workers", workers)
    backend, hello = foreign_backend(source, num_envs, available_cores() if workers is None else workers)
    env = _owning(
        backend,
        True,
        name=hello.name,
        observation_space=hello.observation_space,
        action_space=hello.action_space,
        render_mode=hello.render_mode,
        **episodes,
    )
    env.recipe = EnvRecipe(
        ",".join(source.addresses) or f"{ENTRY}{source.entry}",
        python=source.python,
        num_envs=num_envs,
        overrides=source.kwargs,
        workers=workers,
        timeout=source.timeout,
        **episodes,
    )
    return env


def _row_bridge(
    source: str | RowSimulator, num_envs: int, env_kwargs: Mapping[str, object], **episodes: Unpack[EpisodeRules]
) -> BridgeEnv:
    """Put the contract on a batched simulator, which the environment closes."""
    named = isinstance(source, str)
    sim = _named_simulator(source, num_envs, episodes.get("seed", 0), env_kwargs) if named else source
    try:
        backend = RowBackend(sim)
    except BaseException:  # also Ctrl-C; raised again
        if named and (close := getattr(sim, "close", None)) is not None:
            close()
        raise
    env = _owning(
        backend,
        named,
        name=getattr(sim, "name", None) or type(sim).__name__,
        observation_space=backend.observation_space,
        action_space=backend.action_space,
        render_mode="rgb_array" if hasattr(sim, "render") else None,
        **episodes,
    )
    if named:
        env.recipe = EnvRecipe(source, num_envs=num_envs, overrides=env_kwargs, **episodes)
    return env


def _named_simulator(source: str, num_envs: int, seed: int, env_kwargs: Mapping[str, object]) -> RowSimulator:
    check_count("num_envs", num_envs)
    if taken := [name for name in env_kwargs if name in _BRIDGES_OWN]:
        raise ConfigError(
            f"env_kwargs of {source}: expected none of {', '.join(_BRIDGES_OWN)}, which the bridge sets itself, got "
            f"{', '.join(taken)}; num_envs= and seed= are arguments of bridge"
        )
    if not isinstance(env_kwargs.get("instruction", ""), str):
        raise ConfigError(f"instruction: expected a text, got {env_kwargs['instruction']!r}")
    if source.startswith(PLAYGROUND):
        from headrace.bridges._batched import PlaygroundRows

        known = [name for name in inspect.signature(PlaygroundRows).parameters if name not in ("task", "num_envs")]
        for name in env_kwargs:
            if name not in known:
                raise UnknownNameError(f"setting (env_kwargs) of {source}", name, known)
        return PlaygroundRows(source.removeprefix(PLAYGROUND), num_envs, **env_kwargs)  # pyright: ignore[reportArgumentType]  # the user's
    from headrace.bridges._batched import EnvPoolRows

    return EnvPoolRows(source.removeprefix(ENVPOOL), num_envs, seed=seed, **env_kwargs)  # pyright: ignore[reportArgumentType]  # the user's


def _owning(backend: Backend, made_here: bool, **settings: Any) -> BridgeEnv:
    """Return the environment over a backend; settings that it refuses leave no process behind."""
    try:
        return BridgeEnv(backend, **settings)
    except BaseException:  # also Ctrl-C; raised again
        if made_here:
            backend.close()
        raise


def _factories(
    source: str | Sequence[EnvFactory], num_envs: int | None, env_kwargs: Mapping[str, object] | None
) -> list[EnvFactory]:
    if isinstance(source, str):
        count = 1 if num_envs is None else num_envs
        check_count("num_envs", count)
        module, _, name = source.rpartition(":")
        if module:  # gymnasium.make imports it again, in whichever process makes the environment
            import_module(module, f"bridge({source!r})")
        try:
            gymnasium.spec(name)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ConfigError(f"bridge: expected the id of a Gymnasium environment, got {source!r}: {error}") from error
        _check_arguments(name, env_kwargs or {})
        one = cast("EnvFactory", functools.partial(gymnasium.make, source, **(env_kwargs or {})))
        return [one] * count
    factories = [] if callable(source) else list(source)
    if not factories or not all(callable(factory) for factory in factories):
        raise DtypeError(
            "bridge: expected a Gymnasium id, a vector environment, or a list of functions that make environments, "
            f"got {source!r}; wrap each environment: [lambda: MyEnv() for _ in range(8)]"
        )
    return factories


def _check_arguments(name: str, env_kwargs: Mapping[str, object]) -> None:
    """Refuse an argument that neither ``gymnasium.make`` nor the environment takes, with a suggestion."""
    spec = gymnasium.spec(name)
    entry = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if entry is None or not env_kwargs:
        return
    taken = {**inspect.signature(gymnasium.make).parameters, **inspect.signature(entry).parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(entry).parameters.values()):
        return
    known = [name for name, parameter in taken.items() if parameter.kind is not parameter.VAR_KEYWORD]
    for argument in env_kwargs:
        if argument not in known:
            raise UnknownNameError(f"argument of {name}", argument, [*known, *spec.kwargs])


def _native_backend(
    factories: list[EnvFactory], probe: AnyEnv, layout: ExchangeLayout, executor: Executor, workers: int | None
) -> Backend:
    count = min(len(factories), available_cores() if workers is None else workers)
    if executor == "processes":
        probe.close()
        return process_backend(factories, layout, probe.action_space, count)
    exchange = Exchange(layout)
    envs = [probe]
    try:
        envs.extend(factory() for factory in factories[1:])
        group = EnvGroup(envs, exchange, range(len(envs)), probe.action_space)
    except BaseException:  # also Ctrl-C; raised again
        for env in envs:
            env.close()
        raise
    return InlineBackend(group, exchange) if executor == "inline" else ThreadBackend(group, exchange, count)


def _vector_backend(
    source: AnyVectorEnv,
    layout: ExchangeLayout,
    autoreset: Autoreset,
    final_obs: bool,
    save: Save | None,
    restore: Restore | None,
    hold_action: Array | None,
) -> Backend:
    exchange = Exchange(layout)
    if isinstance(source, SyncVectorEnv):
        group = EnvGroup(source.envs, exchange, range(source.num_envs), source.single_action_space)
        return InlineBackend(group, exchange, on_close=source.close)
    if autoreset == "disabled" and not resets_some(source):
        raise ConfigError(
            f'autoreset="disabled": {source} resets all of its environments or none, so an ended one could never start '
            "again alone; use same_step"
        )
    space = as_action_space(source.single_action_space)
    held = idle_action(space) if hold_action is None else np.asarray(hold_action, dtype=space.dtype)
    if held.shape != space.shape or not space.contains(held[()] if held.shape == () else held):
        raise ConfigError(f"hold_action: expected one action of {space}, got {hold_action!r}")
    return VectorBackend(source, exchange, held, save=save, restore=restore, wants_final_obs=final_obs)
