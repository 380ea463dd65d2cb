"""Policies of files that give one action per observation: trainings, TorchScript and ONNX.

What tells policies apart: a hash of weights, settings and code, where all of them can be seen.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from headrace.envs.batch_env import BatchEnv
from headrace.envs.recipe import AnyEnv, EnvRecipe
from headrace.envs.registry import make
from headrace.envs.task import count_actions
from headrace.errors import ConfigError, DataError
from headrace.files import hash_file, open_untrusted, parsing
from headrace.learning.ppo import PPOCfg
from headrace.libraries.learner import InferencePolicy, MemoryState
from headrace.libraries.registry import check_agent, make_learner
from headrace.libraries.registry import library as library_of
from headrace.policies.observation_map import MappedPolicy
from headrace.policies.protocol import ChunkContext, ChunkPolicy, EpisodeRows, unwrap_policy
from headrace.types import Obs

if TYPE_CHECKING:
    from headrace.policies.load_policy import FoundPolicy

_SPARE = 2
"""Environments of a learner that only builds a network."""


def load_step_policy(
    found: FoundPolicy, env: AnyEnv | EnvRecipe, *, deterministic: bool, trust: bool = False
) -> ChunkPolicy:
    """Load the policy of a file, of horizon 1, for an environment; use it in ``library_run``."""
    # the learner is only the library's way to build its network: its rollout memory is as small as can be, and its
    # environments are never stepped
    with closing(_make_spare(env)) as spare:
        policy = _inference(found, spare, deterministic=deterministic, trust=trust)
        kind = RecurrentStepPolicy if policy.recurrent else StepPolicy
        return kind(policy, count_actions(spare.single_action_space), hash_file(found.path))


def _inference(found: FoundPolicy, spare: AnyEnv, *, deterministic: bool, trust: bool) -> InferencePolicy:
    if found.kind in ("torchscript", "onnx"):
        call = _torchscript(found.path) if found.kind == "torchscript" else _onnx(found.path)
        return InferencePolicy(lambda obs, _: (call(obs), None))
    assert found.library is not None
    loader = library_of(found.library).loader
    if loader is not None:
        return resolve_name(loader)(found.path, deterministic=deterministic, trust=trust)
    settings = PPOCfg() if found.meta is None else found.meta.settings
    agent = None if found.meta is None else found.meta.agent
    if agent is not None and not trust:
        check_agent(agent, found.path)
    learner = make_learner(found.library, spare, dataclasses.replace(settings, steps=settings.minibatches), agent)
    learner.load(found.path, trust=trust)
    return learner.policy(deterministic=deterministic)


def _make_spare(env: AnyEnv | EnvRecipe) -> AnyEnv:
    """Make a few environments of the same kind."""
    if isinstance(env, BatchEnv):
        return make(env.task, _SPARE, seed=env.seed, threads=1, device=str(env.device))
    recipe = env if isinstance(env, EnvRecipe) else env.recipe
    if recipe is None:
        raise ConfigError(
            f"{getattr(env, 'name', env)}: expected an environment that was made from a name or recipe, got an object"
        )
    changes = {"workers": None, "executor": "inline"} if recipe.bridged else {"threads": 1}
    return recipe.make(num_envs=_SPARE, autoreset="same_step", **changes)


def _torchscript(path: Path) -> Callable[[Obs], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch asks for torch.export, which is another format
        with parsing(path), open_untrusted(path) as file:
            module = torch.jit.load(file, map_location="cpu").eval()

    def call(obs: Obs) -> Tensor:
        return cast("Tensor", module(obs["policy"]))

    return call


def _onnx(path: Path) -> Callable[[Obs], Tensor]:
    """Run on ONNX Runtime, on one thread as everything inside ``library_run``.

    It has no operators but ONNX Runtime's own, and reads no data outside the directory of the file.
    """
    import onnxruntime

    states = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    raised = tuple(kind for kind in vars(states).values() if isinstance(kind, type) and issubclass(kind, Exception))
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; it would print its warnings to the terminal
    with parsing(path):
        try:
            session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            names = [entry.name for entry in session.get_inputs()]
        except raised as error:
            reason = f"not an ONNX file, or cut off, or of a kind that cannot run here: {error}"
            raise DataError(f"{path}: {reason}") from error
    if len(names) != 1:
        raise DataError(f"{path}: expected one input, the group 'policy', got {names}")

    def call(obs: Obs) -> Tensor:
        return torch.from_numpy(session.run(None, {names[0]: obs["policy"].cpu().numpy()})[0])

    return call


class StepPolicy:
    """The policy of a file without memory: (n, A) actions, or (n,) choices, as chunks (n, 1, A).

    Args:
        policy: what the library gives.
        action_dim: size of an action.
        file_hash: SHA-256 of the file, the policy's id.
    """

    horizon = obs_steps = 1

    def __init__(self, policy: InferencePolicy, action_dim: int, file_hash: str) -> None:
        self.policy, self.action_dim, self.file_hash = policy, action_dim, file_hash

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row."""
        del context
        actions = self.policy(obs)
        return actions[:, None, None] if actions.dim() == 1 else actions.unsqueeze(1)


