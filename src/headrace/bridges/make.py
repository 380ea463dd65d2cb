"""``bridge``: any Gymnasium environment under our contract."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Unpack, cast

import gymnasium

from headrace._gymnasium_ids import ENTRY, GYMNASIUM
from headrace._kernels.threads import available_cores
from headrace._named import import_module
from headrace.bridges._batched import RowBackend, RowSimulator
from headrace.bridges._exchange import Exchange, exchange_layout
from headrace.bridges._workers import ForeignSource, Hello, foreign_backend, process_backend
from headrace.bridges.bridge_env import BridgeEnv, name_environment
from headrace.bridges.executors import (
    AnyEnv,
    Backend,
    EnvFactory,
    EnvGroup,
    InlineBackend,
    ThreadBackend,
)
from headrace.envs.recipe import Autoreset, EnvRecipe, EpisodeRules, Executor, check_autoreset, check_count
from headrace.errors import ConfigError, DtypeError, UnknownNameError

_EXECUTORS = ("inline", "threads", "processes")


def bridge(
    source: str | Sequence[EnvFactory] | RowSimulator | None = None,
    num_envs: int | None = None,
    *,
    executor: Executor = "inline",
    workers: int | None = None,
    env_kwargs: Mapping[str, object] | None = None,
    entry: str | None = None,
    python: str | os.PathLike[str] | None = None,
    address: str | Sequence[str] | None = None,
    timeout: float = 300.0,
    **episodes: Unpack[EpisodeRules],
) -> BridgeEnv:
    """Give Gymnasium environments the contract of :func:`headrace.make`: tensors, episode ids, suspend, resume.

    Args:
        source: a Gymnasium id, or ``module:ID`` of one that importing the module registers; a list of functions that
            each make one environment; or a batched simulator: an object of the row protocol
            (:class:`headrace.bridges.RowSimulator`), which the bridge takes over and closes. None with ``python`` or
            ``address``.
        num_envs: how many environments, N; with an id or another interpreter only.
        executor: who steps single environments: this thread (``inline``), a pool of ``threads``, or worker
            ``processes`` with shared memory. Results do not depend on it.
        workers: how many threads or processes; None for one per core.
        env_kwargs: further arguments for ``gymnasium.make`` or the entry.
        entry: ``module:name`` or ``file.py:name`` of a function that makes one environment in another interpreter.
        python: that interpreter, ``…/bin/python``: Python 3.8 or newer with numpy, and no headrace.
        address: ``tcp://host:port`` (one or several) where ``child.py --listen`` runs, instead of ``python``; the token
            comes from the environment variable ``HEADRACE_TOKEN``.
        timeout: seconds that a call to another process may take, making the environments included.
        **episodes: ``seed``, ``autoreset``, ``final_obs`` and ``episode_stride``, as :func:`headrace.make` takes them.
    """
    episodes = _check_rules(**episodes)
    if python is not None or address is not None or entry is not None:
        if source is not None:
            raise ConfigError(
                "bridge: expected no source with another interpreter, whose environments come from its entry"
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
    if hasattr(source, "reset_rows"):
        settings = {"num_envs": num_envs, "executor": executor, "workers": workers, "env_kwargs": env_kwargs}
        if given := [name for name, value in settings.items() if value not in ("inline", None)]:
            raise ConfigError(
                f"{', '.join(given)}: expected none with a batched simulator ({source!r:.80}), which steps all of its "
                "rows itself; leave them out"
            )
        rows, name = RowBackend(cast("RowSimulator", source)), getattr(source, "name", None) or type(source).__name__
        return _wrap_backend(rows, rows, name, "rgb_array" if hasattr(source, "render") else None, **episodes)
    named = isinstance(source, str)
    if source is None:
        raise ConfigError("bridge: expected a source, or python= and entry= of another interpreter, got neither")
    if executor not in _EXECUTORS:
        raise UnknownNameError("executor", executor, _EXECUTORS)
    if workers is not None and (workers < 1 or executor == "inline"):
        raise ConfigError(f'workers: expected at least 1, with executor="threads" or "processes", got {workers}')
    if not named and (num_envs is not None or env_kwargs is not None):
        raise ConfigError(
            f"num_envs, env_kwargs: expected none with {type(source).__name__}, which has its own, got "
            f"{num_envs=}, {env_kwargs=}; leave them out, or pass a Gymnasium id"
        )
    factories = _factories(cast("str | Sequence[EnvFactory]", source), num_envs, env_kwargs)
    count = min(len(factories), available_cores() if workers is None else workers)
    if executor == "processes":
        backend, hello = process_backend(factories, count, timeout)
        env = _wrap_backend(backend, hello, hello.name, hello.render_mode, **episodes)
    else:
        backend, one = _bridge_here(factories, None if executor == "inline" else count, source, env_kwargs)
        env = _wrap_backend(backend, one, name_environment(one), one.render_mode, **episodes)
    if named:
        env.recipe = EnvRecipe(
            f"{GYMNASIUM}{source}",
            num_envs=env.num_envs,
            overrides=env_kwargs or {},
            executor=executor,
            workers=workers,
            **episodes,
        )
    return env


def _bridge_here(
    factories: list[EnvFactory], threads: int | None, source: object, env_kwargs: Mapping[str, object] | None
) -> tuple[Backend, AnyEnv]:
    """Make the environments in this process, stepped by some threads, or by the caller's; returns one of them, too."""
    envs: list[AnyEnv] = []
    try:
        try:
            envs.append(factories[0]())
        except TypeError as error:
            if env_kwargs is None:
                raise
            raise ConfigError(f"bridge: {source} does not take {dict(env_kwargs)}: {error}") from error
        exchange = Exchange(exchange_layout(len(factories), envs[0].observation_space, envs[0].action_space))
        envs.extend(factory() for factory in factories[1:])
        group = EnvGroup(envs, exchange)
    except BaseException:  # also Ctrl-C; raised again
        for env in envs:
            env.close()
        raise
    return InlineBackend(group, exchange) if threads is None else ThreadBackend(group, exchange, threads), envs[0]


