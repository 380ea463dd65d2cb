"""mjlab's manager-based tasks as a batched simulator of the row protocol; runs in mjlab's own interpreter.

mjlab pins a MuJoCo that headrace's own tasks cannot use, so it stays in a virtual environment of its own, and this file
is the entry there: it needs mjlab (1.6) and what that brings, and nothing of headrace::

    env = headrace.bridge(
        python="…/bin/python", entry=headrace.bridges.MJLAB_ENTRY, workers=1, num_envs=64,
        env_kwargs={"task": "Mjlab-Cartpole-Balance"},
    )

Suspension puts rows back: every tensor with a row per environment, in the physics, the managers, sensors and actuators,
is found once, and its rows are saved before a step and restored after it. That this is everything is proved when the
task is made, by replaying a few steps.
"""

from __future__ import annotations

import random
from typing import Any

import mjlab.tasks  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]  # registers tasks
import numpy as np
import torch
import warp as wp
from mjlab.envs import ManagerBasedRlEnv  # pyright: ignore[reportMissingImports]
from mjlab.tasks.registry import list_tasks, load_env_cfg  # pyright: ignore[reportMissingImports]
from mjlab.utils.buffers import CircularBuffer  # pyright: ignore[reportMissingImports]

_REHEARSED_STEPS = 3
# packages whose objects have no rows; mujoco_warp's do
_SKIPPED = {"mujoco", "warp", "torch", "threading", "logging", "builtins", "functools", "numpy", "types"}


def make(
    num_envs: int,
    task: str,
    device: str = "cpu",
    play: bool = False,
    noise: bool = True,
    overrides: dict[str, Any] | None = None,
    instruction: str = "",
    success: str | None = None,
) -> MjlabRows:
    """Return a registered task of mjlab.

    Args:
        num_envs: how many rows.
        task: its id, for example ``Mjlab-Cartpole-Balance``.
        device: of the simulation; mjlab runs on ``cpu``, too.
        play: mjlab's own settings for playing a policy; mind that most of them never time out.
        noise: False switches the noise of all observation groups off.
        overrides: settings of the task by path, for example ``{"episode_length_s": 5.0, "sim.mujoco.timestep":
        0.005}``.
        instruction: the text of every episode; mjlab has no texts.
        success: the termination term that means success; None where there is no such measure.
    """
    if task not in list_tasks():
        raise ValueError(f"task: expected one of {list_tasks()}, got {task!r}")
    cfg = load_env_cfg(task, play=play)
    for path, value in (overrides or {}).items():
        *parents, name = path.split(".")
        target: Any = cfg
        for parent in parents:
            target = target[parent] if isinstance(target, dict) else getattr(target, parent)
        if isinstance(target, dict):
            target[name] = value
        elif hasattr(target, name):
            setattr(target, name, value)
        else:
            raise ValueError(f"overrides: expected a setting of {type(target).__name__}, got {path!r}")
    if not noise:
        for group in cfg.observations.values():
            group.enable_corruption = False
    cfg.scene.num_envs = num_envs
    cfg.auto_reset = False
    cfg.seed = 0
    if cfg.scene.terrain is not None and cfg.scene.terrain.terrain_type == "plane":
        cfg.scene.env_spacing = 0.0  # worlds do not meet, and a position far from zero has other bits
    return MjlabRows(cfg, device, name=task, instruction=instruction, success=success)


