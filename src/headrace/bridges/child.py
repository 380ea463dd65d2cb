"""The child of the other-interpreter bridge: one file that steps a simulator's environments for headrace.

It needs Python 3.8 or newer and numpy, and nothing of headrace: copy it into any virtual environment or container.
headrace starts it by itself (``headrace.bridge(python=…, entry=…)``). On another machine start it by hand::

    HEADRACE_TOKEN=secret python child.py --listen 0.0.0.0:7000 --entry my_envs:make

An entry is a function that makes one environment, with Gymnasium's interface: ``reset(seed=…) -> (obs, info)``,
``step(action) -> (obs, reward, terminated, truncated, info)``, ``observation_space`` and ``action_space`` (Gymnasium's
or Gym's own, or plain dicts such as ``{"type": "box", "shape": [7], "dtype": "float32", "low": -1, "high": 1}``), and
where it has them ``render()``, ``close()``, ``state_dict()`` and ``load_state_dict(state)``. A function with an
argument ``env_id`` receives the number of the environment that it makes.

Pictures that cost more than a step can be left to those who read them: an environment whose ``drawn_on_demand`` names
keys of its observation space leaves them out of what ``reset`` and ``step`` return, and has ``draw()``, which returns a
dict with them for the state that was returned last. It is called when these observations are read.

An entry that takes ``num_envs`` makes one simulator of all rows instead: the row protocol, see :class:`RowSimulation`.

A frame is 16 bytes (``HRC1``, length of the head, length of the body), a head of JSON and a body of raw bytes. Rows
pass through memory that both processes see, or, over a socket, in the bodies.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hmac
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import pickle
import platform
import secrets
import signal
import socket
import struct
import sys
import threading
import traceback
from typing import Any

import numpy as np

PROTOCOL = 1
FRAME = struct.Struct(">4sIQ")
MAGIC = b"HRC1"
LARGEST_HEAD = 1 << 24
LARGEST_BODY = 1 << 32
# of a client that has not shown the token yet
_LARGEST_GREETING = 1 << 20
_GREETING_SECONDS = 30.0
NO_SUCCESS_MEASURE = -1
_WITH_THE_FIRST = b"-"
RESULTS = ("reward", "terminated", "truncated", "success")
SUCCESS_KEYS = ("is_success", "success")


class RefusedError(Exception):
    """What the caller did wrong; the text alone is sent, without a traceback."""


class UnsupportedError(RefusedError):
    """What this simulator cannot do."""


class FailedError(Exception):
    """An environment raised something, which is the cause; the text says which one it was."""


# --- frames -----------------------------------------------------------------------------------------------------


def read_frame(stream: Any, known: bool = True) -> tuple[dict[str, Any], bytes]:
    """Return the next head and body; EOFError when the other side is gone, or sends what is no frame.

    A small one without a body from who is not ``known`` yet.
    """
    magic, head_size, body_size = FRAME.unpack(_exactly(stream, FRAME.size))
    most_head, most_body = (LARGEST_HEAD, LARGEST_BODY) if known else (_LARGEST_GREETING, 0)
    if magic != MAGIC or head_size > most_head or body_size > most_body:
        raise EOFError("expected a frame of headrace, got something else")
    try:
        head = json.loads(_exactly(stream, head_size).decode())
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise EOFError("expected a frame with a JSON object as head, got something else")
    return head, _exactly(stream, body_size)


def write_frame(stream: Any, head: dict[str, Any], body: bytes = b"") -> None:
    """Send one frame."""
    text = json.dumps(head).encode()
    stream.write(FRAME.pack(MAGIC, len(text), len(body)) + text + body)
    stream.flush()


def _exactly(stream: Any, size: int) -> bytes:
    data = stream.read(size) if size else b""
    if data is None or len(data) < size:
        raise EOFError("the other side is gone")
    return data


# --- spaces as JSON ---------------------------------------------------------------------------------------------


def space_to_json(space: Any) -> dict[str, Any]:
    """Return a space of Gymnasium or Gym, known by the name of its class, or a plain dict that describes one."""
    kinds = _kinds(space)
    if "Dict" in kinds:
        parts = _parts(space)
        items = parts.items() if hasattr(parts, "items") else parts
        return {"type": "dict", "spaces": [[key, space_to_json(part)] for key, part in items]}
    if "Tuple" in kinds:
        return {"type": "tuple", "spaces": [space_to_json(part) for part in _parts(space)]}
    if isinstance(space, dict):
        return _describe_box(space) if "Box" in kinds else space  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # checked by the parent
    if "Box" in kinds:
        return _box(space.low, space.high, np.dtype(space.dtype))
    if "Discrete" in kinds:
        return {"type": "discrete", "n": int(space.n), "start": int(getattr(space, "start", 0))}
    if "MultiDiscrete" in kinds:
        nvec = np.asarray(space.nvec)
        start = np.broadcast_to(np.asarray(getattr(space, "start", 0)), nvec.shape)
        return {
            "type": "multi_discrete",
            "nvec": nvec.tolist(),
            "start": start.tolist(),
            "dtype": np.dtype(space.dtype).str,
        }
    if "MultiBinary" in kinds:
        return {"type": "multi_binary", "shape": list(space.shape)}
    if "Text" in kinds:
        return {"type": "text", "max_length": int(space.max_length)}
    raise RefusedError(
        "space: expected Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict, Tuple or a dict with a type, got "
        + repr(space)
    )


def _kinds(space: Any) -> list[str]:
    """Return the names of a space's class and of those above it."""
    if isinstance(space, dict):
        return [str(space.get("type")).capitalize()]  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]  # the user's
    return [kind.__name__ for kind in type(space).__mro__]


