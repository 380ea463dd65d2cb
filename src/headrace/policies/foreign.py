"""Policies in a process of their own: of this interpreter, or of another one with packages of its own."""

from __future__ import annotations

import contextlib
import math
import pickle
import select
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace._named import load_made
from headrace.bridges.interpreter import PACKAGE_ENTRY, Interpreter, open_shared_memory
from headrace.errors import ConfigError, DataError, PolicyError
from headrace.policies.batching import COUNTS, Answer, Asker, Batching, choose_batching
from headrace.policies.engines import EnginePolicy, OneRequest, RememberingEnginePolicy, Reply, Request, answer_request
from headrace.policies.observation_map import ObservationMap, map_policy, to_array
from headrace.policies.preflight import FeatureSpec, read_features
from headrace.policies.protocol import (
    TENSOR_FIELDS,
    ChunkContext,
    ChunkPolicy,
    EpisodeRows,
    as_chunk_policy,
    has_memory,
    name_rows,
)
from headrace.policies.step_policy import policy_hash
from headrace.types import Obs

_START_S, _ANY_S = 600.0, 1e9
"""Seconds in which the policy must be loaded; and for a call without a time-out."""
_REFUSALS = ("ConfigError", "UnknownNameError", "MissingExtraError", "DataError", "RefusedError")
"""Errors over there whose text is enough."""


@dataclass(frozen=True, slots=True)
class ForeignPolicy:
    """A policy in another interpreter, not started yet."""

    python: str
    """The interpreter, such as ``PATH/bin/python``."""
    policy: str
    """``module:name`` or ``lerobot:DIR``, as that interpreter finds it."""

    @classmethod
    def parse(cls, text: str) -> ForeignPolicy:
        """Read ``python:PATH/bin/python:module:name``."""
        python, _, policy = text.removeprefix("python:").partition(":")
        if not python or ":" not in policy:
            raise ConfigError(
                f"policy (--policy): expected python:PATH/bin/python:module:name or "
                f"python:PATH/bin/python:lerobot:DIR, got {text!r}"
            )
        return cls(python, policy)


class ChildEngine(OneRequest):
    """Runs a policy in a child process, beside the physics. Batches are formed, and rows verified, over there.

    The child ends with this process, however that ends.
    """

    def __init__(self, python: str, name: str, batching: Batching, timeout: float | None) -> None:
        """Start the interpreter ``python``; ``name`` is for errors."""
        super().__init__(batching, timeout)
        self._name, self._closed = name, False
        with open_shared_memory() as memory:
            self._child = Interpreter(python, memory)
        self.pid = self._child.pid

    def _make(self, host: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Have the child make what answers; what it is."""
        self._receive("start", _START_S)
        head = {"call": "make", "entry": f"{PACKAGE_ENTRY}:{host}", "kwargs": kwargs, "env_ids": []}
        return self._call(head)

    def close(self) -> None:
        """End the child; a call under way is dropped."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError, EOFError):  # it is gone already, or hangs
            self._child.channel.send({"call": "close"}, timeout=1.0)
        self._child.end()

    def _usable(self) -> bool:
        return not self._closed

    def _send(self, request: Request) -> None:
        head, body = write_request(request)
        try:
            self._child.channel.send(head, body, timeout=self._timeout or _ANY_S)
        except (OSError, EOFError) as error:
            self._request = None
            raise self._make_lost_error(f"was asked for {name_rows(request.context)}", error) from error

    def _wait(self, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._child.channel.fileno(), select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1e3 * seconds))

    def _fetch(self) -> Reply:
        request, self._request = cast("Request", self._request), None
        head, body = self._receive(f"was asked for {name_rows(request.context)}", self._timeout or _ANY_S)
        actions = read_tensors(head["arrays"], body)["actions"]
        return Reply(request=request, answer=Answer(actions=actions, **head["counts"]), seconds=head["seconds"])

    def _abandon(self) -> None:
        self.close()

    def _call(self, head: Mapping[str, Any], body: bytes = b"") -> dict[str, Any]:
        self._child.channel.send(head, body, timeout=_START_S)
        return self._receive("loaded the policy", _START_S)[0]

    def _receive(self, doing: str, seconds: float) -> tuple[dict[str, Any], bytes]:
        """Return the next answer; an error of the policy, or of what became of its child, is raised here."""
        try:
            head, body = self._child.channel.receive(timeout=seconds)
        except (EOFError, OSError, DataError) as error:
            raise self._make_lost_error(doing, error) from error
        if "error" not in head:
            return head, body
        if head["error"] in _REFUSALS:
            raise ConfigError(str(head.get("message")))
        where = f"\n\nin the policy's {self._name}:\n"
        raise PolicyError(f"{head.get('message')}" + (f"{where}{head['traceback']}" if "traceback" in head else ""))

    def _make_lost_error(self, doing: str, error: Exception) -> PolicyError:
        how = "gave no answer in time" if isinstance(error, TimeoutError) else self._child.how_ended()
        self.close()
        return PolicyError(f"policy: its {self._name} {how} while it {doing}")