class MjlabRows:
    """A manager-based environment of mjlab, any rows of which can be reset, saved and put back."""

    def __init__(self, cfg: Any, device: str, *, name: str, instruction: str = "", success: str | None = None) -> None:
        self.name, self.device, self.num_envs = name, device, cfg.scene.num_envs
        self.no_identity = "; ".join(_reasons_against_identity(cfg))
        self.reseeds = not self.no_identity
        self._env = ManagerBasedRlEnv(cfg, device=device)
        self._instruction, self._success = instruction, success
        if success is not None and success not in self._env.termination_manager.active_terms:
            terms = self._env.termination_manager.active_terms
            raise ValueError(f"success: expected a termination term of {terms}, got {success!r}")
        groups = self._env.single_observation_space.spaces
        # what others call policy
        self._names = {group: "policy" if group == "actor" and "policy" not in groups else group for group in groups}
        self.observation_space = _describe_space(self._env.single_observation_space)
        self.observation_space["spaces"] = {
            self._names[group]: space for group, space in self.observation_space["spaces"].items()
        }
        self.action_space = _describe_space(self._env.single_action_space)
        self._places: list[tuple[Any, Any, int]] = []
        self._rings: list[Any] = []
        self._rehearse()

    def reset_rows(self, ids: Any, seeds: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode in each of some rows: one row after the other, each from its own seed.

        mjlab draws from global generators, and its reset computes the forward dynamics of every row, which moves warm
        starts: so the other rows are put back after each.
        """
        first: dict[str, Any] = {}
        for row, seed in zip(ids.tolist(), seeds.tolist(), strict=True):
            others = np.arange(self.num_envs) != row
            saved = self.save_rows(others)
            _seed(int(seed))
            obs, _ = self._env.reset(env_ids=torch.tensor([row], device=self.device))
            self.restore_rows(others, saved)
            for name, values in self._rename(obs).items():
                _take(first, name, values, row)
        return first, {"instruction": self._instruction}

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Advance every row."""
        before = self._generator_state() if self.reseeds else None
        obs, reward, terminated, truncated, _ = self._env.step(torch.as_tensor(actions, device=self.device))
        if before is not None and not torch.equal(before, self._generator_state()):
            raise RuntimeError(
                f"{self.name}: expected a step to draw no random numbers, as its settings say, but one did: what it "
                f"drew "
                "depends on all rows, so that episodes are not functions of their seeds. Pass "
                'env_kwargs={"overrides": …} that switch the term off that draws'
            )
        info = {} if self._success is None else {"success": self._env.termination_manager.get_term(self._success)}
        return self._rename(obs), reward, terminated, truncated, info

    def save_rows(self, mask: Any) -> list[Any]:
        """Return the rows of every tensor that has one per environment."""
        ids = torch.from_numpy(np.flatnonzero(mask)).to(self.device)
        saved: list[Any] = [_value(owner, key).index_select(axis, ids) for owner, key, axis in self._places]
        for ring in self._rings:
            # by age, since the slot of an age moves with every step
            slots = _slots(ring)
            saved.append(None if ring._buffer is None else ring._buffer[slots[:, None], ids])
        return saved

    def restore_rows(self, mask: Any, saved: list[Any]) -> None:
        """Put rows back."""
        ids = torch.from_numpy(np.flatnonzero(mask)).to(self.device)
        for (owner, key, axis), values in zip(self._places, saved):  # noqa: B905  # rings follow
            _value(owner, key).index_copy_(axis, ids, values)
        for ring, values in zip(self._rings, saved[len(self._places) :], strict=True):
            if values is not None:
                ring._buffer[_slots(ring)[:, None], ids] = values

    def close(self) -> None:
        """Release the simulation."""
        self._env.close()

    def _rename(self, obs: dict[str, Any]) -> dict[str, Any]:
        return {self._names[group]: values for group, values in obs.items()}

    def _generator_state(self) -> Any:
        return torch.cuda.get_rng_state(self.device) if "cuda" in str(self.device) else torch.get_rng_state()

    def _rehearse(self) -> None:
        """Find what has rows, and prove that it is everything: steps after a restore repeat bit for bit."""
        env = self._env
        env.reset()
        still = torch.zeros((self.num_envs, self.action_space["shape"][0]), device=self.device)
        env.step(still)
        self._places, self._rings = _find_rows(env, self.num_envs)
        env.reset()
        all_rows = np.ones(self.num_envs, np.bool_)
        saved, generator = self.save_rows(all_rows), self._generator_state()
        played: list[list[Any]] = []
        for _ in range(2):
            self.restore_rows(all_rows, saved)
            torch.cuda.set_rng_state(generator, self.device) if generator.is_cuda else torch.set_rng_state(generator)
            seen: list[Any] = []
            for _ in range(_REHEARSED_STEPS):
                obs, reward, *_ = env.step(still + 0.1)
                seen += [part.clone() for part in (*_leaves(obs), reward)]
                env._manual_reset_pending[:] = False
            played.append(seen)
        if not all(torch.equal(a, b) for a, b in zip(*played, strict=True)):
            raise RuntimeError(
                f"{self.name}: steps after a restore of all rows do not repeat those before, so there is state that is "
                "not in a tensor with a row per environment; on a GPU contacts alone can do this (mujoco_warp issue "
                "562)"
            )
        env.reset()


def _reasons_against_identity(cfg: Any) -> list[str]:
    """Why an episode of this task is more than its seed and its actions."""
    reasons: list[str] = []
    for name, group in cfg.observations.items():
        for term_name, term in group.terms.items():
            if term is None:
                continue
            if group.enable_corruption and term.noise is not None:
                reasons.append(f"noise in each step of {name}/{term_name}, from a generator that all rows share")
            drawn = term.delay_min_lag != term.delay_max_lag or term.delay_hold_prob > 0
            if term.delay_max_lag > 0 and drawn:
                reasons.append(f"a random delay of {name}/{term_name}, from a generator that all rows share")
    for name, event in cfg.events.items():
        if event.mode == "startup":
            reasons.append(f"event {name} at startup belongs to the row, not to the episode")
        elif event.mode != "reset":
            reasons.append(f"event {name} in mode {event.mode}, from a generator that all rows share")
        elif event.min_step_count_between_reset > 0:
            reasons.append(f"event {name} does not come with every reset")
    for name, command in cfg.commands.items():
        if command.resampling_time_range[0] < cfg.episode_length_s:
            reasons.append(f"command {name} is drawn again within an episode, from a generator that all rows share")
    reasons += [f"curriculum {name} depends on the episodes before" for name in cfg.curriculum]
    terrain = cfg.scene.terrain
    if terrain is not None and terrain.terrain_type != "plane":
        reasons.append("the place on the terrain belongs to the row, not to the episode")
    return reasons


def _find_rows(root: Any, count: int) -> tuple[list[tuple[Any, Any, int]], list[Any]]:
    """Yield every place (owner, key, axis) of a tensor with ``count`` rows below ``root``, and every history ring."""
    places: list[tuple[Any, Any, int]] = []
    rings: list[Any] = []
    seen: set[int] = set()
    memory: set[tuple[int, Any, Any]] = set()
    stack: list[Any] = [root]
    while stack:
        owner = stack.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, CircularBuffer):
            rings.append(owner)
        for key, value in _parts(owner):
            if isinstance(value, wp.array):
                value = _of_warp(value)
                owner_of, key_of = value, None
            else:
                owner_of, key_of = owner, key
            if isinstance(value, torch.Tensor):
                ring_memory = isinstance(owner, CircularBuffer) and key == "_buffer"
                shape = value.shape
                axis = 0 if shape[:1] == (count,) else 1 if shape[1:2] == (count,) else None
                where = (value.data_ptr(), tuple(shape), value.stride())
                if axis is None or ring_memory or value.stride(axis) == 0 or not value.numel() or where in memory:
                    continue
                memory.add(where)
                places.append((owner_of, key_of, axis))
            elif value is not None and _has_parts(value):
                stack.append(value)
    return places, rings