def _parts(space: Any) -> Any:
    return space["spaces"] if isinstance(space, dict) else space.spaces


def _describe_box(space: dict[str, Any]) -> dict[str, Any]:
    """Return a plain dict that describes a Box, with what it leaves out."""
    shape, dtype = tuple(space["shape"]), np.dtype(space.get("dtype", "float32"))
    whole = np.iinfo(dtype) if dtype.kind in "iu" else None
    low = space.get("low", -np.inf if whole is None else whole.min)
    high = space.get("high", np.inf if whole is None else whole.max)
    return _box(np.broadcast_to(np.asarray(low), shape), np.broadcast_to(np.asarray(high), shape), dtype)


def _box(low: Any, high: Any, dtype: Any) -> dict[str, Any]:
    if dtype.kind not in "biuf":
        raise RefusedError("space: expected a Box of numbers, got dtype " + str(dtype))
    return {
        "type": "box",
        "shape": list(np.shape(low)),
        "dtype": dtype.str,
        "low": _bound(np.asarray(low).astype(dtype)),
        "high": _bound(np.asarray(high).astype(dtype)),
    }


def _bound(bound: Any) -> str:
    """Return the raw numbers; of a uniform bound just one, since an image has a million equal ones."""
    flat = np.ascontiguousarray(bound).reshape(-1)
    uniform = flat.size > 0 and bool((flat == flat[0]).all())
    return base64.b64encode((flat[:1] if uniform else flat).tobytes()).decode()


# --- environments -----------------------------------------------------------------------------------------------


def load_entry(entry: str) -> Any:
    """Return the function that ``module:name`` or ``path/to/file.py:name`` names."""
    where, _, name = entry.rpartition(":")
    if not where:
        raise RefusedError("entry: expected module:name or path/to/file.py:name, got " + repr(entry))
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("headrace_entry", where)
        if spec is None or spec.loader is None or not os.path.isfile(where):
            raise RefusedError("entry: expected a Python file, found none at " + os.path.abspath(where))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    for part in name.split("."):
        if not hasattr(module, part):
            raise RefusedError("entry: " + where + " has no " + repr(name))
        module = getattr(module, part)
    return module


