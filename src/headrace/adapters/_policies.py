"""Whatever can be played, as one kind of policy: checkpoints, TorchScript and ONNX files, functions, chunk policies."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.adapters._checkpoint import FileKind, read_meta, read_weights, recognize
from headrace.adapters._learner import CheckpointMeta, InferencePolicy
from headrace.adapters._library import library as library_of
from headrace.adapters._library import make_learner, read_policy
from headrace.chunking import ChunkContext, ChunkPolicy, as_chunk_policy
from headrace.envs import BatchEnv
from headrace.errors import ConfigError, DataError, PolicyError, require_extra
from headrace.rollout import PPOCfg
from headrace.types import Obs

PolicyKind = Literal["checkpoint", "torchscript", "onnx", "callable", "chunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """A file that holds a policy, looked at and found fit to be played on a task."""

    path: Path
    kind: FileKind
    library: str | None
    meta: CheckpointMeta | None
    overrides: dict[str, object]
    """Of the task's settings that the policy was trained with."""


def inspect_file(path: Path, task: str, *, library: str | None = None, trust: bool = False) -> PolicyFile:
    """What a file is; raises an error if it is damaged, of another library or of another task."""
    kind, spec = recognize(path, trust=trust)
    if kind in ("torchscript", "onnx"):
        if kind == "onnx":
            require_extra("onnxruntime", extra="onnx", purpose=f"playing {path.name}")
        return PolicyFile(path=path, kind=kind, library=None, meta=None, overrides={})
    meta = None if spec is None else read_meta(path, spec, trust=trust)
    own = None if spec is None else spec.name
    if library is not None and own != library:
        raise ConfigError(f"{path}: expected a checkpoint of {library}, got one of {own or 'a chunk policy'}")
    if spec is not None:
        spec.require()
    content = read_weights(path, trust=trust, mapped=True) if kind == "chunk" or own == "headrace" else {}
    said = meta.task if meta is not None else cast("str | None", content.get("task"))
    if said is not None and said.rsplit(":", 1)[-1] != task.rsplit(":", 1)[-1]:
        raise ConfigError(f"{path}: expected a checkpoint of task {task!r}, got one of {said!r}; play that task")
    overrides = dict(meta.overrides) if meta is not None else dict(content.get("overrides") or {})
    return PolicyFile(path=path, kind=kind, library=own, meta=meta, overrides=overrides)


def load_policy(file: PolicyFile, env: BatchEnv, *, deterministic: bool, trust: bool = False) -> InferencePolicy:
    """The policy of a file, for this environment. Use it inside ``library_run``."""
    if file.kind == "torchscript":
        return _Checked(_Function(_torchscript(file.path)), env)
    if file.kind == "onnx":
        return _Checked(_Function(_onnx(file.path)), env)
    if file.kind == "chunk":
        from headrace.rollout import load_chunk_policy

        return _Checked(ChunkPlayer(as_chunk_policy(load_chunk_policy(file.path)), env), env)
    assert file.library is not None
    found = read_policy(library_of(file.library), file.path, deterministic=deterministic, trust=trust)
    if found is not None:
        return _Checked(found, env)
    settings = PPOCfg() if file.meta is None else file.meta.settings
    # the learner is only the library's way to build its network: its rollout memory is as small as can be
    learner = make_learner(file.library, env, dataclasses.replace(settings, steps=settings.minibatches))
    learner.load(file.path, trust=trust)
    return _Checked(learner.policy(deterministic=deterministic), env)