class ForeignEngine(ChildEngine):
    """Runs a policy in an interpreter with packages of its own."""

    def __init__(
        self,
        source: ForeignPolicy,
        env: object,
        batching: Batching,
        *,
        horizon: int | None = None,
        mapping: ObservationMap | None = None,
        timeout: float | None = None,
    ) -> None:
        """Start it, and wait until the policy is loaded.

        Args:
            source: interpreter and policy.
            env: what it is played in; None where that is not known.
            batching: how its batches are formed.
            horizon: rows of a chunk, where the policy does not state them.
            mapping: from observation groups to the keys that the policy reads.
            timeout: seconds that one request may take.
        """
        super().__init__(source.python, f"interpreter {source.python}", batching, timeout)
        try:
            action = cast("spaces.Space[Any] | None", getattr(env, "single_action_space", None))
            given: dict[str, Any] = {
                "policy": source.policy,
                "horizon": horizon,
                "action_dim": None if action is None else math.prod(action.shape or (1,)),
                "mapping": None if mapping is None else mapping.to_json(),
                "threads": torch.get_num_threads(),
            }
            hello = self._make(PolicyHost.__name__, given)
            groups = cast("Mapping[str, spaces.Space[Any]]", getattr(env, "single_observation_space", {}))
            space = {name: [list(part.shape or ()), str(part.dtype)] for name, part in groups.items()}
            chosen = self._call({"call": "choose", "space": space, "batching": asdict(batching)})
        except BaseException:  # also Ctrl-C; raised again
            self.close()
            raise
        self.strict_size = Batching(**(asdict(batching) | chosen)).strict_size
        self.places: str | None = chosen["places"]
        self.policy_hash: str = hello["hash"]
        """As of the same policy in this process; "" where it cannot be seen through."""
        self.feature_specs = {key: FeatureSpec.from_json(spec) for key, spec in hello["features"].items()}
        self.policy = (RememberingEnginePolicy if hello["memory"] else EnginePolicy)(engine=self, **hello["sizes"])
        """The sizes of the policy, for ``evaluate``."""


class ProcessEngine(ChildEngine):
    """Runs a policy in a process of its own, for those that hold the GIL.

    The policy is made there, at the first request, by ``make_policy``, which is sent as a pickle of cloudpickle. The
    process computes with as many threads as the caller's torch does.
    """

    def __init__(
        self, make_policy: Callable[[], ChunkPolicy], batching: Batching, timeout: float | None = None
    ) -> None:
        try:
            packed = cloudpickle.dumps(make_policy)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"engine 'process': expected a policy that can be pickled, got {error}; "
                "pass ProcessEngine(make_policy, batching) with a function that makes it there"
            ) from error
        super().__init__(sys.executable, "process", batching, timeout)
        try:
            given = {"path": sys.path, "threads": torch.get_num_threads(), "batching": asdict(batching)}
            self._make(PickledHost.__name__, given)
            self._call({"call": "load"}, packed)
        except BaseException:  # also Ctrl-C; raised again
            self.close()
            raise


_LEROBOT = "lerobot:"