def _check_rules(
    seed: int = 0, autoreset: Autoreset = "same_step", final_obs: bool = True, episode_stride: int | None = None
) -> EpisodeRules:
    """Return the rules of episodes, complete; a misspelt one is a TypeError."""
    check_autoreset(autoreset)
    if not isinstance(final_obs, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
        raise ConfigError(f"final_obs: expected True or False, got {final_obs!r}")
    return EpisodeRules(seed=seed, autoreset=autoreset, final_obs=final_obs, episode_stride=episode_stride)


def _foreign_bridge(
    source: ForeignSource, num_envs: int, *, workers: int | None, **episodes: Unpack[EpisodeRules]
) -> BridgeEnv:
    check_count("num_envs", num_envs)
    if workers is not None:
        check_count("workers", workers)
    backend, hello = foreign_backend(source, num_envs, available_cores() if workers is None else workers)
    env = _wrap_backend(backend, hello, hello.name, hello.render_mode, **episodes)
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


def _wrap_backend(
    backend: Backend,
    said: Hello | AnyEnv | RowBackend,
    name: str,
    render_mode: str | None,
    **episodes: Unpack[EpisodeRules],
) -> BridgeEnv:
    """Return the environment over a backend, which is closed if it refuses a setting; ``said`` has the spaces."""
    try:
        spaces = {"observation_space": said.observation_space, "action_space": said.action_space}
        return BridgeEnv(backend, name=name, render_mode=render_mode, **spaces, **episodes)
    except BaseException:  # also Ctrl-C; raised again
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
        one = cast("EnvFactory", functools.partial(gymnasium.make, source, **(env_kwargs or {})))
        return [one] * count
    factories = list(source) if isinstance(source, Sequence) else []  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass anything
    if not factories or not all(callable(factory) for factory in factories):
        raise DtypeError(
            "bridge: expected a Gymnasium id, a batched simulator, or a list of functions that make environments, "
            f"got {source!r}; wrap each environment: [lambda: MyEnv() for _ in range(8)]"
        )
    return factories
