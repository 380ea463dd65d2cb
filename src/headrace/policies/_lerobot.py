"""LeRobot's policies as chunk policies: names, processors, history, noise of our own, and real-time chunking.

A LeRobot policy keeps queues of observations for one batch that begins and ends together. Ours begin and end on their
own: what a policy needs of the past is kept outside, per episode, and its queues are filled anew for each call.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace import rng
from headrace.errors import ConfigError, DataError, UnknownNameError, require_extra
from headrace.policies.preflight import ACTION, FeatureSpec
from headrace.policies.protocol import ChunkContext, EpisodeRows
from headrace.types import Obs

_STATE, _IMAGES = "observation.state", "observation.images"
_DETERMINISTIC = ("act",)
"""LeRobot's types that draw nothing when they predict."""
_NOISE_BY_KEYWORD = ("pi0", "pi05", "smolvla")
"""Those that hand ``noise`` through their keywords, or take it."""
_DRAWS = "eo1", "evo1", "fastwam", "lingbot_va", "molmoact2", "multi_task_dit", "wall_x"
_REFUSED = {
    **dict.fromkeys(_DRAWS, "draws its noise inside of the call"),
    **dict.fromkeys(("reward_classifier", "robometer", "sarm", "topreward"), "is a model of rewards"),
    **dict.fromkeys(("gaussian_actor", "sac"), "plans one action, and no chunks"),
    **dict.fromkeys(("vla_jepa", "xvla"), "takes noise= but ignores it, and draws from torch's global generator"),
    "groot": "draws its noise inside of the call; serve it with GR00T's own server (gr00t://)",
    "pi0_fast": "decodes tokens in a loop over its whole batch, which has not been played here",
    "tdmpc": "samples plans inside of the call, and begins with the plan before",
    "vqbet": "samples its codes inside of the call",
}
"""Types of LeRobot 0.4.4 and 0.6.1 that are not played, and why."""
_RTC = ("inference_delay", "prev_chunk_left_over")

Processor = Callable[[Any], Any]