class Group:
    """The environments of some rows, the same code in every interpreter. Owns them: ``close`` closes each.

    Different environments may be stepped by different threads at once; one environment only by one.
    """

    def __init__(self, pickles: bool = True) -> None:
        self.envs: dict[int, Any] = {}
        self.pickles = pickles
        self.arrays: Any = {}
        self.leaves: list[Any] = []
        self.late_leaves: list[Any] = []
        self.text_path: Any = None
        self.instruction_keys: Any = ()
        self.texts: dict[int, str] = {}
        self.spaces: Any = None
        self.snapshot: Any = None
        """Functions ``save(env)`` and ``restore(env, bytes)`` in place of an environment's own."""

    def make(self, make: Any, kwargs: dict[str, Any], env_ids: list[int]) -> None:
        """Make an environment for each row; the caller closes those that were made when one cannot be."""
        self.snapshot = getattr(make, "snapshot", None)
        numbered = "env_id" in _arguments(make)
        for env_id in env_ids:
            self.add(env_id, make(env_id=env_id, **kwargs) if numbered else make(**kwargs))

    def add(self, env_id: int, env: Any) -> None:
        """Take over an environment, which must have the spaces of the others."""
        self.envs[env_id] = env
        found = (space_to_json(env.observation_space), space_to_json(env.action_space))
        if self.spaces is not None and found != self.spaces:
            raise RefusedError(
                f"environment {env_id}: expected the spaces of environment {next(iter(self.envs))}, got observations "
                f"{env.observation_space} and actions {env.action_space}; an entry must make environments of one kind"
            )
        self.spaces = found

    def hello(self) -> dict[str, Any]:
        """Return what these environments are and can do."""
        env = next(iter(self.envs.values()))
        spec = getattr(env, "spec", None)
        saves = self.pickles and hasattr(env, "state_dict") and hasattr(env, "load_state_dict")
        return {
            "name": getattr(spec, "id", None) or type(getattr(env, "unwrapped", env)).__name__,
            "observation_space": self.spaces[0],
            "action_space": self.spaces[1],
            "render_mode": getattr(env, "render_mode", None),
            "drawn_on_demand": list(getattr(env, "drawn_on_demand", ())),
            "abilities": {"native": True, "reseed": True, "save": saves},
        }

    def bind(self, arrays: Any, leaves: Any, text_path: Any, instruction_keys: Any) -> None:
        """Read and write the rows of these arrays from now on; ``leaves`` are names and paths of observations."""
        self.arrays, self.text_path, self.instruction_keys = arrays, text_path, instruction_keys
        late = getattr(next(iter(self.envs.values()), None), "drawn_on_demand", ())
        self.leaves = row_leaves(arrays, [leaf for leaf in leaves if not leaf[1] or leaf[1][0] not in late])
        self.late_leaves = row_leaves(arrays, [leaf for leaf in leaves if leaf[1] and leaf[1][0] in late])

    def call(self, name: str, env_ids: Any, more: Any) -> list[Any]:
        """Do what the parent asks for: one entry of ``more``, and of what comes back, per environment, if any."""
        if name == "reset":
            return self.reset(env_ids, more)
        if name == "save":
            return [self.save(env_id) for env_id in env_ids]
        if name == "render":
            return [self.render(env_id) for env_id in env_ids]
        if name == "step":
            self.step(env_ids)
        elif name == "observe":
            self.observe(env_ids)
        elif name == "restore":
            for env_id, state in zip(env_ids, more):  # noqa: B905  (strict= is not in Python 3.8)
                self.restore(env_id, state)
                self.texts.pop(env_id, None)  # that of another episode; the next step has the right one
        else:
            raise RefusedError(f"expected a call of protocol {PROTOCOL}, got {name!r}")
        return []

    def reset(self, env_ids: Any, seeds: Any) -> list[str]:
        """Start an episode in each environment; its instruction, "" where there is none."""
        texts, env_id = [], env_ids[0]
        try:
            with np.errstate(over="ignore"):
                for env_id, seed in zip(env_ids, seeds):  # noqa: B905  (strict= is not in Python 3.8)
                    answer = self.envs[env_id].reset(seed=seed)
                    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
                        raise RefusedError(
                            f"environment {env_id}: expected reset() to give (obs, info), got {type(answer)}"
                        )
                    obs, info = answer
                    write_row(self.leaves, env_id, obs)
                    text = "" if self.text_path is None else str(_at(obs, self.text_path))
                    self.texts[env_id] = text
                    said = [info[key] for key in self.instruction_keys if isinstance(info.get(key), str)]
                    texts.append(said[0] if said else text)
        except RefusedError:
            raise
        except Exception as error:  # an environment may raise anything: it is said which one it was
            raise _make_failed_error(env_id, "reset", error) from error
        return texts

    def step(self, env_ids: Any) -> None:
        """Step each environment with the action of its row; the results go to its row."""
        # Python's own look-ups are most of what a cheap environment costs beside itself
        envs, leaves, path, texts, env_id = self.envs, self.leaves, self.text_path, self.texts, env_ids[0]
        actions = self.arrays["actions"]
        rewards, terminated, truncated, success = (self.arrays[name] for name in RESULTS)
        try:
            with np.errstate(over="ignore"):
                for env_id in env_ids:
                    # a copy: an environment may keep its action, and the row is written again
                    answer = envs[env_id].step(actions[env_id].copy())
                    if not isinstance(answer, (tuple, list)) or len(answer) != 5:
                        raise RefusedError(
                            f"environment {env_id}: expected step() to give (obs, reward, terminated, truncated, "
                            f"info), got {len(answer) if isinstance(answer, (tuple, list)) else type(answer)}"
                        )
                    obs, reward, ended, cut, info = answer
                    write_row(leaves, env_id, obs)
                    if path is not None:
                        now = str(_at(obs, path))
                        if texts.setdefault(env_id, now) != now:
                            raise RefusedError(refuse_changed_text(env_id, texts[env_id], now))
                    rewards[env_id] = float(reward)
                    terminated[env_id], truncated[env_id] = bool(ended), bool(cut)
                    said = success_of(info) if ended or cut else None
                    success[env_id] = NO_SUCCESS_MEASURE if said is None else bool(said)
        except RefusedError:
            raise
        except Exception as error:  # an environment may raise anything: it is said which one it was
            raise _make_failed_error(env_id, "step", error) from error

    def observe(self, env_ids: Any) -> None:
        """Draw what some environments draw on demand, into their rows."""
        env_id = env_ids[0]
        try:
            for env_id in env_ids:
                write_row(self.late_leaves, env_id, self.envs[env_id].draw())
        except RefusedError:
            raise
        except Exception as error:  # an environment may raise anything: it is said which one it was
            raise _make_failed_error(env_id, "draw", error) from error

    def save(self, env_id: int) -> bytes:
        """Return the state of one environment, from its own ``state_dict``."""
        env = self.envs[env_id]
        if self.snapshot is not None:
            return self.snapshot[0](env)
        if not self.pickles or not hasattr(env, "state_dict") or not hasattr(env, "load_state_dict"):
            raise UnsupportedError(
                "state_dict: expected state_dict() and load_state_dict(state) of the environment, in a child that "
                "headrace started itself; give it both, or do without snapshots"
            )
        return pickle.dumps(env.state_dict(), protocol=4)

    def restore(self, env_id: int, state: bytes) -> None:
        """Put one environment back into a state of :meth:`save`."""
        if self.snapshot is None:
            self.envs[env_id].load_state_dict(pickle.loads(state))
        else:
            self.snapshot[1](self.envs[env_id], state)

    def render(self, env_id: int) -> Any:
        """Return one picture of one environment."""
        try:
            return self.envs[env_id].render()
        except Exception as error:  # an environment may raise anything: it is said which one it was
            raise _make_failed_error(env_id, "render", error) from error

    def close(self) -> None:
        """Close every environment, also after one that cannot be closed."""
        for env in self.envs.values():
            try:
                if hasattr(env, "close"):
                    env.close()
            except Exception:  # noqa: BLE001  (whatever it is, the others must be closed)
                traceback.print_exc()


