"""Who steps the single environments: this thread, a pool of threads, or worker processes.

Single environments that write into the rows of an exchange, in this process or in a worker.

The state of an environment is bytes, for those whose whole state can be seen. An environment is a chain of wrappers
around a core. Each layer is saved on its own: with its ``state_dict`` and ``load_state_dict`` where it has them, else
attribute by attribute. Where an attribute cannot be saved faithfully, nothing is: Gymnasium's ``EzPickle``, for one,
pickles without complaint and forgets the state.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.utils import EzPickle

from headrace._interrupts import delay_signals
from headrace.bridges._exchange import INSTRUCTION_KEYS, Exchange, instruction_path
from headrace.bridges.child import FailedError, Group, RefusedError
from headrace.errors import ConfigError, DataError, EnvError, UnsupportedError

if TYPE_CHECKING:
    from headrace.bridges.bridge_env import TensorExchange

AnyEnv: TypeAlias = "gymnasium.Env[Any, Any]"
EnvFactory: TypeAlias = Callable[[], AnyEnv]


class EnvGroup(Group):
    """The Gymnasium environments of an exchange; their whole state is saved, wrappers included."""

    def __init__(self, envs: Sequence[AnyEnv], exchange: Exchange) -> None:
        """Take over ``envs`` once it is known that all have the same spaces."""
        super().__init__()
        self.snapshot = save_env, restore_env
        for env_id, env in enumerate(envs):
            try:
                self.add(env_id, env)
            except RefusedError as error:
                raise ConfigError(str(error)) from None
        path, leaves = instruction_path(envs[0].observation_space), exchange.layout.leaves
        self.bind(exchange.arrays, [(leaf.name, leaf.path) for leaf in leaves], path, INSTRUCTION_KEYS)

    def call(self, name: str, env_ids: Sequence[int], more: Sequence[Any]) -> list[Any]:
        """Reset (more: seeds), step, save, restore (more: states) or render each of some environments."""
        try:
            return super().call(name, env_ids, more)
        except (RefusedError, FailedError) as error:
            hint = "; its neighbors may have stepped: reset all before going on" if error.__cause__ is not None else ""
            raise EnvError(f"{error}{hint}") from error.__cause__ or error

    def close(self) -> None:
        """Close every environment, also after one that cannot be closed, whose error is raised then."""
        with ExitStack() as stack:
            for env in reversed(self.envs.values()):
                stack.callback(env.close)


# the chain itself, and how the environment was made
_STRUCTURE = frozenset({"env", "spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"})
# nothing of an episode is in these; they stay as they are
_FIXED_TYPES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)
_OWN, _PLAIN, _DATA, _MODEL = "own", "plain", "mjdata", "mjmodel"


def save_env(env: gymnasium.Env[Any, Any]) -> bytes:
    """Return the state of every layer of ``env``.

    Raises:
        UnsupportedError: something in it cannot be saved faithfully; the message names it.
    """
    layers = [_save_layer(layer) for layer in _layers(env)]
    return pickle.dumps([type(layer).__qualname__ for layer in _layers(env)]) + pickle.dumps(layers)


def restore_env(env: gymnasium.Env[Any, Any], state: bytes) -> None:
    """Put ``env`` into a state of :func:`save_env` of an environment that was made in the same way.

    The bytes are unpickled: load only snapshots that you trust.
    """
    stream = io.BytesIO(state)
    names, layers = pickle.load(stream), pickle.load(stream)
    chain = _layers(env)
    if names != [type(layer).__qualname__ for layer in chain]:
        raise DataError(f"snapshot: expected an environment of the layers {names}, got {env}; make it the same way")
    for layer, saved in zip(chain, layers, strict=True):
        _restore_layer(layer, saved)


def _layers(env: gymnasium.Env[Any, Any]) -> list[gymnasium.Env[Any, Any]]:
    chain = [env]
    while isinstance(chain[-1], gymnasium.Wrapper):
        chain.append(chain[-1].env)
    return chain


def _save_layer(layer: gymnasium.Env[Any, Any]) -> dict[str, tuple[str, bytes]]:
    own = _find_own_method(layer, "state_dict")
    if own is not None and _find_own_method(layer, "load_state_dict") is not None:
        return {"": (_OWN, pickle.dumps(own()))}
    saved: dict[str, tuple[str, bytes]] = {}
    for name, value in vars(layer).items():
        if _is_fixed(name, value):
            continue
        if _is_mujoco(value, "MjData"):
            saved[name] = (_DATA, pickle.dumps(value))
        elif _is_mujoco(value, "MjModel"):
            saved[name] = (_MODEL, _fingerprint(value))
        else:
            saved[name] = (_PLAIN, _pickle(value, f"{type(layer).__name__}.{name}"))
    return saved


def _restore_layer(layer: gymnasium.Env[Any, Any], saved: Mapping[str, tuple[str, bytes]]) -> None:
    if "" in saved:
        load = cast("Callable[[object], None]", _find_own_method(layer, "load_state_dict"))
        load(pickle.loads(saved[""][1]))
        return
    models = {name: value for name, value in vars(layer).items() if _is_mujoco(value, "MjModel")}
    for name, (kind, content) in saved.items():
        if kind == _MODEL and (name not in models or _fingerprint(models[name]) != content):
            raise DataError(f"snapshot: expected {type(layer).__name__}.{name} to be the same MuJoCo model, it is not")
    for name in [name for name, value in vars(layer).items() if name not in saved and not _is_fixed(name, value)]:
        delattr(layer, name)
    for name, (kind, content) in saved.items():
        if kind == _PLAIN:
            vars(layer)[name] = pickle.loads(content)
        elif kind == _DATA:
            # in place, since others hold on to this MjData; a copy of all of it, since derived fields lag the state
            source = pickle.loads(content)
            _mujoco().mj_copyData(vars(layer)[name], source.model, source)


def _is_fixed(name: str, value: object) -> bool:
    renderer = type(value).__module__.startswith("gymnasium.envs.mujoco.mujoco_rendering")
    return name in _STRUCTURE or renderer or isinstance(value, _FIXED_TYPES)


def _find_own_method(layer: gymnasium.Env[Any, Any], name: str) -> Callable[..., object] | None:
    # of its own class: a wrapper must not answer for what it wraps
    return getattr(layer, name) if callable(getattr(type(layer), name, None)) else None


def _mujoco() -> Any:
    """Return the module, if the environment has loaded it; None if not. Its extension has no types."""
    return sys.modules.get("mujoco")


def _is_mujoco(value: object, name: str) -> bool:
    mujoco = _mujoco()
    return mujoco is not None and isinstance(value, getattr(mujoco, name))


def _fingerprint(model: Any) -> bytes:
    mujoco = _mujoco()
    content = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    return hashlib.sha256(content.tobytes()).digest()


class _FaithfulPickler(pickle.Pickler):
    """Refuses what pickles without complaint but would come back as something else."""

    def reducer_override(self, obj: object) -> Any:  # pickle's own protocol
        if isinstance(obj, EzPickle | gymnasium.Env) or _is_mujoco(obj, "MjData") or _is_mujoco(obj, "MjModel"):
            raise pickle.PicklingError(f"a {type(obj).__name__} inside it")
        if isinstance(obj, np.ndarray):
            root = cast("object", obj)
            while isinstance(root, np.ndarray):
                root = cast("object", root.base)
            if root is not None and not isinstance(root, bytes | bytearray | memoryview):
                raise pickle.PicklingError(f"an array that views the memory of a {type(root).__name__}")
        return NotImplemented


def _pickle(value: object, what: str) -> bytes:
    stream = io.BytesIO()
    try:
        _FaithfulPickler(stream, protocol=5).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"state_dict: {what} cannot be saved faithfully ({error}); "
            "give that class state_dict() and load_state_dict(state), or do without snapshots"
        ) from error
    return stream.getvalue()


def make_packed(env_id: int, path: list[str], packed: str) -> AnyEnv:
    """Make an environment in a worker process: the entry of :func:`pack_factories`."""
    sys.path.extend(place for place in path if place not in sys.path)
    return cloudpickle.loads(base64.b64decode(packed))[env_id]()


cast("Any", make_packed).snapshot = save_env, restore_env


def pack_factories(factories: Sequence[EnvFactory]) -> dict[str, object]:
    """Return the arguments by which :func:`make_packed` makes the environments of ``factories`` elsewhere."""
    return {"path": sys.path, "packed": base64.b64encode(cloudpickle.dumps(list(factories))).decode()}


_T = TypeVar("_T")
Fidelity: TypeAlias = Literal["native", "restore"]


class Backend:
    """N environments behind an exchange, any of which can be reset and stepped.

    After ``reset`` and ``step`` the rows that were named hold the results: the true last observation where an episode
    ended, never the first of the next. Other rows are not written.
    """

    exchange: Exchange | TensorExchange
    """What crosses between the environments and the bridge."""
    fidelity: Fidelity = "native"
    """How environments that do not act are kept."""
    reseeds: bool = True
    """Whether an episode is a function of the seed that its reset gets."""
    no_identity: str = ""
    """Why it is not, as far as the simulator says."""
    late: frozenset[str] = frozenset()
    """Keys of observations that only :meth:`observe` writes."""
    overlaps_resets: bool = False
    """Whether :meth:`begin_reset` works: environments are reset in the background, while others are stepped."""

    def call(self, name: str, env_ids: Sequence[int], more: Sequence[Any]) -> list[Any]:
        """Have environments (ascending) do something; one entry of ``more``, and of what comes back, for each, if any.

        ``reset`` (more: seeds) starts episodes and gives instructions, "" where there is none; ``step`` takes the
        actions on the exchange; ``save`` gives states, or raises UnsupportedError where they cannot be had; ``restore``
        (more: states) puts back; ``render`` gives what the environments' own gives.
        """
        raise NotImplementedError(f"{type(self).__name__} must override call(name, env_ids, more)")

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each environment from its seed; its instruction."""
        return self.call("reset", env_ids, seeds)

    def step(self, env_ids: Sequence[int]) -> None:
        """Step each environment with its action on the exchange."""
        self.call("step", env_ids, ())

    def observe(self, env_ids: Sequence[int]) -> None:
        """Draw the observations :attr:`late` of some environments, as of their last step or reset."""
        self.call("observe", env_ids, ())

    def save(self) -> list[object]:
        """Return the state of every environment."""
        return self.call("save", range(self.exchange.layout.num_envs), ())

    def restore(self, states: Sequence[object]) -> None:
        """Put every environment back."""
        self.call("restore", range(len(states)), states)

    def render(self, env_ids: Sequence[int]) -> list[object]:
        """Return what the ``render`` of each of some environments gives."""
        return self.call("render", env_ids, ())

    def begin_reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin to start an episode in each environment; it must not be stepped before it is taken."""
        raise NotImplementedError(f"{type(self).__name__} cannot reset in the background; call reset(env_ids, seeds)")

    def take_resets(self, timeout: float | None) -> dict[int, str]:
        """Instructions of the environments that are ready, by id; raises what a reset raised.

        Waits until one is, for so many seconds (None: as long as it takes); empty where none is under way.
        """
        del timeout
        return {}

    def resetting(self) -> list[int]:
        """Return environments that cannot be stepped without waiting for a reset: their own, or one of their worker."""
        return []

    def drop_resets(self) -> None:
        """Wait for the resets that are under way, whatever they give."""

    def close(self) -> None:
        """Release the environments and the threads or processes that stepped them."""
        raise NotImplementedError(f"{type(self).__name__} must override close()")


class InlineBackend(Backend):
    """All environments in this process, one after the other."""

    def __init__(self, group: EnvGroup, exchange: Exchange) -> None:
        self.exchange = exchange
        self._group = group
        self.call, self.close = group.call, group.close


class ThreadBackend(Backend):
    """All environments in this process, stepped by a few threads: for those that release Python's lock, as MuJoCo."""

    overlaps_resets = True

    def __init__(self, group: EnvGroup, exchange: Exchange, workers: int) -> None:
        self.exchange = exchange
        self._group = group
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="headrace-bridge")
        # of their own: a reset that takes seconds must not keep a step waiting for a thread
        self._reset_pool = ThreadPoolExecutor(workers, thread_name_prefix="headrace-reset")
        self._resets: dict[Future[list[str]], int] = {}

    def call(self, name: str, env_ids: Sequence[int], more: Sequence[Any]) -> list[Any]:
        """Reset and step on the threads, the rest here."""
        if name not in ("reset", "step"):
            return self._group.call(name, env_ids, more)
        parts = split(len(env_ids), self._workers)
        with delay_signals():  # an exception between submitting and waiting would leave a thread that still steps
            done = _finish([self._pool.submit(self._group.call, name, env_ids[part], more[part]) for part in parts])
        return [text for part in done for text in part]

    def begin_reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin to start an episode in each environment, each by itself."""
        with delay_signals():  # a reset that is not on the list would not be waited for
            for env_id, seed in zip(env_ids, seeds, strict=True):
                self._resets[self._reset_pool.submit(self._group.call, "reset", [env_id], [seed])] = env_id

    def take_resets(self, timeout: float | None) -> dict[int, str]:
        """Return the environments that are ready."""
        done, _ = wait(self._resets, timeout, return_when=FIRST_COMPLETED)
        return {self._resets.pop(future): future.result()[0] for future in done}

    def resetting(self) -> list[int]:
        """Return the environments whose reset is under way."""
        return list(self._resets.values())

    def drop_resets(self) -> None:
        """Wait for the resets that are under way."""
        wait(self._resets)
        self._resets.clear()

    def close(self) -> None:
        """Stop the threads and close the environments."""
        self._reset_pool.shutdown(cancel_futures=True)
        self._pool.shutdown()
        self._group.close()


def split(count: int, workers: int) -> list[slice]:
    """Contiguous parts of nearly equal size, none of them empty."""
    bounds = np.linspace(0, count, min(count, workers) + 1).astype(int).tolist()
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


def _finish(futures: Sequence[Future[_T]]) -> list[_T]:
    wait(futures)  # for all before raising, so that no thread still steps when the caller gets an error
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