def _parts(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return list(owner.items())
    return list(enumerate(owner)) if isinstance(owner, (list, tuple)) else list(vars(owner).items())


def _has_parts(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return True
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not isinstance(value, type) and package not in _SKIPPED


def _of_warp(array: Any) -> Any:
    """Return a tensor over the memory of an array of Warp; None where it has no numbers."""
    if array.size == 0 or array.numpy().dtype.kind not in "biuf":  # structs and textures, which have no rows
        return None
    return wp.to_torch(array)


def _value(owner: Any, key: Any) -> Any:
    """Return the tensor at a place; fetched anew, since managers replace some of theirs."""
    if key is None:
        return owner
    return owner[key] if isinstance(owner, (dict, list, tuple)) else getattr(owner, key)


def _slots(ring: Any) -> Any:
    """Return int64 (length,): where the frames of a ring lie, from the newest to the oldest."""
    return torch.remainder(ring._pointer - torch.arange(ring._max_len, device=ring._device), ring._max_len)


def _seed(seed: int) -> None:
    """As mjlab's own ``seed_rng``, without a line of output for each episode."""
    random.seed(seed)
    np.random.seed(seed)
    wp.rand_init(wp.int32(seed & 0x7FFF_FFFF))
    torch.manual_seed(seed)


def _take(target: dict[str, Any], name: str, values: Any, row: int) -> None:
    """Copy one row of an observation, nested as it is."""
    if isinstance(values, dict):
        inner = target.setdefault(name, {})
        for key, part in values.items():
            _take(inner, key, part, row)
        return
    if name not in target:
        target[name] = torch.zeros_like(values)
    target[name][row] = values[row]


def _leaves(values: Any) -> list[Any]:
    return [leaf for part in values.values() for leaf in _leaves(part)] if isinstance(values, dict) else [values]


def _describe_space(space: Any) -> dict[str, Any]:
    """Return a space of mjlab as plain dicts."""
    if hasattr(space, "spaces"):
        return {"type": "dict", "spaces": {name: _describe_space(part) for name, part in space.spaces.items()}}
    bounds = {"low": space.low, "high": space.high}
    return {"type": "box", "shape": list(space.shape), "dtype": space.dtype, **bounds}