class LeRobotPolicy:
    """A LeRobot policy under the contract of :class:`~headrace.policies.protocol.ChunkPolicy`.

    Keeps nothing between calls.

    Its noise comes from the context, so that a chunk is a function of (seed, episode, chunk index) and the observation;
    a diffusion policy with the DDPM scheduler draws in every denoising step, from a generator per row.
    """

    policy_identity = "lerobot-1"

    def __init__(
        self,
        policy: object,
        *,
        preprocessor: Processor | None = None,
        postprocessor: Processor | None = None,
        groups: Mapping[str, str] | None = None,
    ) -> None:
        """Adapt a policy object.

        Args:
            policy: an object with ``predict_action_chunk``.
            preprocessor: LeRobot's pipeline from a batch to the policy's inputs. A tokenizer in it that pads to the
                longest text of a batch is changed to pad to its full length: a row must not depend on its neighbors.
            postprocessor: LeRobot's pipeline from the policy's actions to ours.
            groups: the policy's feature → our group, where the names differ: ``{"observation.images.top": "camera"}``.
        """
        self.policy = policy
        self.config: Any = getattr(policy, "config", None)
        self._preprocessor, self._postprocessor = preprocessor, postprocessor
        self._groups = dict(groups or {})
        wanted = _input_features(self.config)
        for feature in self._groups:
            if wanted and feature not in wanted:
                raise UnknownNameError("LeRobot policy: feature in groups=", feature, wanted)
        predict = getattr(policy, "predict_action_chunk")  # noqa: B009  # a policy is any object that has it
        self._predict = cast("Callable[..., Tensor]", predict)
        self._type = str(getattr(self.config, "type", ""))
        parameters = inspect.signature(self._predict).parameters
        self._takes_noise = "noise" in parameters or self._type in _NOISE_BY_KEYWORD
        if self._type in _REFUSED:
            raise ConfigError(
                f"LeRobot policy of type {self._type!r}: expected one that draws nothing or takes noise= in "
                f"predict_action_chunk, got one that {_REFUSED[self._type]}"
            )
        if self._type and not (self._takes_noise or self._type in _DETERMINISTIC):
            raise ConfigError(
                f"LeRobot policy of type {self._type!r}: expected one that draws nothing or takes noise= in "
                "predict_action_chunk, since results must not depend on the batch; pass a function that calls it"
            )
        # a diffusion policy plans ``horizon`` rows from its oldest observation on, and gives these from now on
        rows = "n_action_steps" if hasattr(self.config, "noise_scheduler_type") else "chunk_size"
        self.horizon: int | None = getattr(self.config, rows, None)
        self.action_dim = _action_dim(self.config)
        self.obs_steps: int | None = getattr(self.config, "n_obs_steps", None)
        if isinstance(policy, nn.Module):
            policy.eval()
        for step in getattr(preprocessor, "steps", ()):
            if getattr(step, "padding", None) == "longest":
                step.padding = "max_length"

    @property
    def feature_specs(self) -> dict[str, FeatureSpec]:
        """What ``config.input_features`` and the processors state, under the names that our export writes.

        ``observation.state`` is the group ``policy``, ``observation.<group>`` another one, and
        ``observation.images.<group>`` a picture: float32 (…, C, H, W), from uint8 divided by 255. ``groups`` name
        others; a group with the feature's own name comes first.
        """
        specs = self._specs()
        known = {key: replace(spec, mean=_mean(self._preprocessor, key)) for key, spec in specs.items()}
        return known | {ACTION: FeatureSpec(mean=_mean(self._postprocessor, ACTION))}

    def _specs(self) -> dict[str, FeatureSpec]:
        specs: dict[str, FeatureSpec] = {}
        for key, feature in (_input_features(self.config) or dict.fromkeys(self._groups)).items():
            pictured = key.startswith(f"{_IMAGES}.")
            usual = "policy" if key == _STATE else key.removeprefix(f"{_IMAGES}." if pictured else "observation.")
            specs[key] = FeatureSpec(
                groups=(self._groups[key],) if key in self._groups else (key, usual),
                shape=tuple(cast("tuple[int, ...]", getattr(feature, "shape", None) or ())) or None,
                convert="floats" if pictured else None,
            )
        return specs

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan float (n, horizon, action_dim)."""
        return self._finish(self._plan(self._inputs(obs, context), context, {}))

    def _inputs(self, obs: Obs, context: ChunkContext) -> dict[str, Any]:
        """Return the policy's batch, on its device."""
        batch: dict[str, Any] = {**obs, **{key: spec.read(key, obs) for key, spec in self._specs().items()}}
        if self._preprocessor is None:
            device = _device(self.policy)
            return {key: values.to(device) for key, values in batch.items()}
        features = {key: values for key, values in batch.items() if key.startswith("observation.")}
        ready = dict(self._preprocessor({**features, "task": list(context.instructions)}))
        ready.pop(ACTION, None)  # the pipeline adds an empty one, which a policy with queues would take for its own
        return ready

    def _plan(self, batch: dict[str, Any], context: ChunkContext, extra: dict[str, object]) -> Tensor:
        """Raw actions of the policy."""
        if callable(reset := getattr(self.policy, "reset", None)):
            reset()
        self._fill_queues(batch)
        if self._takes_noise:
            rows = int(self.config.horizon) if self._diffuses else int(self.horizon or 0)
            width = int(getattr(self.config, "max_action_dim", None) or self.action_dim or 0)
            extra = {**extra, "noise": context.noise(rows, width).to(_device(self.policy))}
        if not self._diffuses:
            return self._predict(batch, **extra)
        model = cast("Any", self.policy).diffusion
        sample = model.conditional_sample
        model.conditional_sample = partial(sample, generator=_generators(context))
        try:
            return self._predict(batch, **extra)
        finally:
            del model.conditional_sample

    def _fill_queues(self, batch: dict[str, Any]) -> None:
        """Give a policy with observation queues its history: (n, obs_steps, …) of each becomes obs_steps entries."""
        queues = cast("dict[str, deque[Tensor]]", getattr(self.policy, "_queues", None) or {})
        if _IMAGES in queues:
            # all cameras under one key, the camera's axis before (C, H, W)
            batch[_IMAGES] = torch.stack([batch[key] for key in self.config.image_features], dim=-4)
        for key, queue in queues.items():
            if key != ACTION and key in batch:
                queue.clear()
                queue.extend(batch[key].unbind(dim=1) if (self.obs_steps or 1) > 1 else (batch[key],))

    def _finish(self, actions: Tensor) -> Tensor:
        """Actions in our units; a processor sees rows (n · horizon, A), as LeRobot's own loop gives them."""
        if self._postprocessor is None:
            return actions
        rows = cast("Tensor", self._postprocessor(actions.flatten(0, 1)))
        return rows.reshape(*actions.shape[:2], -1)

    @property
    def _diffuses(self) -> bool:
        return hasattr(self.config, "noise_scheduler_type") and hasattr(self.policy, "diffusion")


