"""An evaluator from names: the policy of a file, a module or a server, over an environment that is there.

What a process needs to play its part of a plan, whether it is the only one or a worker of many.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from headrace._named import load_made
from headrace.chunking import as_chunk_policy
from headrace.chunking._admission import admission_names, make_admission
from headrace.errors import ConfigError
from headrace.files import hash_file
from headrace.rollout._evaluate import Evaluator, PlaySettings, action_size, kept_modes
from headrace.rollout._policy_source import load_policy_source

if TYPE_CHECKING:
    from headrace.adapters._policies import PolicyFile
    from headrace.chunking import Admission, ChunkPolicy
    from headrace.chunking._policy import PolicyLike
    from headrace.envs._recipe import AnyEnv, EnvRecipe
    from headrace.serving import RemoteEngine, WireMapping
    from headrace.serving._images import ImageCoding

    PolicySource: TypeAlias = PolicyLike | str | Path | None


class EvaluationSettings(PlaySettings, total=False):
    """How a policy is found and played; each as the argument of :func:`headrace.evaluate` of that name."""

    execute: int | None
    horizon: int | None
    mapping: WireMapping | None
    connections: int
    images: ImageCoding


@contextmanager
def open_evaluator(env: AnyEnv, policy: PolicySource, seed: int, settings: EvaluationSettings) -> Generator[Evaluator]:
    """Find the policy, connect to its server where it has one, and close everything at the end of the block."""
    check_remote(policy, settings)
    played: dict[str, Any] = {**settings}
    found = {name: played.pop(name, None) for name in ("execute", "horizon", "mapping", "connections", "images")}
    played["admission"] = _rule(played.get("admission", "greedy"))
    with ExitStack() as stack:
        stack.enter_context(kept_modes(policy))
        if remote_address(policy) is not None:
            remote = stack.enter_context(closing(_connect(cast("str", policy), env, seed, settings)))
            fitted, played["engine"] = remote.policy, remote
            played.pop("timeout", None)
        else:
            file = named_policy(policy, env)
            if file is None or file.kind == "chunk":
                fitted = _fitted(policy, env, found["horizon"], action_size(env.single_action_space))
            else:
                fitted = stack.enter_context(_trained(file, env, seed))
                if played.get("policy_id") is None:
                    played["policy_id"] = hash_file(file.path)
        execute = found["execute"]
        if execute is None:
            blended = played.get("ensemble_decay") is not None
            execute = 1 if blended else fitted.horizon - played.get("offset", 0) - played.get("latency", 0)
        yield stack.enter_context(closing(Evaluator(env, fitted, execute=execute, seed=seed, **played)))


def remote_address(policy: PolicySource) -> str | None:
    """The address of the server that runs a policy; None for other policies."""
    return policy if isinstance(policy, str) and "://" in policy else None


def check_remote(policy: PolicySource, settings: EvaluationSettings) -> None:
    """Refuse what only a server's policy has, without one, and what it has of its own, with one."""
    address = remote_address(policy)
    if address is None:
        wire = (settings.get("mapping"), settings.get("connections", 1), settings.get("images", "raw"))
        if wire != (None, 1, "raw"):
            raise ConfigError(
                "mapping, connections, images: expected the address of a server as policy with them, such as "
                "openpi://HOST:8000, got another policy"
            )
    elif settings.get("engine", "inline") != "inline" or settings.get("batching") is not None:
        raise ConfigError(f"engine, batching: expected none with {address}: a server has its own")


def named_policy(policy: PolicySource, env: EnvRecipe | AnyEnv) -> PolicyFile | None:
    """The file that ``policy`` names, if it is one. A training of another task, or nothing at all, is refused."""
    from headrace.adapters._policies import policy_file
    from headrace.envs._recipe import EnvRecipe
    from headrace.rollout._act_policy import missing_policy, shipped_policies

    if isinstance(policy, (str, Path)) and ":" not in str(policy):
        known = str(policy) in ("latest", "best", *shipped_policies())
        if not known and not Path(policy).exists():
            raise missing_policy(str(policy))

    recipe = env if isinstance(env, EnvRecipe) else _recipe_of(env)
    return None if recipe is None else policy_file(policy, recipe.source)


def _recipe_of(env: AnyEnv) -> EnvRecipe | None:
    """None of an environment that was made by hand, or that is somebody else's."""
    return cast("EnvRecipe | None", getattr(env, "recipe", None))


@contextmanager
def _trained(file: PolicyFile, env: AnyEnv, seed: int) -> Generator[ChunkPolicy]:
    """The policy of a training, of horizon 1. Torch has one thread within the block, as in ``play``."""
    from headrace.adapters._policies import load_policy
    from headrace.adapters._torch_state import library_run

    with library_run(seed=seed):
        yield load_policy(file, env, deterministic=True)


def _rule(admission: Admission | str) -> Admission:
    """A rule, by its registered name, or from ``module:name``: an object, or a class made without arguments."""
    if not isinstance(admission, str):
        return admission
    module, _, attribute = admission.partition(":")
    if module in admission_names() or not attribute.isidentifier():
        return make_admission(admission)
    return cast("Admission", load_made(admission, "--admission"))


def _fitted(policy: PolicySource, env: AnyEnv, horizon: int | None, action_dim: int) -> ChunkPolicy:
    if policy is None or isinstance(policy, (str, Path)):
        recipe = _recipe_of(env)
        task = None if recipe is None else recipe.source
        policy = load_policy_source(None if policy is None else str(policy), task=task)
    return as_chunk_policy(policy, horizon=horizon, action_dim=action_dim)


def _connect(address: str, env: AnyEnv, seed: int, settings: EvaluationSettings) -> RemoteEngine:
    """The engine of a server; sizes that it does not say come from one answer."""
    from headrace.serving import RemoteCfg, RemoteEngine

    action_dim = action_size(env.single_action_space)
    horizon, timeout = settings.get("horizon"), settings.get("timeout")
    engine = RemoteEngine(
        address,
        mapping=settings.get("mapping"),
        horizon=horizon,
        action_dim=action_dim,
        connections=settings.get("connections", 1),
        images=settings.get("images", "raw"),
        cfg=RemoteCfg(timeout=timeout or RemoteCfg().timeout, api_key=os.environ.get("HEADRACE_API_KEY") or None),
    )
    if engine.sizes.horizon is None and horizon is None:
        try:
            env.reset(seed=seed)
            learned = engine.probe(env.observe([0]), env.instructions([0]))
            if learned.action_dim != action_dim:
                raise ConfigError(f"policy {address}: plans actions of {learned.action_dim}, the task has {action_dim}")
        except BaseException:  # also Ctrl-C; raised again
            engine.close()
            raise
    return engine