def callable_policy(name: str, env: BatchEnv) -> InferencePolicy:
    """A policy from ``module:name``: a function of the observation groups, a class of such, or a chunk policy."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # people mean the folder where they are
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--checkpoint {name}: cannot be loaded: {error}") from error
    policy = found() if isinstance(found, type) else found
    if not callable(policy):
        raise ConfigError(f"--checkpoint {name}: expected something that can be called, got {type(policy).__name__}")
    if getattr(policy, "horizon", None) is not None:
        shape = env.single_action_space.shape or (0,)
        return _Checked(ChunkPlayer(as_chunk_policy(cast("Any", policy), action_dim=shape[0]), env), env)
    return _Checked(_Function(cast("Callable[[Obs], Tensor]", policy)), env)


class ChunkPlayer:
    """Plays whole chunks, planning for the environments whose chunk has run dry; the others are not asked about."""

    recurrent = False

    def __init__(self, policy: ChunkPolicy, env: BatchEnv) -> None:
        if policy.obs_steps != 1:
            raise ConfigError(f"play: expected a chunk policy of one observation, got {policy.obs_steps}; use evaluate")
        self.policy, self._env = policy, env
        self._chunk = torch.zeros(env.num_envs, policy.horizon, policy.action_dim, device=env.device)
        self._next = torch.full((env.num_envs,), policy.horizon, device=env.device)
        self._index = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)

    def __call__(self, obs: Obs) -> Tensor:
        """The next action of each environment's chunk."""
        dry = ((self._next >= self.policy.horizon) & self._env.active).nonzero().squeeze(1)
        if len(dry):
            rows = {name: group.index_select(0, dry) for name, group in obs.items()}
            context = ChunkContext(
                seeds=torch.full_like(dry, self._env.seed),
                env_ids=dry,
                episode_ids=self._env.episode_ids[dry],
                chunk_index=self._index[dry],
                instructions=self._env.instructions(dry),
                left_over=torch.zeros(len(dry), self.policy.horizon, self.policy.action_dim),
                left_over_length=torch.zeros(len(dry), dtype=torch.int64),
                delay=torch.zeros(len(dry), dtype=torch.int64),
            )
            self._chunk[dry] = self.policy(rows, context).to(self._chunk)
            self._next[dry] = 0
            self._index[dry] += 1
        place = self._next.clamp(max=self.policy.horizon - 1)
        self._next += 1
        return self._chunk[torch.arange(len(place)), place]

    def reset(self, ended: Tensor) -> None:
        """A chunk is only played in the episode it was planned for."""
        self._next[ended] = self.policy.horizon
        self._index[ended] = 0


class _Function:
    """A function of observations as a policy without memory."""

    recurrent = False

    def __init__(self, call: Callable[[Obs], Tensor]) -> None:
        self._call = call

    def __call__(self, obs: Obs) -> Tensor:
        with torch.no_grad():
            return self._call(obs)

    def reset(self, ended: Tensor) -> None:
        pass


class _Checked:
    """Looks at what a policy answers, and cuts it to the bounds of actions."""

    def __init__(self, policy: InferencePolicy, env: BatchEnv) -> None:
        space = env.single_action_space
        self.policy = policy
        self.recurrent = policy.recurrent
        self._shape = (env.num_envs, *(space.shape or ()))
        self._bounds: tuple[Tensor, Tensor] | None = None
        if isinstance(space, spaces.Box):
            self._bounds = torch.as_tensor(space.low), torch.as_tensor(space.high)

    def __call__(self, obs: Obs) -> Tensor:
        actions = cast("object", self.policy(obs))
        if not isinstance(actions, Tensor) or tuple(actions.shape) != self._shape:
            got = tuple(actions.shape) if isinstance(actions, Tensor) else type(actions).__name__
            raise PolicyError(f"policy: expected actions {self._shape}, got {got}")
        if self._bounds is None:
            return actions
        cut = actions.clamp(*self._bounds)
        if not bool(torch.isfinite(cut).all()):
            bad = (~torch.isfinite(cut)).flatten(1).any(dim=1).nonzero().squeeze(1).tolist()
            raise PolicyError(f"policy: expected finite actions, got NaN for environments {bad[:8]}")
        return cut

    def reset(self, ended: Tensor) -> None:
        self.policy.reset(ended)


def _torchscript(path: Path) -> Callable[[Obs], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch asks for torch.export, which is another format
        try:
            module = torch.jit.load(path, map_location="cpu").eval()
        except RuntimeError as error:
            raise DataError(f"{path}: TorchScript cannot read it: {str(error).splitlines()[0]}") from error

    def call(obs: Obs) -> Tensor:
        return cast("Tensor", module(obs["policy"]))

    return call


def _onnx(path: Path) -> Callable[[Obs], Tensor]:
    """Runs on ONNX Runtime, on one thread as everything inside ``library_run``."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, InvalidProtobuf, NotImplemented

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; it would print its warnings to the terminal
    try:
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except (Fail, InvalidGraph, InvalidProtobuf, NotImplemented) as error:
        raise DataError(f"{path}: not an ONNX file, or cut off, or of a kind that cannot run here: {error}") from error
    names = [entry.name for entry in session.get_inputs()]
    if len(names) != 1:
        raise DataError(f"{path}: expected one input, the group 'policy', got {names}")

    def call(obs: Obs) -> Tensor:
        return torch.from_numpy(session.run(None, {names[0]: obs["policy"].cpu().numpy()})[0])

    return call