class RtcLeRobotPolicy(LeRobotPolicy):
    """A LeRobot policy with real-time chunking switched on: it gets what is left of its own previous chunk.

    LeRobot compares in the policy's own units, before the postprocessor: the last raw chunk of each episode is kept.
    """

    policy_identity = "lerobot-rtc-1"

    def __init__(self, policy: object, **options: Any) -> None:
        super().__init__(policy, **options)
        self._chunks: dict[tuple[int, int], Tensor] = {}

    def begin(self, rows: EpisodeRows) -> None:
        """Nothing is left over yet."""
        self.end(rows)

    def end(self, rows: EpisodeRows) -> None:
        """Release what is kept."""
        for key in rows.keys():  # noqa: SIM118  # not a dict
            self._chunks.pop(key, None)

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan float (n, horizon, action_dim).

        The class takes one delay and one length of left-over actions for a whole batch. Rows that differ in these are
        planned by calls of the same whole batch, of which only their rows are read: the size of a batch never changes.
        """
        kinds = torch.stack([context.delay, context.left_over_length], dim=1).cpu()
        keys = list(zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True))
        raw: Tensor | None = None
        real = context.episode_ids.cpu() >= 0  # rows that only fill the batch up need no plan
        for delay, length in kinds[real].unique(dim=0).tolist():
            extra: dict[str, object] = {}
            if length:
                left = torch.zeros((len(keys), length, int(self.action_dim or 0)), device=_device(self.policy))
                for row, key in enumerate(keys):
                    if key in self._chunks and kinds[row].tolist() == [delay, length]:
                        left[row] = self._chunks[key][-length:]
                extra = dict(zip(_RTC, (delay, left), strict=True))
            planned = self._plan(self._inputs(obs, context), context, extra)
            chosen = ((kinds[:, 0] == delay) & (kinds[:, 1] == length)).nonzero().squeeze(1).to(planned.device)
            raw = torch.zeros_like(planned) if raw is None else raw
            raw[chosen] = planned[chosen]
        assert raw is not None  # a batch has rows
        for row, key in enumerate(keys):
            if key[1] >= 0:
                self._chunks[key] = raw[row].detach().clone()
        return self._finish(raw)


def adapt_lerobot(policy: object, **options: Any) -> LeRobotPolicy:
    """Return a policy object of LeRobot as a chunk policy; with its left-over actions where real-time chunking is
    on."""
    rtc = getattr(getattr(policy, "config", None), "rtc_config", None)
    kind = RtcLeRobotPolicy if rtc is not None and getattr(rtc, "enabled", False) else LeRobotPolicy
    return kind(policy, **options)


def load_lerobot_policy(
    directory: str | Path, *, device: str | None = None, groups: Mapping[str, str] | None = None
) -> LeRobotPolicy:
    """Return a policy from a checkpoint directory of LeRobot, with its pre- and postprocessors. Needs the extra
    ``lerobot``.

    Args:
        directory: with ``config.json`` and ``model.safetensors``, or the step's directory above ``pretrained_model``.
            Nothing is fetched from a hub, unless the checkpoint itself names something there.
        device: where it runs; None for what the checkpoint says, or the CPU if that is not there.
        groups: as in :class:`LeRobotPolicy`.
    """
    path = Path(directory)
    path = path / "pretrained_model" if (path / "pretrained_model").is_dir() else path
    if not path.exists() and len(path.parts) == 2 and not path.is_absolute():
        raise ConfigError(
            f"LeRobot policy: expected a directory, got {directory}; a name on the hub is not fetched: "
            f"'hf download {directory} --local-dir DIR', then lerobot:DIR"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"LeRobot policy: expected a directory with config.json, got {directory}")
    if '"type"' not in (path / "config.json").read_text():
        raise DataError(f"LeRobot policy: {path / 'config.json'} does not say the policy's type")
    configs: Any = require_extra("lerobot.configs.policies", extra="lerobot", purpose="a LeRobot policy")
    factory: Any = require_extra("lerobot.policies.factory", extra="lerobot", purpose="a LeRobot policy")
    try:
        config = configs.PreTrainedConfig.from_pretrained(path)
        config.device = device or config.device
        policy = factory.get_policy_class(config.type).from_pretrained(path, config=config)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise DataError(f"LeRobot policy: {path} cannot be loaded: {error}") from error
    processors: tuple[Processor | None, Processor | None] = (None, None)
    if (path / "policy_preprocessor.json").is_file():
        overrides = {"device_processor": {"device": config.device}}
        processors = factory.make_pre_post_processors(
            config, pretrained_path=str(path), preprocessor_overrides=overrides
        )
    return adapt_lerobot(policy, preprocessor=processors[0], postprocessor=processors[1], groups=groups)


def _device(policy: object) -> torch.device:
    if not isinstance(policy, nn.Module):
        return torch.device("cpu")
    return next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))


def _generators(context: ChunkContext) -> list[torch.Generator]:
    """Return a generator per row, seeded by (seed, episode id, chunk index): its draws are those of the denoising
    steps."""
    generators: list[torch.Generator] = []
    for seed, episode, chunk in zip(
        context.seeds.tolist(), context.episode_ids.cpu().split(1), context.chunk_index.tolist(), strict=True
    ):
        bits = int(rng.random_bits(seed, episode, "denoising", chunk, 1))
        generators.append(torch.Generator().manual_seed(bits & (2**63 - 1)))
    return generators


def _action_dim(config: object) -> int | None:
    """Return what a LeRobot configuration says of the size of an action; None where there is no such thing."""
    features: object = getattr(config, "output_features", None)
    action = cast("Mapping[str, object]", features).get(ACTION) if isinstance(features, Mapping) else None
    shape = cast("tuple[int, ...] | None", getattr(action, "shape", None))
    return shape[0] if shape else None


def _mean(processor: object, key: str) -> tuple[float, ...] | None:
    """Return the mean by which a step of a pipeline normalizes a feature; None where it uses none."""
    for step in getattr(processor, "steps", ()):
        statistics: object = getattr(step, "stats", None)
        if isinstance(statistics, Mapping) and key in statistics:
            mean = cast("Mapping[str, Mapping[str, object]]", statistics)[key].get("mean")
            return None if mean is None else tuple(torch.as_tensor(mean).flatten().tolist())
    return None


def _input_features(config: object) -> Mapping[str, object]:
    features: object = getattr(config, "input_features", None)
    return cast("Mapping[str, object]", features) if isinstance(features, Mapping) else {}
