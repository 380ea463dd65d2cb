"""Frame stacks around any vector environment: Gymnasium's with numpy arrays, ours with torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from torch import Tensor

from headrace.errors import ConfigError, DataError, LifecycleError, UnknownNameError
from headrace.history._frame_stack import FrameStack
from headrace.history._normalize import Channels
from headrace.ids import check_ids
from headrace.types import Ids, StackSpec, StateDict, Step

Array: TypeAlias = npt.NDArray[Any] | Tensor
"""Whatever the environment gives; it gets the same back."""
_T = TypeVar("_T")
_Obs: TypeAlias = "Array | dict[str, Array]"

_WHOLE = ""
"""The name of an observation that is one array and not a dict of groups."""


if TYPE_CHECKING:
    _Wrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    _Wrapper = VectorWrapper  # takes no parameters at run time in Gymnasium 1.2


class FrameStackVector(_Wrapper):
    """Stacks the newest K frames of each environment of a vector environment.

    Observations are fresh arrays of the kind that the environment gives (numpy or torch); final observations are
    stacked too, in the form that the environment gives them. Every autoreset mode is handled:

    * ``same_step``: the frame of ``info["final_obs"]`` closes the old stack, the observation begins a new one;
    * ``next_step``: the step after an end begins a new stack;
    * ``disabled``: ``reset(options={"reset_mask": mask})`` begins new stacks of those environments only.

    Environments that are suspended (``active`` of a headrace environment) keep their stack, and so do those whose
    camera was not rendered (``step(…, observe=mask)``): around an environment the stack has the frames that were
    observed, and ``observe`` adds the current one. A headrace task that stacks by itself renders the ones in between
    when they are needed.

    Args:
        env: the vector environment.
        spec: how to stack an observation that is one array; for a dict, a spec per group to stack.
        channels: where the frames have their channels, used to normalize; for a dict, one for all groups or
            ``{group: channels}``, where groups that are not named have them last.
        normalize: give float32, x/255 minus each frame's mean per channel, from uint8 or floating point frames; for a
            dict, True for all groups or ``{group: bool}``, where groups that are not named keep their values.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        spec: StackSpec | Mapping[str, StackSpec],
        *,
        channels: Channels | Mapping[str, Channels] = "last",
        normalize: bool | Mapping[str, bool] = False,
    ) -> None:
        super().__init__(env)
        self._mode = _autoreset_mode(env)
        specs = {_WHOLE: spec} if isinstance(spec, StackSpec) else dict(spec)
        single = dict(_groups_of(env.single_observation_space, specs))
        self._specs = specs
        self._channels: dict[str, Channels] = _per_group("channels", channels, "last", specs)
        self._normalize = _per_group("normalize", normalize, False, specs)
        self._stacks: dict[str, FrameStack] = {}
        self._ended: Tensor | None = None
        self._shown: Tensor | None = None
        """bool (N,): the frame of the current state is in the stack."""
        spaces = {name: _stacked_space(single[name], specs[name], self._normalize[name]) for name in specs}
        if _WHOLE in specs:
            self.single_observation_space = spaces[_WHOLE]
        else:
            kept = cast("gymnasium.spaces.Dict", env.single_observation_space).spaces
            self.single_observation_space = gymnasium.spaces.Dict({**kept, **spaces})
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[_Obs, dict[str, Any]]:
        """Begin new stacks where environments are reset: everywhere, or at ``options["reset_mask"]``."""
        # taken first: Gymnasium removes it from the dict
        given = None if options is None else options.get("reset_mask")
        obs, info = self.env.reset(seed=cast("int | None", seed), options=options)
        first = self._frames(obs)
        device = next(iter(first.values())).device
        mask = torch.ones(self.num_envs, dtype=torch.bool) if given is None else _tensor(given)
        mask = mask.to(device)
        self._ended = torch.zeros_like(mask) if self._ended is None else self._ended & ~mask
        self._shown = mask.clone() if self._shown is None else self._shown | mask
        for name, frames in first.items():
            if name not in self._stacks:
                self._stacks[name] = self._new_stack(name, frames)
            stack = self._stacks[name]
            stack.reset(mask)
            stack.append(frames, mask)
        return self._with_stacks(obs), info

    def step(self, actions: Any, **options: Any) -> Any:
        """Step the environment; ``options`` (a headrace environment's ``observe=``) are passed on."""
        if self._ended is None or self._shown is None:
            raise LifecycleError("step: call reset first, so that every stack has a frame")
        # copied before the step, in which environments may park themselves
        active = getattr(self.env.unwrapped, "active", None)
        acts = None if active is None else _tensor(active).clone()
        step = cast("Callable[..., Any]", self.env.step)
        result = step(actions, **options)
        obs, reward, terminated, truncated, info = result
        done = _tensor(terminated) | _tensor(truncated)
        rows = torch.ones_like(done) if acts is None else acts
        moved = rows.clone()
        if "observed" in info:
            rows &= _tensor(info["observed"])
        begins = done if self._mode == AutoresetMode.SAME_STEP else self._ended
        if self._mode == AutoresetMode.SAME_STEP:
            info = self._with_stacked_finals(info)
            self._ended = torch.zeros_like(done)
        elif self._mode == AutoresetMode.NEXT_STEP:
            self._ended = done
        else:
            # an ended environment waits for its reset: what it shows is no new frame
            rows &= ~self._ended
            begins = torch.zeros_like(done)
            self._ended = self._ended | done
        for name, frames in self._frames(obs).items():
            stack = self._stacks[name]
            stack.reset(begins)
            stack.append(frames, rows | begins)
        self._shown = (self._shown & ~moved) | rows | begins
        stacked = self._with_stacks(obs)
        if isinstance(result, Step):
            return Step(cast("dict[str, Tensor]", stacked), reward, terminated, truncated, cast("Any", info))
        return stacked, reward, terminated, truncated, info

    def observe(self, ids: Ids | None = None) -> _Obs:
        """Return the current stacks of some environments (None: all), (n, …), with frames that were not observed
        rendered now.

        Rows come in the order of the ids, those of a mask in ascending order. Nothing advances.
        """
        if self._shown is None:
            raise LifecycleError("observe: call reset first, so that every stack has a frame")
        obs = self._of_env("observe")(ids)
        all_ids = torch.arange(self.num_envs, device=self._shown.device)
        rows = all_ids if ids is None else check_ids(ids, self.num_envs, self._shown.device, ascending=False)
        late = ~self._shown[rows]
        for name, frames in self._frames(obs).items():
            self._stacks[name].append(frames[late], rows[late])
        self._shown = self._shown.index_fill(0, rows, True)
        return self._with_stacks(obs, rows)

    def suspend(self, ids: Ids) -> None:
        """As ``suspend`` of the environment; the stacks of suspended environments stand still."""
        self._of_env("suspend")(ids)

    def resume(self, ids: Ids) -> None:
        """As ``resume`` of the environment."""
        self._of_env("resume")(ids)

    @property
    def active(self) -> Any:
        """bool (N,): the environments that the next step will advance."""
        return self._of_env("active")

    @property
    def suspended(self) -> Any:
        """bool (N,): the environments that were suspended."""
        return self._of_env("suspended")

    def state_dict(self) -> StateDict:
        """Return the environment's ``state_dict`` and the stacks: everything needed to go on bit-identically.

        Copies.
        """
        if self._ended is None or self._shown is None:
            raise LifecycleError("state_dict: call reset first, so that there is something to go on from")
        return {
            "env": self._of_env("state_dict")(),
            "stacks": {name: stack.state_dict() for name, stack in self._stacks.items()},
            "ended": self._ended.clone(),
            "shown": self._shown.clone(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from ``state_dict()``; a state of other stacks or another environment raises and changes nothing."""
        load = self._of_env("load_state_dict")
        stacks = {name: self._stack_of_state(name, state.get("stacks")) for name in self._specs}
        flags: dict[str, Tensor] = {}
        for name in ("ended", "shown"):
            flag = state.get(name)
            if not isinstance(flag, Tensor) or flag.dtype != torch.bool or tuple(flag.shape) != (self.num_envs,):
                raise DataError(f"{name}: expected a bool tensor of shape ({self.num_envs},), got {flag!r}")
            flags[name] = flag.clone()
        if "env" not in state:
            raise DataError(f"env: expected the environment's state, got only {', '.join(state)}")
        load(state["env"])
        self._stacks = stacks
        self._ended, self._shown = flags["ended"], flags["shown"]

    def _stack_of_state(self, name: str, stacks: Any) -> FrameStack:
        """Return a new stack with the frames of a snapshot."""
        stored = stacks.get(name) if isinstance(stacks, Mapping) else None
        frames = stored.get("frames") if isinstance(stored, Mapping) else None
        spec = self._specs[name]
        rank = frames.dim() - 2 if isinstance(frames, Tensor) else -1
        if not isinstance(frames, Tensor) or rank < 0 or frames.shape[spec.axis(rank) + 1] != spec.frames:
            label = f"stacks[{name!r}]"
            got = f"shape {tuple(frames.shape)}" if isinstance(frames, Tensor) else type(frames).__name__
            raise DataError(
                f"{label}: expected a stack of {spec.frames} frames of {self.num_envs} environments, got {got}"
            )
        stack = self._new_stack(name, frames.select(spec.axis(rank) + 1, 0))
        stack.load_state_dict(cast("StateDict", stored))
        return stack

    def _of_env(self, name: str) -> Any:
        """Return a method or property of the environment that Gymnasium's do not have."""
        if not hasattr(self.env, name):
            raise ConfigError(
                f"FrameStackVector.{name}: {type(self.env).__name__} has no {name}; environments of headrace.make and "
                "its bridges do"
            )
        return getattr(self.env, name)

    def _frames(self, obs: Any) -> dict[str, Tensor]:
        return {name: _tensor(obs if name == _WHOLE else obs[name]) for name in self._specs}

    def _new_stack(self, name: str, frames: Tensor) -> FrameStack:
        return FrameStack(
            self._specs[name],
            num_envs=self.num_envs,
            frame_shape=tuple(frames.shape[1:]),
            device=frames.device,
            dtype=frames.dtype,
            channels=self._channels[name],
            normalize=self._normalize[name],
        )

    def _with_stacks(self, obs: Any, rows: Tensor | None = None) -> _Obs:
        """Return an observation of ``rows`` (n,), or of all, with its frames replaced by stacks.

        Other groups as they are.
        """
        if _WHOLE in self._specs:
            return _like(obs, self._stacks[_WHOLE].observe(rows))
        return {**obs, **{name: _like(obs[name], stack.observe(rows)) for name, stack in self._stacks.items()}}

    def _with_stacked_finals(self, info: dict[str, Any]) -> dict[str, Any]:
        """``info`` with final observations stacked on the frames before them; nothing else is touched."""
        if "final_obs" not in info:
            return info
        final: Any = info["final_obs"]
        ids = _tensor(info["_final_obs"]).nonzero().squeeze(1)
        stacked = {name: stack.peek(_final_frames(final, name, ids), ids) for name, stack in self._stacks.items()}
        return {**info, "final_obs": _replaced_finals(final, stacked, ids, self.num_envs)}


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError as error:
        known = ", ".join(repr(choice.value) for choice in AutoresetMode)
        raise ConfigError(
            f'FrameStackVector: expected env.metadata["autoreset_mode"] to be one of {known}, got {mode!r}; '
            "without it the ends of episodes cannot be told apart"
        ) from error


def _groups_of(space: gymnasium.Space[Any], specs: Mapping[str, StackSpec]) -> dict[str, gymnasium.spaces.Box]:
    """Return the space of one frame for each group to stack."""
    if not specs:
        raise ConfigError("FrameStackVector: expected at least one group to stack, got none")
    if _WHOLE in specs:
        groups: Mapping[str, gymnasium.Space[Any]] = {_WHOLE: space}
    elif isinstance(space, gymnasium.spaces.Dict):
        groups = space.spaces
    else:
        raise ConfigError(f"FrameStackVector: specs by name need a dict of observations, got {space}; pass one spec")
    found: dict[str, gymnasium.spaces.Box] = {}
    for name in specs:
        if name not in groups:
            raise UnknownNameError("observation group", name, groups)
        group = groups[name]
        if not isinstance(group, gymnasium.spaces.Box):
            hint = "pass a spec per group, {name: StackSpec(…)}" if name == _WHOLE else "only Box frames can be stacked"
            raise ConfigError(f"FrameStackVector: expected a Box of frames, got {group}; {hint}")
        found[name] = group
    return found


def _per_group(name: str, given: _T | Mapping[str, _T], default: _T, specs: Mapping[str, StackSpec]) -> dict[str, _T]:
    """Return an option's value for each group to stack, from one for all or from some by name."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(specs, given)
    values = cast("Mapping[str, _T]", given)
    for group in values:
        if _WHOLE in specs:
            raise ConfigError(f"{name}: expected one value for an observation that is one array, got groups")
        if group not in specs:
            raise UnknownNameError("group to stack", group, specs)
    return {group: values.get(group, default) for group in specs}


def _stacked_space(frame: gymnasium.spaces.Box, spec: StackSpec, normalize: bool) -> gymnasium.spaces.Box:
    shape = tuple(int(size) for size in frame.shape)
    if normalize:
        return gymnasium.spaces.Box(-1.0, 1.0, spec.stacked_shape(shape), np.float32)
    low, high = frame.low, frame.high
    if spec.reset == "zero":
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    repeated = [torch.from_numpy(np.repeat(bound[None, None], spec.frames, 1)) for bound in (low, high)]
    stacked = [spec.stack(bound)[0].numpy().astype(frame.dtype) for bound in repeated]
    return gymnasium.spaces.Box(stacked[0], stacked[1], dtype=cast("Any", frame.dtype))


def _tensor(array: Array) -> Tensor:
    """Return the array as a tensor that shares its memory where torch may."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    # torch takes neither read-only memory nor arrays that run backwards, such as pictures of OpenGL turned upside down
    shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shareable else array.copy())


def _like(given: Array, tensor: Tensor) -> Array:
    """``tensor`` as what ``given`` is; a numpy array shares the tensor's memory."""
    return tensor if isinstance(given, Tensor) else tensor.numpy()


def _is_per_env(final: Any) -> bool:
    """Gymnasium's form: an object array of one observation per environment; ours is full (N, …)."""
    return isinstance(final, np.ndarray) and final.dtype == np.object_


def _final_frames(final: Any, name: str, ids: Tensor) -> Tensor:
    """Return the last frames of the environments that ended, (n, *frame_shape)."""
    if _is_per_env(final):
        frames = [final[env] if name == _WHOLE else final[env][name] for env in ids.tolist()]
        return torch.stack([_tensor(frame) for frame in frames])
    return _tensor(final if name == _WHOLE else final[name])[ids]


def _replaced_finals(final: Any, stacked: Mapping[str, Tensor], ids: Tensor, num_envs: int) -> Any:
    """``final_obs`` in the form that it came, with stacks for frames."""
    if _is_per_env(final):
        replaced = final.copy()
        for row, env in enumerate(ids.tolist()):
            stacks = {name: tensor[row].numpy() for name, tensor in stacked.items()}
            replaced[env] = stacks[_WHOLE] if _WHOLE in stacks else {**final[env], **stacks}
        return replaced
    full: dict[str, Array] = {}
    for name, tensor in stacked.items():
        rows = torch.zeros((num_envs, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        rows[ids] = tensor
        full[name] = _like(final if name == _WHOLE else final[name], rows)
    if _WHOLE in full:
        return full[_WHOLE]
    return {**final, **full}