def _make_failed_error(env_id: int, call: str, error: Exception) -> FailedError:
    return FailedError(f"environment {env_id} raised {type(error).__name__} in {call}: {error}")


def refuse_changed_text(env_id: int, text: str, now: str) -> str:
    """Return what is wrong with an instruction that changes: a reader at the start would not see it."""
    return (
        f"environment {env_id}: expected the instruction {text!r} for the whole episode, got {now!r} in a step; "
        "begin a new episode with a new instruction"
    )


def arrays_over(memory: Any, fields: Any) -> dict[str, Any]:
    """Arrays over one block of memory: of each name, shape, dtype and offset in bytes."""
    arrays = {}
    for name, shape, dtype, offset in fields:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(memory, np.dtype(dtype), count, offset).reshape(shape)
    return arrays


def row_leaves(arrays: Any, leaves: Any) -> list[Any]:
    """For each (name, path) of an observation what :func:`write_row` needs, with the dtypes that are known to cast."""
    found = [(name, path, arrays["obs:" + name]) for name, path in leaves]
    return [(name, path, rows, rows.shape[1:], {rows.dtype}) for name, path, rows in found]


def write_row(leaves: Any, env_id: int, obs: Any) -> None:
    """Copy one observation into its row, with its shape and dtype checked."""
    for name, path, rows, shape, dtypes in leaves:
        value = np.asarray(_at(obs, path) if path else obs)
        if value.shape != shape or value.dtype not in dtypes:
            if value.shape != shape or not np.can_cast(value.dtype, rows.dtype, "same_kind"):
                raise RefusedError(
                    f"observation {name!r} of environment {env_id}: expected {rows.dtype} {shape} as its space says, "
                    f"got {value.dtype} {value.shape}; make the environment return what its observation_space declares"
                )
            dtypes.add(value.dtype)
        rows[env_id] = value


def _at(obs: Any, path: list[Any]) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def success_of(info: Any) -> Any:
    """Return what an info says of success, of one environment or of all rows; None where it says nothing."""
    return next((info[key] for key in SUCCESS_KEYS if info.get(key) is not None), None)


def read_instruction(infos: Any, keys: Any, row: int) -> Any:
    """Return the instruction of a row in the info of a batch, a text for all or one per row.

    None where there is none.
    """
    for key in keys:
        said = infos.get(key)
        said = said if said is None or isinstance(said, str) else said[row]
        if isinstance(said, str):
            return said
    return None


