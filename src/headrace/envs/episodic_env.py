"""What every batch of environments has, however it is stepped: active rows, episodes, observers."""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, cast

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from headrace._device import to_device
from headrace.envs._episode_state import ActiveSet, EpisodeState
from headrace.envs.recipe import Autoreset, EnvRecipe, check_count
from headrace.errors import ConfigError, DataError, DtypeError, IdError, LifecycleError, ShapeError
from headrace.ids import as_tensor, check_ids, check_seed
from headrace.types import (
    Ids,
    Need,
    Obs,
    ResetRecord,
    StateDict,
    Step,
    StepInfo,
    StepObserver,
    StepRecord,
    SubstepObserver,
)

AUTORESET_MODES = {"same_step": AutoresetMode.SAME_STEP, "disabled": AutoresetMode.DISABLED}


class StageTimer:
    """Adds up wall time per named stage.

    Stages do not nest into each other: a second ``start`` ends the first. Times are host times; on a GPU they are
    the time until the call returned, not until the work was done.
    """

    def __init__(self) -> None:
        self._total_ns: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._stage: str | None = None
        self._since = 0

    def start(self, stage: str | None) -> None:
        """End the running stage, if any, and begin ``stage``; None begins none."""
        now, ended = time.perf_counter_ns(), self._stage
        if ended is not None:
            self._total_ns[ended] = self._total_ns.get(ended, 0) + now - self._since
            self._calls[ended] = self._calls.get(ended, 0) + 1
        self._stage, self._since = stage, now

    def stop(self) -> None:
        """End the running stage."""
        self.start(None)

    @contextmanager
    def measure(self, stage: str) -> Generator[None]:
        """Time a block as ``stage``."""
        self.start(stage)
        try:
            yield
        finally:
            self.start(None)

    def seconds(self) -> dict[str, float]:
        """Return seconds spent in each stage so far, in order of first use."""
        return {stage: total / 1e9 for stage, total in self._total_ns.items()}

    def calls(self) -> dict[str, int]:
        """Return how often each stage ran."""
        return dict(self._calls)

    def clear(self) -> None:
        """Forget everything measured."""
        self._total_ns.clear()
        self._calls.clear()
        self._stage = None