class PolicyHost:
    """Loads a policy, chooses its batches, and answers requests until it is closed."""

    answers_itself = True
    """For ``bridges/child.py``, which makes it."""

    def __init__(
        self, policy: str, horizon: int | None, action_dim: int | None, mapping: dict[str, Any] | None, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        if policy.startswith(_LEROBOT):
            from headrace.policies._lerobot import load_lerobot_policy

            made: Any = load_lerobot_policy(policy.removeprefix(_LEROBOT))
        else:
            made = load_made(policy, "--policy")
        plain = as_chunk_policy(made, horizon=horizon, action_dim=action_dim, single=True)
        self._policy = plain if mapping is None else map_policy(plain, ObservationMap.from_json(mapping))
        self._ask: Callable[..., Answer] | None = None

    def hello(self) -> dict[str, Any]:
        """Return what the policy is; its hash is "" where it cannot be seen through."""
        policy = self._policy
        try:
            known = policy_hash(policy)
        except ConfigError:
            known = ""
        sizes = {name: getattr(policy, name) for name in ("horizon", "action_dim", "obs_steps")}
        features = {key: spec.to_json() for key, spec in read_features(policy).items()}
        return {"sizes": sizes, "memory": has_memory(policy), "hash": known, "features": features}

    def answer(self, head: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer one call: ``choose`` the batches, then ``ask`` for chunks."""
        if head["call"] == "choose":
            groups: dict[str, spaces.Space[Any]] = {
                name: spaces.Box(0, 1, shape, np.dtype(dtype).type) for name, (shape, dtype) in head["space"].items()
            }
            env = SimpleNamespace(single_observation_space=spaces.Dict(groups))
            chosen = choose_batching(self._policy, Batching(**head["batching"]), env if groups else None)
            self._ask = Asker(self._policy, chosen)
            return {"size": chosen.size, "places": chosen.places}, b""
        assert self._ask is not None
        try:
            reply = answer_request(self._ask, read_request(head, body))
        except PolicyError as error:  # with the place where the policy raised, if it did
            if error.__cause__ is not None:
                raise
            return {"error": "PolicyError", "message": str(error)}, b""
        counts = {name: getattr(reply.answer, name) for name in COUNTS}
        arrays, raw = write_tensors({"actions": reply.answer.actions})
        return {"arrays": arrays, "counts": counts, "seconds": reply.seconds}, raw

    def close(self) -> None:
        """Do nothing: the process ends."""


class PickledHost(PolicyHost):
    """Answers for the policy that a pickled function makes at the first request."""

    def __init__(self, path: list[str], threads: int, batching: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        sys.path.extend(place for place in path if place not in sys.path)
        self._batching = Batching(**batching)

    def hello(self) -> dict[str, Any]:
        """Return nothing: the policy is not made yet."""
        return {}

    def answer(self, head: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Take the function with ``load``, then ``ask`` for chunks."""
        if head["call"] != "load":
            return super().answer(head, body)
        self._ask = partial(self._ask_first, body)
        return {}, b""

    def _ask_first(self, packed: bytes, obs: Obs, context: ChunkContext, ended: EpisodeRows | None = None) -> Answer:
        self._ask = Asker(pickle.loads(packed)(), self._batching)
        return self._ask(obs, context, ended)


def write_request(request: Request) -> tuple[dict[str, Any], bytes]:
    """Return a request as head and body of a frame."""
    context, ended = request.context, request.ended
    tensors = {f"obs:{name}": values for name, values in request.obs.items()}
    tensors |= {f"context:{name}": getattr(context, name) for name in TENSOR_FIELDS}
    head: dict[str, Any] = {"call": "ask", "instructions": list(context.instructions), "ended": None}
    if ended is not None:
        tensors |= {"ended:seeds": ended.seeds, "ended:episode_ids": ended.episode_ids}
        head["ended"] = list(ended.instructions)
    head["arrays"], body = write_tensors(tensors)
    return head, body


def read_request(head: Mapping[str, Any], body: bytes) -> Request:
    """Return what :func:`write_request` wrote."""
    parts: dict[str, dict[str, Tensor]] = {"obs": {}, "context": {}, "ended": {}}
    for name, values in read_tensors(head["arrays"], body).items():
        kind, _, own = name.partition(":")
        parts[kind][own] = values
    ended = head["ended"] is not None
    return Request(
        obs=parts["obs"],
        context=ChunkContext(instructions=tuple(head["instructions"]), **parts["context"]),
        ended=EpisodeRows(instructions=tuple(head["ended"]), **parts["ended"]) if ended else None,
    )


def write_tensors(tensors: Mapping[str, Tensor]) -> tuple[list[Any], bytes]:
    """Return name, dtype and shape of each tensor, and their bytes."""
    arrays = {name: np.ascontiguousarray(to_array(name, values)) for name, values in tensors.items()}
    heads = [[name, array.dtype.str, list(tensors[name].shape)] for name, array in arrays.items()]
    return heads, b"".join(array.tobytes() for array in arrays.values())


def read_tensors(heads: list[Any], body: bytes) -> dict[str, Tensor]:
    """Return what :func:`write_tensors` wrote, in memory of its own."""
    found: dict[str, Tensor] = {}
    start = 0
    for name, dtype, shape in heads:
        array = np.frombuffer(body, dtype, math.prod(shape), start).reshape(shape)
        found[cast("str", name)] = torch.from_numpy(array.copy())
        start += array.nbytes
    return found