class RecurrentStepPolicy(StepPolicy):
    """One with memory, which is kept here per episode: rows (layers, capacity, size) of what the library keeps.

    Row 0 is scratch, for rows that only fill a batch up.
    """

    def __init__(self, policy: InferencePolicy, action_dim: int, file_hash: str) -> None:
        super().__init__(policy, action_dim, file_hash)
        self._row_of: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._rows: MemoryState | None = None
        self._asked: tuple[Tensor, Tensor] | None = None
        self._index = torch.zeros(0, dtype=torch.int64)

    def begin(self, rows: EpisodeRows) -> None:
        """Give each episode a row of zeros."""
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            if not self._free:
                self._grow()
            self._row_of[key] = self._free.pop()
        self._asked = None
        if self._rows is not None:
            begun = torch.tensor([self._row_of[key] for key in rows.keys()])  # noqa: SIM118  (not a dict)
            for kept in self._rows:
                kept[:, begun] = 0.0

    def end(self, rows: EpisodeRows) -> None:
        """Release the rows."""
        for key in rows.keys():  # noqa: SIM118  (not a dict)
            self._free.append(self._row_of.pop(key))

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan one action per row, each with the memory of its episode."""
        index = self._find_rows(context)
        self.policy.memory = None if self._rows is None else tuple(kept[:, index].contiguous() for kept in self._rows)
        plan = super().__call__(obs, context)
        after = self.policy.memory
        assert after is not None
        if self._rows is None:
            count = self._capacity
            self._rows = tuple(part.new_zeros((part.shape[0], count, part.shape[2])) for part in after)
        for kept, part in zip(self._rows, after, strict=True):
            kept[:, index] = part
            kept[:, 0] = 0.0
        return plan

    def _find_rows(self, context: ChunkContext) -> Tensor:
        """Return the row of each episode, int64 (n,); looked up once as long as the episodes are the same."""
        asked = self._asked
        if asked is None or asked[0] is not context.seeds or asked[1] is not context.episode_ids:
            self._asked = context.seeds, context.episode_ids
            keys = zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True)
            self._index = torch.tensor([self._row_of.get(key, 0) for key in keys])
        return self._index

    @property
    def _capacity(self) -> int:
        return 1 + len(self._row_of) + len(self._free)

    def _grow(self) -> None:
        """Double the rows."""
        before = self._capacity
        self._free = list(range(2 * before, before - 1, -1))
        if self._rows is not None:
            more = [kept.new_zeros((kept.shape[0], before + 1, kept.shape[2])) for kept in self._rows]
            self._rows = tuple(torch.cat(pair, dim=1) for pair in zip(self._rows, more, strict=True))


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, Path),
    *(torch.dtype, torch.device, np.dtype, np.generic),
)
_CONTENT = {"_parameters", "_buffers", "_modules"}
_INTERNAL = set(vars(nn.Module())) - _CONTENT
"""What every module has, besides its content: hooks, the mode."""
_LIBRARIES = ("builtins", "numpy", "torch")
"""Their code is named by their versions, which are recorded beside."""
_OF_0_2 = {
    # pusher-solid
    "59f7922ef4409b455da586b4b7ee075de0e84d14d0cc0f00dd49ec6764c11505": (
        "4433ecbe2f96327025f2f1abd4767f7fee2888fc7ecbb3a76b6609860133c710"
    ),
    # aloha-transfer-cube-state
    "00757890ef259e2f69256f34c3bded9de0098febf76b599ccc351c5979a39742": (
        "0ef3d63788d3a7fecef271d90d6c15974cb8355bd37a2dc0aaff3f6d1b3170ee"
    ),
    # pusher-words
    "482d47adcb2a76939566f407f22c2993519c4db7cbbff72a7a8c9978aff22ac8": (
        "a2e3f9e2df37a258531ade7a399fbe2af50a1cf7e7fc2f1696a29df14332fa9c"
    ),
}
"""The ids that 0.2 gave to the policies that ship, from text and place of its own files → their ids now."""


def current_id(policy_id: object) -> object:
    """Return the id that this version gives to the policy of an id, which 0.2 may have written."""
    return _OF_0_2.get(policy_id, policy_id) if isinstance(policy_id, str) else policy_id


def policy_hash(policy: object) -> str:
    """Return a hash of a policy's weights, settings and code; ConfigError for what cannot be seen through.

    The policy of a training, or of another file that gives one action, has the hash of its file.

    Settings are the attributes of objects and the variables that functions enclose. Code is the text of every file
    that defines a class or function in it, so that an edit gives another hash. Classes and functions of headrace are
    known by ``policy_identity``, a name with a revision that rises when what they compute changes, or by their names.
    """
    own = unwrap_policy(policy)
    if isinstance(own, MappedPolicy):  # the map is an entry of its own
        return policy_hash(own.policy)
    if isinstance(own, StepPolicy):
        return own.file_hash
    hasher = _Hasher()
    hasher.add("policy", own)
    return hasher.digest.hexdigest()


class _Hasher:
    """Walks through an object; whatever is reached twice is taken once."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[int, tuple[int, object]] = {}
        """By identity: number, and the object, which must not be released meanwhile."""

    def add(self, path: str, value: Any) -> None:
        if isinstance(value, (*_PLAIN, enum.Enum)):
            return self._tell(path, type(value).__name__, str(value) if isinstance(value, np.dtype) else repr(value))
        if id(value) in self._seen:
            return self._tell(path, "again", self._seen[id(value)][0])
        self._seen[id(value)] = (len(self._seen), value)
        if nn.parameter.is_lazy(value):
            raise ConfigError(f"policy: {path} has no weights before the policy is called; call it once with some rows")
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous()
            self._tell(path, value.dtype, tuple(value.shape))
            return self.digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._tell(path, value.dtype.str, value.shape)
            return self.digest.update(value.tobytes())
        if isinstance(value, types.ModuleType):
            return self._tell(path, "module", value.__name__.rpartition(".")[2] if _is_ours(value) else value.__name__)
        if isinstance(value, type):
            return self._code(path, value)
        if isinstance(value, types.MethodType):
            return self._parts(path, {"function": value.__func__, "self": value.__self__})
        if isinstance(value, functools.partial):
            call = cast("functools.partial[object]", value)
            return self._parts(path, {"function": call.func, "args": call.args, "keywords": call.keywords})
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            self._code(path, value)
            return self._parts(path, {"defaults": value.__defaults__, "kw": value.__kwdefaults__, "closure": cells})
        if isinstance(value, types.BuiltinFunctionType):
            return self._tell(path, value.__module__, value.__qualname__)
        if isinstance(value, types.CodeType):
            return self._parts(path, {"code": value.co_code, "names": value.co_names, "constants": value.co_consts})
        if isinstance(value, (set, frozenset)):
            value = sorted(cast("set[object]", value), key=repr)
        if isinstance(value, Mapping):
            return self._parts(path, {repr(key): part for key, part in cast("Mapping[object, object]", value).items()})
        if isinstance(value, (list, tuple)):
            return self._parts(path, {str(place): part for place, part in enumerate(cast("list[object]", value))})
        return self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        """Hash a module, or any object with attributes."""
        if isinstance(value, torch.jit.ScriptModule):
            return self._parts(path, {"code": value.code, **value.state_dict()})
        children = dict(value.named_children()) if isinstance(value, nn.Module) else {}
        if "_orig_mod" in children:  # what torch.compile was given
            return self._parts(path, {"compiled": children["_orig_mod"]})
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        if not hasattr(value, "__dict__") and not slots:
            raise ConfigError(
                f"policy_id (--policy-id): expected a text that names the policy, since {path} is a "
                f"{type(value).__name__}, which cannot be seen through; a journal is resumed and merged "
                "for equal policies only"
            )
        parts = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
        hidden = _INTERNAL if isinstance(value, nn.Module) else ()
        self._code(path, type(value))
        return self._parts(path, {name: part for name, part in parts.items() if name not in hidden})

    def _parts(self, path: str, parts: Mapping[str, object]) -> None:
        self._tell(path, "parts", len(parts))
        for name, part in parts.items():
            self.add(f"{path}.{name}", part)

    def _code(self, path: str, value: type | types.FunctionType) -> None:
        """Name and source of a class, with its bases, or of a function."""
        for kind in value.__mro__ if isinstance(value, type) else (value,):
            if _is_ours(kind):
                self._tell(path, "headrace", vars(kind).get("policy_identity", kind.__qualname__))
                continue
            self._tell(path, kind.__module__, kind.__qualname__)
            if kind.__module__.partition(".")[0] in _LIBRARIES:
                continue
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            if file is not None and Path(file).is_file():
                self._tell(path, "source", _file_hash(file))
            elif isinstance(kind, type):  # typed at a prompt
                self._parts(path, {name: part for name, part in vars(kind).items() if callable(part)})
            else:
                self.add(path, kind.__code__)

    def _tell(self, *words: object) -> None:
        self.digest.update("\0".join(map(str, words)).encode() + b"\n")


def _is_ours(part: type | types.FunctionType | types.ModuleType) -> bool:
    """Whether a class, function or module belongs to headrace."""
    home = part.__name__ if isinstance(part, types.ModuleType) else part.__module__
    return home.partition(".")[0] == "headrace"


def _slots(kind: type) -> list[str]:
    named = cast("str | tuple[str, ...]", getattr(kind, "__slots__", ()))
    return [name for name in ((named,) if isinstance(named, str) else named) if not name.startswith("__")]


@functools.cache
def _file_hash(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