# --- batched simulators -------------------------------------------------------------------------------------------


class RowSimulation:
    """A batched simulator of the row protocol, any subset of whose rows can act; the same code in every interpreter.

    The simulator has ``num_envs`` (N), ``observation_space`` and ``action_space`` of one row, and these methods, in
    which an array is numpy's, or a tensor on the simulator's own device:

    - ``reset_rows(ids, seeds) -> (obs, info)``: start an episode in some rows (int64 (n,) each), each from its seed;
      ``obs`` is of all rows, (N, …), of which those of ``ids`` are read.
    - ``step(actions) -> (obs, reward, terminated, truncated, info)``: advance all rows; never reset one. Where an
      episode ended, ``obs`` is its last.
    - ``save_rows(mask) -> saved`` and ``restore_rows(mask, saved)``: everything that the future of some rows (bool
      (N,)) depends on, and putting it back, perhaps many times; ``saved`` is not written to.
    - ``step_rows(actions, mask)``: as ``step``, but only the rows of the mask change.

    With ``step_rows`` the fidelity is ``native``; with ``save_rows`` and ``restore_rows`` alone it is ``restore``.
    ``reseeds = False`` says that episodes are not functions of their seeds.
    """

    def __init__(self, sim: Any) -> None:
        names = ("save_rows", "restore_rows")
        missing = [name for name in ("reset_rows", "num_envs", "observation_space") if not hasattr(sim, name)]
        if not hasattr(sim, "step_rows"):  # rows that rest must be put back
            missing += [name for name in ("step", *names) if not hasattr(sim, name)]
        if missing:
            raise RefusedError(
                "row protocol: expected num_envs, observation_space, action_space, reset_rows, and step_rows, or step "
                f"with save_rows and restore_rows, of {type(sim).__name__}; it has no {', '.join(missing)}"
            )
        self.sim = sim
        self.num_envs = int(sim.num_envs)
        self.saves = all(hasattr(sim, name) for name in names)
        self.reseeds = bool(getattr(sim, "reseeds", True))
        self.fidelity = "native" if hasattr(sim, "step_rows") else "restore"
        self._seeds: Any = np.zeros(self.num_envs, np.int64)
        # the simulator's own episode is over, and it has not been reset since
        self._unreset: Any = np.zeros(self.num_envs, np.bool_)
        self._kept: Any = None
        self._kept_idle: Any = None

    def reset(self, ids: Any, seeds: Any) -> Any:
        """Start an episode in each of some rows."""
        rows = np.asarray(ids, np.int64)
        self._seeds[rows] = seeds
        return self._restart(rows)

    def step(self, actions: Any, active: Any) -> Any:
        """Advance the rows of a mask, bool (N,); the others stand still, as far as the fidelity says."""
        sim, all_rows = self.sim, bool(active.all())
        if self.fidelity == "native":
            return sim.step(actions) if all_rows and hasattr(sim, "step") else sim.step_rows(actions, active)
        idle = None if all_rows else ~active
        if idle is not None and self._unreset.any():
            # an ended row that was not reset may refuse to step: what it does from here is not seen
            self._restart(np.flatnonzero(self._unreset))
        if idle is None:
            self._kept = None
        elif self._kept is None or (idle != self._kept_idle).any():
            self._kept, self._kept_idle = sim.save_rows(idle), idle
        result = sim.step(actions)
        self._unreset = to_numpy(result[2]) | to_numpy(result[3])
        if idle is not None:
            sim.restore_rows(idle, self._kept)
            self._unreset &= active
        return result

    def save(self) -> dict[str, Any]:
        """Return everything that the future of all rows depends on."""
        if not self.saves:
            raise UnsupportedError(f"state_dict: {type(self.sim).__name__} has no save_rows; do without snapshots")
        all_rows = np.ones(self.num_envs, np.bool_)
        rows = [self._seeds.tolist(), self._unreset.tolist()]
        return {"saved": self.sim.save_rows(all_rows), "rows": rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Put all rows back."""
        seeds, *_, unreset = state["rows"]  # 0.2 has another list between them
        if len(seeds) != self.num_envs:
            raise RefusedError(f"snapshot: expected {self.num_envs} rows in one batch, got {len(seeds)}")
        self.sim.restore_rows(np.ones(self.num_envs, np.bool_), state["saved"])
        self._seeds = np.array(seeds, np.int64)
        self._unreset = np.array(unreset, np.bool_)
        self._kept = None

    def _restart(self, rows: Any) -> Any:
        self._unreset[rows] = False
        if self._kept is not None and self._kept_idle[rows].any():
            self._kept = None
        return self.sim.reset_rows(rows, self._seeds[rows].copy())


class RowGroup(Group):
    """The rows of one batched simulator. Owns it."""

    def make(self, make: Any, kwargs: dict[str, Any], env_ids: list[int]) -> None:
        """Make the simulator."""
        self.envs[env_ids[0]] = sim = make(num_envs=len(env_ids), **kwargs)
        if not hasattr(sim, "reset_rows"):
            raise RefusedError(
                f"entry: expected a batched simulator with reset_rows of a function that takes num_envs, got "
                f"{type(sim).__name__}; an entry for single environments takes no num_envs"
            )
        self.add(env_ids[0], sim)
        self.rows = RowSimulation(sim)
        if self.rows.num_envs != len(env_ids):
            raise RefusedError(f"entry: expected a simulator of {len(env_ids)} rows, got {self.rows.num_envs}")
        self.env_ids = np.asarray(env_ids)
        self.row_of = {env_id: row for row, env_id in enumerate(env_ids)}
        self.idle_action = idle_action(self.spaces[1])

    def hello(self) -> dict[str, Any]:
        """Return what this simulator is and can do."""
        rows, answer = self.rows, super().hello()
        answer["name"] = getattr(rows.sim, "name", None) or answer["name"]
        answer["fidelity"] = rows.fidelity
        answer["no_identity"] = str(getattr(rows.sim, "no_identity", ""))
        native = rows.fidelity == "native"
        answer["abilities"] = {"native": native, "reseed": rows.reseeds, "save": self.pickles and rows.saves}
        return answer

    def reset(self, env_ids: Any, seeds: Any) -> list[str]:
        """Start an episode in each of some rows; its instruction, "" where there is none."""
        places = [self.row_of[env_id] for env_id in env_ids]
        answer = self.rows.reset(places, seeds)
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise RefusedError(f"expected reset_rows() to give (obs, info), got {type(answer)}")
        obs, info = answer
        self.write_rows(env_ids, places, obs)
        return [read_instruction(info, self.instruction_keys, place) or "" for place in places]

    def step(self, env_ids: Any) -> None:
        """Step some rows; the results go to their rows of the exchange."""
        places = [self.row_of[env_id] for env_id in env_ids]
        active = np.zeros(len(self.env_ids), np.bool_)
        active[places] = True
        actions = self.arrays["actions"][self.env_ids]
        actions[~active] = self.idle_action
        answer = self.rows.step(actions, active)
        if not isinstance(answer, (tuple, list)) or len(answer) != 5:
            raise RefusedError("expected step() to give (obs, reward, terminated, truncated, info)")
        obs, reward, terminated, truncated, info = answer
        self.write_rows(env_ids, places, obs)
        ended, cut = to_numpy(terminated)[places], to_numpy(truncated)[places]
        arrays = self.arrays
        arrays["reward"][env_ids] = to_numpy(reward)[places]
        arrays["terminated"][env_ids], arrays["truncated"][env_ids] = ended, cut
        said = success_of(info)
        succeeded = NO_SUCCESS_MEASURE if said is None else to_numpy(said)[places] > 0
        arrays["success"][env_ids] = np.where(ended | cut, succeeded, NO_SUCCESS_MEASURE)

    def write_rows(self, env_ids: list[int], places: list[int], obs: Any) -> None:
        """Copy some rows of a batched observation, with shapes and dtypes checked."""
        for name, path, target, shape, _ in self.leaves:
            value = to_numpy(_at(obs, path))
            if value.shape != (len(self.env_ids),) + shape or not np.can_cast(value.dtype, target.dtype, "same_kind"):  # noqa: RUF005
                raise RefusedError(
                    f"observation {name!r}: expected {target.dtype} {(len(self.env_ids),) + shape} as its space says, "  # noqa: RUF005
                    f"got {value.dtype} {value.shape}"
                )
            with np.errstate(over="ignore"):
                target[env_ids] = value[places]

    def save(self, env_id: int) -> bytes:
        """Return the state of all rows, kept with the first one."""
        if not self.pickles:
            raise UnsupportedError("state_dict: expected a child that headrace started itself; do without snapshots")
        return pickle.dumps(self.rows.save(), protocol=4) if env_id == self.env_ids[0] else _WITH_THE_FIRST

    def restore(self, env_id: int, state: bytes) -> None:
        """Put all rows back."""
        if (state != _WITH_THE_FIRST) != (env_id == self.env_ids[0]):
            raise RefusedError("snapshot: expected one of as many workers as there are now")
        if state != _WITH_THE_FIRST:
            self.rows.restore(pickle.loads(state))

    def render(self, env_id: int) -> Any:
        """Return one picture of one row."""
        return self.rows.sim.render(self.row_of[env_id])


def make_group(entry: str, kwargs: dict[str, Any], env_ids: list[int], pickles: bool) -> Any:
    """Return the environments of some rows: one each, or one simulator of all, if the entry takes ``num_envs``.

    A class with ``answers_itself`` is neither: it has ``hello()``, ``answer(head, body)`` and ``close()``.
    """
    make = load_entry(entry)
    if getattr(make, "answers_itself", False):  # a policy instead of environments
        return make(**kwargs)
    group = RowGroup(pickles) if "num_envs" in _arguments(make) else Group(pickles)
    try:
        group.make(make, kwargs, env_ids)
    except BaseException:
        group.close()
        raise
    return group


def _arguments(make: Any) -> Any:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # a function of C without a signature
        return ()


def to_numpy(value: Any) -> Any:
    """Return an array of numpy, whatever holds the numbers and wherever."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def idle_action(space: dict[str, Any]) -> Any:
    """Return what rows without an action play: zeros, or the nearest allowed."""
    if space["type"] == "box":
        low, high = (np.frombuffer(base64.b64decode(space[name]), space["dtype"]) for name in ("low", "high"))
        return np.clip(np.zeros(space["shape"], space["dtype"]).reshape(-1), low, high).reshape(space["shape"])
    return np.asarray(space.get("start", 0))


# --- answering --------------------------------------------------------------------------------------------------


def serve(incoming: Any, outgoing: Any, entry: str | None, memory_fd: Any, connection: Any, token: str) -> None:
    """Greet, make the environments, and answer calls until asked to close or left alone.

    At a socket, ``connection``, a client must show the token first, and soon.
    """
    nonce = secrets.token_hex(16)
    greeting = {"protocol": PROTOCOL, "python": platform.python_version(), "numpy": np.__version__, "nonce": nonce}
    group: Any = None
    shared = memory_fd is not None
    known = connection is None
    # for the whole greeting: a client that sends a byte now and then stays below any timeout of a read
    deadline = threading.Timer(_GREETING_SECONDS, _hang_up, (connection,))
    deadline.daemon = True
    try:
        if not known:
            deadline.start()
        write_frame(outgoing, greeting)
        while True:
            head, body = read_frame(incoming, known)
            call = head.get("call")
            if call == "close":
                return
            try:
                if call == "make" and group is None:
                    if not known:
                        _check_proof(head.get("proof"), prove_token(token, nonce))
                        deadline.cancel()
                        known = True
                    group = make_group(entry or head["entry"], head["kwargs"], head["env_ids"], pickles=shared)
                    answer: dict[str, Any] = group.hello()
                    reply = b""
                elif group is None or call == "make":
                    raise RefusedError("expected the call make first, and once, got " + repr(call))
                elif isinstance(group, Group):
                    answer, reply = _answer(group, head, body, memory_fd)
                else:
                    answer, reply = group.answer(head, body)
            except RefusedError as error:
                answer, reply = {"error": type(error).__name__, "refused": True, "message": str(error)}, b""
            except Exception as error:  # noqa: BLE001  (whatever it is, the parent raises it, with this traceback)
                trace = traceback.format_exc().rstrip()
                answer = {"error": type(error).__name__, "message": str(error), "traceback": trace}
                reply = b""
            write_frame(outgoing, answer, reply)
            if not known:  # one guess for each connection
                return
    except (EOFError, OSError):  # the parent is gone
        pass
    finally:
        deadline.cancel()
        if group is not None:
            group.close()


def _hang_up(connection: Any) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        connection.shutdown(socket.SHUT_RDWR)


def _answer(group: Group, head: dict[str, Any], body: bytes, memory_fd: Any) -> tuple[dict[str, Any], bytes]:
    call, env_ids, more = head["call"], head.get("env_ids", []), head.get("seeds")
    if call == "layout":
        size = max(int(head["nbytes"]), 1)
        # the parent's memory where there is such, else our own
        memory = bytearray(size) if memory_fd is None else mmap.mmap(memory_fd, size)
        group.bind(arrays_over(memory, head["fields"]), head["leaves"], head["text_path"], head["instruction_keys"])
        return {}, b""
    if call == "step" and memory_fd is None:
        actions = group.arrays["actions"]
        actions[env_ids] = np.frombuffer(body, actions.dtype).reshape(len(env_ids), *actions.shape[1:])
    if call == "restore":
        if not group.pickles:
            raise UnsupportedError(
                "restore: expected a child that headrace started itself, got one that listens at a socket"
            )
        more = pieces(body, head["sizes"])
    done = group.call(call, env_ids, more)
    if call == "reset":
        return {"told": done}, _rows(group, env_ids, memory_fd, group.leaves, ())
    if call == "step":
        return {}, _rows(group, env_ids, memory_fd, group.leaves, RESULTS)
    if call == "observe":
        return {}, _rows(group, env_ids, memory_fd, group.late_leaves, ())
    if call == "save":
        return {"sizes": [len(state) for state in done]}, b"".join(done)
    if call == "render":
        images = [_picture(drawn) for drawn in done]
        return {"shapes": [list(image.shape) for image in images]}, b"".join(image.tobytes() for image in images)
    return {}, b""


def pieces(body: bytes, sizes: Any) -> list[bytes]:
    """Return a body cut into pieces of these sizes, which must be all of it."""
    if sum(sizes) != len(body) or min(sizes, default=0) < 0:
        raise RefusedError(f"expected {list(sizes)[:8]} bytes, got {len(body)}")
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [body[end - size : end] for size, end in zip(sizes, ends)]  # noqa: B905  (strict= is not in Python 3.8)


def _picture(drawn: Any) -> Any:
    image = np.asarray(drawn)
    if image.dtype != np.uint8:
        raise RefusedError(f"expected render() to give a picture uint8 (H, W, 3), got {image.dtype} {image.shape}")
    return np.ascontiguousarray(image)


def _rows(group: Group, env_ids: list[int], memory_fd: Any, leaves: list[Any], results: tuple[str, ...]) -> bytes:
    """Return the rows that were written, for a parent that does not see our memory."""
    if memory_fd is not None:
        return b""
    parts = [rows[env_ids].tobytes() for _, _, rows, _, _ in leaves]
    return b"".join(parts + [group.arrays[name][env_ids].tobytes() for name in results])


def _check_proof(given: Any, expected: str) -> None:
    if not hmac.compare_digest(str(given).encode(), expected.encode()):
        raise RefusedError("token: expected the one that the child was started with, got another")


def prove_token(token: str, nonce: str) -> str:
    """Return what shows that both sides know the token, without sending it."""
    return hmac.new(token.encode(), nonce.encode(), "sha256").hexdigest()


# --- starting ---------------------------------------------------------------------------------------------------


def _listen(address: str, entry: str, token: str, once: bool) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_server((host or "127.0.0.1", int(port))) as server:
        print(f"headrace child: {entry} listens at port {server.getsockname()[1]}", flush=True)
        while True:
            connection, peer = server.accept()
            print(f"headrace child: serving {peer[0]}", flush=True)
            try:
                _serve_at(connection, entry, token)
            except OSError as error:  # the client went in the middle of an answer
                print(f"headrace child: {peer[0]} is gone: {error}", flush=True)
            if once:
                return


def _serve_at(connection: Any, entry: str, token: str) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with connection.makefile("rb") as incoming, connection.makefile("wb") as outgoing:
            serve(incoming, outgoing, entry, None, connection, token)


def main() -> None:
    """Serve the parent that started us, or listen at an address."""
    parser = argparse.ArgumentParser(description="Steps a simulator's environments for headrace.", prog="child.py")
    parser.add_argument(
        "--fds", nargs=3, type=int, metavar="FD", help="used by headrace, which starts this file itself"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="wait for headrace.bridge(address=…) at this address")
    parser.add_argument("--entry", metavar="MODULE:NAME", help="with --listen: the function that makes an environment")
    parser.add_argument("--once", action="store_true", help="with --listen: end after one client")
    args = parser.parse_args()
    # not the folder of this file, whose other modules are none of the simulator's
    sys.path[0] = os.getcwd()
    if args.listen:
        token = os.environ.get("HEADRACE_TOKEN", "")
        if not token or not args.entry:
            parser.error("--listen needs --entry, and a token in the environment variable HEADRACE_TOKEN")
        _listen(args.listen, args.entry, token, args.once)
        return
    if not args.fds:
        parser.error("expected --listen HOST:PORT; headrace.bridge(python=…, entry=…) starts this file by itself")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in args.fds:
        # what the simulator starts must not hold them: the end of a pipe is how the death of this process is seen
        os.set_inheritable(descriptor, False)
    incoming, outgoing, memory = args.fds
    with os.fdopen(incoming, "rb") as reader, os.fdopen(outgoing, "wb") as writer:
        serve(reader, writer, None, memory, None, "")


if __name__ == "__main__":
    main()