class EpisodicEnv(VectorEnv[Obs, Tensor, Tensor]):
    """N environments with episodes in them, any subset of which can act; what steps them is the subclass's.

    Owns the bookkeeping of the episodes and of who acts. Properties give copies.
    """

    def __repr__(self) -> str:
        task = "" if self.recipe is None else f"{self.recipe.source!r}, "
        return f"{type(self).__name__}({task}num_envs={self.num_envs})"

    def _repr_html_(self) -> str:
        """Return a picture, the task and the spaces, for notebooks."""
        spaces = f"observations: {self.single_observation_space}\nactions: {self.single_action_space}"
        text = "<pre>" + html.escape(repr(self) + "\n" + spaces) + "</pre>"
        drawn: object = self.render() if self._ready and not self.closed and self.render_mode == "rgb_array" else None
        if not isinstance(drawn, np.ndarray):
            return text
        from headrace.envs.viewer import png

        return f'<img src="data:image/png;base64,{base64.b64encode(png(drawn)).decode()}">{text}'

    def __init__(
        self,
        num_envs: int,
        device: torch.device,
        memory: Mapping[str, tuple[int, ...]],
        *,
        seed: int = 0,
        autoreset: Autoreset = "same_step",
        final_obs: bool = True,
        episode_stride: int | None = None,
    ) -> None:
        """Lay out the bookkeeping of ``num_envs`` environments; ``memory`` is what a task keeps per environment."""
        self.num_envs = num_envs
        self.device = device
        self.autoreset: Autoreset = autoreset
        self.recipe: EnvRecipe | None = None
        """How to make this environment again; None where it was made from an object instead of a name."""
        self.timer = StageTimer()
        self.divergences = 0
        """How many episodes ended because their simulation failed or gave numbers that are not finite."""
        self._wants_final_obs = final_obs
        if episode_stride is not None:
            check_count("episode_stride", episode_stride)
        self._episodes = EpisodeState(num_envs, device, memory, episode_stride)
        self._episodes.seed = check_seed(seed)
        self._active_set = ActiveSet(num_envs, device)
        self._observers: list[StepObserver] = []
        self._instructions = [""] * num_envs
        self._ready = False
        self._failure = ""
        """What interrupted the last step or reset halfway, if something did: then only a reset of all helps."""
        self._busy = False
        self.closed = False

    # --- who acts -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> Tensor:
        """bool (N,), a copy: the environments that the next ``step`` will advance."""
        return self._active_set.active

    @property
    def suspended(self) -> Tensor:
        """bool (N,), a copy: suspended by the caller, whether or not their episode has ended."""
        return to_device(self._active_set.suspended.clone(), self.device)

    @property
    def episode_ids(self) -> Tensor:
        """int64 (N,), a copy: the episode each environment is in."""
        return self._episodes.episode_ids.clone()

    @property
    def episode_steps(self) -> Tensor:
        """int64 (N,), a copy: the steps each environment has taken in its episode."""
        return self._episodes.steps.clone()

    @property
    def seed(self) -> int:
        """The seed of the current episodes."""
        return self._episodes.seed

    def suspend(self, ids: Ids) -> None:
        """Freeze environments until ``resume``, as ``fidelity`` says. Suspending one twice is a no-op."""
        self._check_open()
        self._active_set.suspend(ids)

    def resume(self, ids: Ids) -> None:
        """Let suspended environments act again. Resuming one that is active is a no-op."""
        self._check_open()
        self._active_set.resume(ids)

    def instructions(self, ids: Ids | None = None) -> tuple[str, ...]:
        """Return the instruction of each environment (None: all) in its current episode; "" where there is nothing.

        Texts come in the order of the ids, those of a mask in ascending order, and do not change within an episode.
        """
        self._check_ready("instructions")
        if ids is None:
            return tuple(self._instructions)
        rows = check_ids(ids, self.num_envs, self.device, ascending=False)
        return tuple([self._instructions[row] for row in rows.tolist()])

    suspend_envs = suspend
    resume_envs = resume

    # --- who watches --------------------------------------------------------------------------------------------

    def attach(self, observer: StepObserver) -> None:
        """Let ``observer`` see every step and reset from now on. Attach before ``reset`` to see episodes begin."""
        if "substeps" in observer.needs and not isinstance(observer, SubstepObserver):
            raise ConfigError(
                f"attach: {type(observer).__name__} needs substeps, but has no method after_substep(record); add one"
            )
        self._observers.append(observer)

    def detach(self, observer: StepObserver) -> None:
        """Stop showing steps to ``observer``."""
        self._observers.remove(observer)

    def _needs(self, what: Need) -> bool:
        return any(what in observer.needs for observer in self._observers)

    # --- steps --------------------------------------------------------------------------------------------------

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # Step is the same five, with names
        self, actions: Tensor, observe: Tensor | None = None
    ) -> Step:
        """Advance the active environments by one step.

        Args:
            actions: one row per environment as the action space says: floats for Box, integers for the others. Rows of
                environments that are not active are ignored.
            observe: bool (N,): whose cameras will be read; None for all. Rows that end are always observed, and a
                bridged environment observes whenever it steps.
        """
        if self._busy or self.closed or not self._ready:
            self._refuse("step")
        self._busy = True
        try:
            return self._step(actions, observe)
        finally:
            self._busy = False

    # --- for subclasses -----------------------------------------------------------------------------------------

    def _step(self, actions: Tensor, observe: Tensor | None) -> Step:
        """:meth:`step`, when it is known that it may be called."""
        raise NotImplementedError(f"{type(self).__name__} must override _step(actions, observe)")

    def _shown(self) -> Obs:
        """Return the observation that every environment shows, (N, …), fresh."""
        raise NotImplementedError(f"{type(self).__name__} must override _shown()")

    def _bookkeeping(self, name: str) -> dict[str, object]:
        """Return the part of a snapshot of ``name`` that is kept here, as copies."""
        return {
            "task": name,
            "num_envs": self.num_envs,
            "seed": self._episodes.seed,
            "divergences": self.divergences,
            "episodes": {name: values.clone() for name, values in self._episodes.tensors().items()},
            "suspended": self._active_set.suspended.clone(),
            "parked": self._active_set.parked.clone(),
            "instructions": list(self._instructions),
        }

    def _load_bookkeeping(self, state: StateDict) -> None:
        """Go on from a snapshot that is known to be fine; the environments themselves have been put back."""
        for name, values in self._episodes.tensors().items():
            values.copy_(state["episodes"][name])
        self._episodes.seed = int(state["seed"])
        self.divergences = int(state["divergences"])
        self._active_set.suspended.copy_(state["suspended"])
        self._active_set.parked.copy_(state["parked"])
        self._active_set.refresh()
        self._instructions = list(state["instructions"])
        self._ready, self._failure = True, ""

    def _instruct(self, ids: Tensor, texts: Sequence[str] | None) -> None:
        """Note the instructions of the episodes that begin in ``ids`` (m,), m texts; None for nothing."""
        if texts is None:
            return
        if len(texts) != len(ids):
            raise ShapeError(f"instructions: expected one text for each of {len(ids)} rows, got {len(texts)}")
        for env_id, text in zip(ids.tolist(), texts, strict=True):
            self._instructions[env_id] = text

    def _reset_request(self, options: dict[str, object] | None) -> ResetRequest:
        """Return what a reset asks for, when it is known that it may be called."""
        self._check_open()
        request = parse_reset_options(options, self.num_envs, self.device)
        if not self._ready and request.ids is not None:
            if self._failure:
                self._check_ready("reset with reset_mask")
            raise LifecycleError("reset: the first reset must be of all environments; call reset() without reset_mask")
        return request

    def _show_step(self, env_ids: Tensor, actions: Tensor, step: Step, states: Tensor | None) -> None:
        """Let the observers see the step: its observation is the true last one where an episode ended."""
        episode_ids = self._episodes.episode_ids.index_select(0, env_ids)
        record = StepRecord(env_ids=env_ids, episode_ids=episode_ids, actions=actions, step=step, states=states)
        for observer in self._observers:
            observer.after_step(record)

    def _show_reset(self, env_ids: Tensor, host: Tensor, obs: Obs, states: Tensor | None) -> None:
        """Let the observers see episodes that begin in ``env_ids`` (m,), on the host ``host``."""
        record = ResetRecord(
            env_ids=env_ids,
            episode_ids=self._episodes.episode_ids.index_select(0, env_ids),
            seed=self._episodes.seed,
            obs=obs,
            states=states,
            instructions=tuple([self._instructions[env_id] for env_id in host.tolist()]),
        )
        for observer in self._observers:
            observer.after_reset(record)

    def _idle_step(self, wanted: Tensor | None) -> Step:
        """Return a step in which no environment acts."""
        none = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        reward = torch.zeros(self.num_envs, dtype=torch.float32, device=self.device)
        info: StepInfo = {} if wanted is None else {"observed": none.clone()}
        return Step(self._shown(), reward, none, none.clone(), info)

    def _make_mask(self, ids: Tensor) -> Tensor:
        mask = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        if self.device.type == "cpu":
            mask.numpy()[ids.numpy()] = True  # a third of the time of torch's own
        else:
            mask[ids] = True
        return mask

    @contextmanager
    def _alone(self, call: str) -> Generator[None]:
        """Refuse a call from inside a step or reset (an observer, a task, another thread)."""
        if self._busy:
            self._refuse(call)
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _check_open(self) -> None:
        if self.closed:
            self._refuse("")

    def _check_ready(self, call: str) -> None:
        if self.closed or not self._ready:
            self._refuse(call)

    def _refuse(self, call: str) -> NoReturn:
        """Say why ``call`` cannot be made now."""
        if self.closed:
            raise LifecycleError("the environment is closed; create a new one")
        if self._busy:
            raise LifecycleError(
                f"{call}() called while the environment steps or resets; call it after step() or reset() has returned, "
                "and from one thread at a time"
            )
        if self._failure:
            raise LifecycleError(
                f"{call}() called after a step or reset that failed halfway ({self._failure}); the environments no "
                "longer belong together: call reset() to start all of them again"
            )
        raise LifecycleError(f"{call}() called before reset(); call reset() first")

    def _fail(self, error: BaseException) -> None:
        """Note that a step or reset was interrupted halfway."""
        self._ready = False
        self._failure = f"{type(error).__name__}: {error}"
        self.timer.stop()


