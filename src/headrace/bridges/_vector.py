"""A ``gymnasium.vector.VectorEnv`` behind an exchange: it steps all or none, so who rests is put back, or held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from headrace.bridges._exchange import Array, Exchange, instruction_path, instructions_of
from headrace.bridges.child import NO_SUCCESS_MEASURE, SUCCESS_KEYS, RefusedError, changed_text, write_row
from headrace.bridges.executors import Backend, Fidelity
from headrace.errors import ConfigError, DataError, EnvError, UnsupportedError

AnyVectorEnv: TypeAlias = "VectorEnv[Any, Any, Any]"
Save: TypeAlias = Callable[[AnyVectorEnv, int], object]
"""``save(vector_env, i)``: everything that the future of environment i depends on.

The bridge keeps it. Bytes, tensors and numbers can also go to disk with ``state_dict``.
"""
Restore: TypeAlias = Callable[[AnyVectorEnv, int, object], None]
"""``restore(vector_env, i, saved)``: put environment i back; the same ``saved`` may come many times."""


class VectorBackend(Backend):
    """All N environments are stepped; those that should rest play the idle action.

    With ``save`` and ``restore`` they are put back after each step (fidelity ``restore``); without, they drift and
    only their rows are masked (``hold``). What the vector environment resets by itself is reset again from the
    episode's own seed, wherever it can reset some environments alone (``reset_mask``, as Gymnasium's own can).
    """

    def __init__(
        self,
        vector: AnyVectorEnv,
        exchange: Exchange,
        idle_action: Array,
        *,
        save: Save | None,
        restore: Restore | None,
        wants_final_obs: bool,
    ) -> None:
        self.exchange = self._exchange = exchange
        self.held_ends = 0
        """How many episodes ended only because a resting environment was held, not frozen."""
        self.mode = autoreset_mode(vector)
        self._vector = vector
        self._idle_action = idle_action
        self._save, self._restore = save, restore
        self._wants_final_obs = wants_final_obs
        self.fidelity: Fidelity = "hold" if save is None else "restore"
        self.resets_some = self.reseeds = resets_some(vector)
        if not self.reseeds and self.mode != AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"bridge: {vector} resets in mode {self.mode.name} and does not say that it can reset some "
                'environments (metadata["reset_mask"] = True, if its reset takes options={"reset_mask": …}); '
                "else bridge its single environments, or one with autoreset mode SAME_STEP"
            )
        n = vector.num_envs
        self._seeds = np.zeros(n, dtype=np.int64)
        # our episode is over, and the next has not been asked for
        self._over: NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        # the vector environment's own episode is over, and it has not been reset since
        self._unreset: NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        self._saved: dict[int, object] = {}
        self._first_obs: object = None
        self._first_infos: Mapping[str, Any] = {}
        self._text_path = instruction_path(vector.single_observation_space)
        # the text of each environment's observation in its episode; absent where nothing is known of it
        self._texts: dict[int, str] = {}
        self._autoreset: set[int] = set()

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each environment."""
        rows = np.asarray(env_ids, dtype=np.int64)
        self._seeds[rows] = seeds
        if self.reseeds:
            obs, infos = self._reset_rows(rows)
        elif len(rows) == len(self._seeds):
            obs, infos = self._called("reset", lambda: self._vector.reset(seed=int(seeds[0])))
        elif self._autoreset.issuperset(env_ids):
            obs, infos = self._first_obs, self._first_infos
        else:
            raise UnsupportedError(f"reset: {self._vector} cannot reset some of its environments; reset all")
        self._autoreset.difference_update(env_ids)
        self._over[rows] = False
        for env_id in env_ids:
            self._saved.pop(env_id, None)
        self._exchange.write_batch(rows, obs)
        if self._text_path is not None:
            self._texts.update(zip(env_ids, instructions_of(obs, {}, self._text_path, env_ids), strict=True))
        return instructions_of(obs, infos, self._text_path, env_ids)

    def step(self, env_ids: Sequence[int]) -> None:
        """Step all environments; write the rows of ``env_ids``; put back or hold the others."""
        exchange, vector = self._exchange, self._vector
        rows = np.asarray(env_ids, dtype=np.int64)
        idle = np.ones(len(self._seeds), dtype=np.bool_)
        idle[rows] = False
        if self.mode == AutoresetMode.DISABLED and self._unreset.any():
            # an ended environment that was not reset cannot be stepped: what it does from here is not seen
            self._reset_rows(np.flatnonzero(self._unreset))
        self._save_idle(idle)

        actions = np.repeat(self._idle_action[None], len(idle), axis=0)
        actions[rows] = exchange.actions[rows]
        obs, reward, terminated, truncated, infos = self._called("step", lambda: vector.step(actions))
        done = np.asarray(terminated, dtype=np.bool_) | np.asarray(truncated, dtype=np.bool_)
        exchange.write_batch(rows, obs)
        exchange.reward[rows] = np.asarray(reward)[rows]
        exchange.terminated[rows] = np.asarray(terminated)[rows]
        exchange.truncated[rows] = np.asarray(truncated)[rows]
        ended = rows[done[rows]]
        if self._text_path is not None:
            # where an episode ended, the observation may be that of the next one
            going: list[int] = rows[~done[rows]].tolist()
            for env_id, text in zip(going, instructions_of(obs, {}, self._text_path, going), strict=True):
                if (told := self._texts.setdefault(env_id, text)) != text:
                    raise EnvError(changed_text(env_id, told, text))
        exchange.success[rows] = NO_SUCCESS_MEASURE
        self._write_success(ended, infos)
        if self.mode == AutoresetMode.SAME_STEP and len(ended):
            self._write_final_obs(ended, infos)
            self._first_obs, self._first_infos, self._autoreset = obs, infos, set(ended.tolist())
        else:
            self._autoreset = set()
        self._unreset = done.copy()
        self._settle_idle(idle, done)
        self._over[ended] = True

    def save(self) -> list[object]:
        """Return the state of every environment."""
        if self._save is None:
            raise UnsupportedError(
                f"state_dict: {self._vector} gives no access to its state; bridge its single environments, or pass "
                "save= and restore="
            )
        return [self._save(self._vector, env_id) for env_id in range(len(self._seeds))]

    def restore(self, states: Sequence[object]) -> None:
        """Put every environment back."""
        assert self._restore is not None
        if self.reseeds:
            # also clears what the vector environment itself remembers of ended episodes
            self._reset_rows(np.arange(len(self._seeds)))
        else:
            self._called("reset", self._vector.reset)
        for env_id, state in enumerate(states):
            self._restore(self._vector, env_id, state)
        self._saved.clear()
        self._texts.clear()
        self._over[:] = False
        self._autoreset = set()

    def render(self, env_ids: Sequence[int]) -> list[object]:
        """Return one picture of each environment; a vector environment draws all of them."""
        pictures = self._vector.render()
        return [None if pictures is None else pictures[env_id] for env_id in env_ids]

    def close(self) -> None:
        """Close the vector environment."""
        self._vector.close()

    def _reset_rows(self, rows: NDArray[np.int64]) -> tuple[object, Mapping[str, Any]]:
        mask = np.zeros(len(self._seeds), dtype=np.bool_)
        mask[rows] = True
        self._unreset[rows] = False
        seeds: list[int | None] = [int(seed) if hit else None for seed, hit in zip(self._seeds, mask, strict=True)]
        # fresh options each time: Gymnasium's own take the mask out of them
        options = None if mask.all() else {"reset_mask": mask}
        return self._called("reset", lambda: self._vector.reset(seed=cast("Any", seeds), options=options))

    def _save_idle(self, idle: NDArray[np.bool_]) -> None:
        """Keep the state of those that rest from now on, until they act or are reset."""
        if self._save is None:
            return
        self._saved = {env_id: state for env_id, state in self._saved.items() if idle[env_id]}
        for env_id in np.flatnonzero(idle & ~self._over).tolist():
            if env_id not in self._saved:
                self._saved[env_id] = self._save(self._vector, env_id)

    def _settle_idle(self, idle: NDArray[np.bool_], done: NDArray[np.bool_]) -> None:
        """Undo what the step did to those that rest, as far as that can be done."""
        cut = np.flatnonzero(idle & done & ~self._over)
        if len(cut) and self.reseeds:
            # from its own seed: held, it starts its episode again; put back, its pending automatic reset is cleared
            self._reset_rows(cut)
        if self._restore is None:
            self.held_ends += len(cut)
            return
        for env_id, state in self._saved.items():
            self._restore(self._vector, env_id, state)

    def _write_final_obs(self, ended: NDArray[np.int64], infos: Mapping[str, Any]) -> None:
        if not self._wants_final_obs:
            return
        final = infos.get("final_obs")
        if final is None:
            raise DataError(
                f'{self._vector}: expected infos["final_obs"] where an episode ended, as mode SAME_STEP means, '
                "got none; pass final_obs=False to do without the last observation"
            )
        if isinstance(final, np.ndarray) and final.dtype == object:
            try:
                for env_id in ended.tolist():
                    write_row(self._exchange.leaves, env_id, final[env_id])
            except RefusedError as error:
                raise EnvError(str(error)) from error
        else:
            self._exchange.write_batch(ended, final)

    def _write_success(self, ended: NDArray[np.int64], infos: Mapping[str, Any]) -> None:
        if not len(ended):
            return
        source: Mapping[str, Any] = infos.get("final_info", {}) if self.mode == AutoresetMode.SAME_STEP else infos
        for key in SUCCESS_KEYS:
            if key in source:
                given = np.asarray(source.get(f"_{key}", np.ones(len(self._seeds), dtype=np.bool_)), dtype=np.bool_)
                values = np.asarray(source[key])
                for env_id in ended[given[ended]].tolist():
                    self._exchange.success[env_id] = bool(values[env_id])
                return

    def _called(self, call: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        # a simulator that we did not write may raise anything: it is said whose call it was, and raised as ours
        except Exception as error:
            raise EnvError(
                f"{self._vector} raised {type(error).__name__} in {call}: {error}; "
                "some environments may have stepped: reset all before going on"
            ) from error


def autoreset_mode(vector: AnyVectorEnv) -> AutoresetMode:
    """Return what the vector environment says of its resets."""
    mode = vector.metadata.get("autoreset_mode")
    if mode is None:
        raise ConfigError(
            f'bridge: expected metadata["autoreset_mode"] of {vector}, got none; set it to what the environment does: '
            "gymnasium.vector.AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED"
        )
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)


def resets_some(vector: AnyVectorEnv) -> bool:
    """Return whether ``reset(options={"reset_mask": mask})`` resets only some: Gymnasium's own do, others say so."""
    known = isinstance(vector.unwrapped, SyncVectorEnv | AsyncVectorEnv)
    return known or autoreset_mode(vector) == AutoresetMode.DISABLED or bool(vector.metadata.get("reset_mask"))