_OPTIONS = {"reset_mask", "episode_ids", "observe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetRequest:
    """Which environments to reset, and into which episodes."""

    ids: Tensor | None
    """int64 (m,), ascending; None for all."""
    episode_ids: Tensor | None
    """int64 (m,); None for their next ones."""
    observe: Tensor | None
    """int64 (k,): environments whose cameras are drawn if they are reset; None for all."""


def parse_reset_options(options: dict[str, object] | None, num_envs: int, device: torch.device) -> ResetRequest:
    """Check ``reset(options=…)`` before anything is changed."""
    if not options:
        return ResetRequest(ids=None, episode_ids=None, observe=None)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise ConfigError(f"reset options: expected {sorted(_OPTIONS)}, got {unknown}")
    mask, wanted = options.get("reset_mask"), options.get("episode_ids")
    ids = None
    if mask is not None:
        mask = as_tensor(mask, "reset_mask")
        if mask.dtype != torch.bool:
            raise DtypeError(f"reset_mask: expected bool ({num_envs},), got {mask.dtype}")
        ids = check_ids(mask, num_envs, device, name="reset_mask")
        ids = None if len(ids) == num_envs else ids
    observe = options.get("observe")
    return ResetRequest(
        ids=ids,
        episode_ids=None if wanted is None else _check_episode_ids(wanted, ids, num_envs, device),
        observe=None if observe is None else check_ids(cast("Ids", observe), num_envs, device, name="observe"),
    )


def _check_episode_ids(values: object, ids: Tensor | None, num_envs: int, device: torch.device) -> Tensor:
    wanted = as_tensor(values, "episode_ids")
    if wanted.dtype.is_floating_point or wanted.dtype == torch.bool:
        raise DtypeError(f"episode_ids: expected int64, got {wanted.dtype}")
    count = num_envs if ids is None else len(ids)
    wanted = wanted.to(device=device, dtype=torch.int64)
    if tuple(wanted.shape) == (count,):
        chosen = wanted
    elif ids is not None and tuple(wanted.shape) == (num_envs,):
        chosen = wanted.index_select(0, ids)
    else:
        raise ShapeError(
            f"episode_ids: expected one per reset environment ({count},) or one per environment ({num_envs},), "
            f"got {tuple(wanted.shape)}"
        )
    lowest = int(chosen.min()) if chosen.numel() else 0
    if lowest < 0:
        raise IdError(f"episode_ids: expected ids of at least 0, got {lowest}")
    return chosen


_KEYS = ("task", "num_envs", "seed", "divergences", "sim", "episodes", "suspended", "parked", "observations")


def check_snapshot(state: StateDict, like: StateDict) -> None:
    """Refuse a snapshot of another task or number of environments than ``like``, or of another layout."""
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise DataError(f"snapshot: expected what state_dict() gave, got one without {missing}")
    if state["task"] != like["task"] or state["num_envs"] != like["num_envs"]:
        raise DataError(
            f"snapshot: expected {like['num_envs']} environments of {like['task']}, got {state['num_envs']} of "
            f"{state['task']}; make an environment with the same task and num_envs"
        )
    _check_layout(state, like)


def _check_layout(state: StateDict, like: StateDict, inside: str = "") -> None:
    """Refuse a snapshot that lacks an entry of ``like``, or has a tensor of another shape or dtype in its place."""
    for key, expected in like.items():
        name = f"{inside}{key}"
        if key not in state:
            raise DataError(f"snapshot: expected an entry {name!r}, got none; it is damaged or of another version")
        got: object = state[key]
        if isinstance(expected, Mapping):
            if not isinstance(got, Mapping):
                raise DataError(f"snapshot: expected entries below {name!r}, got {type(got).__name__}")
            _check_layout(cast("StateDict", got), cast("StateDict", expected), f"{name}.")
        elif isinstance(expected, list):
            texts = cast("list[object]", got) if isinstance(got, list) else []
            if len(texts) != len(cast("list[object]", expected)) or not all(isinstance(text, str) for text in texts):
                raise DataError(f"snapshot: {name}: expected {len(cast('list[object]', expected))} texts, got {got!r}")
        elif isinstance(expected, Tensor) and (
            not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype
        ):
            found = f"{got.dtype} {tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            raise DataError(f"snapshot: {name}: expected {expected.dtype} {tuple(expected.shape)}, got {found}")
