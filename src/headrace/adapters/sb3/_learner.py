"""Stable-Baselines3's PPO, an iteration at a time: its own ``collect_rollouts`` and ``train``."""

from __future__ import annotations

import io
import json
import math
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn

from headrace.adapters._checkpoint import META_KEY, CheckpointMeta, checked_fit
from headrace.adapters._learner import AnyEnv, InferencePolicy, Learner, Memory, Times
from headrace.adapters.sb3._env import Sb3Env
from headrace.adapters.sb3._features import Convolutions, GroupFeatures, GroupPolicy, NormalizedVector
from headrace.errors import DataError
from headrace.files import write_whole
from headrace.rollout import PPOCfg
from headrace.rollout._groups import ReadGroups, is_image
from headrace.types import Obs, StateDict

_STATES = ("policy", "policy.optimizer")
_LEFT_OUT = ("system_info.txt",)
"""Says what machine a checkpoint is from, and is never read."""


class Sb3Learner(Learner):
    """Stable-Baselines3's PPO."""

    library = "sb3"

    def __init__(self, env: AnyEnv, settings: PPOCfg) -> None:
        super().__init__(env, settings)
        self._env = Sb3Env(self.core)
        self.model = PPO(
            GroupPolicy if len(self.core.read.all) > 1 else "MlpPolicy",
            self._env,
            learning_rate=settings.learning_rate,
            n_steps=settings.steps,
            batch_size=settings.minibatch_size(env.num_envs),
            n_epochs=settings.epochs,
            gamma=settings.gamma,
            gae_lambda=settings.lam,
            clip_range=settings.clip,
            ent_coef=settings.entropy_weight,
            vf_coef=settings.value_weight,
            max_grad_norm=settings.max_grad_norm,
            policy_kwargs=_policy(settings, self.core.read),
            device=str(env.device),
        )
        # without a folder: SB3's own would leave an empty one in the temporary directory
        self.model.set_logger(Logger(folder=None, output_formats=[]))
        # what learn() does before its loop: it resets the environment
        _, self._callback = self.model._setup_learn(total_timesteps=1)  # pyright: ignore[reportPrivateUsage]

    def iterate(self) -> Times:
        """One turn of ``learn``'s loop."""
        model, begin = self.model, time.perf_counter()
        model.collect_rollouts(self._env, self._callback, model.rollout_buffer, self.settings.steps)
        between = time.perf_counter()
        model.train()
        self._update_statistics()
        return Times(between - begin, time.perf_counter() - between)

    def _update_statistics(self) -> None:
        """Show the rollout, which training has left flat, to the normalizers, which are ours and not SB3's."""
        seen: Any = self.model.rollout_buffer.observations
        policy = self.model.policy
        for features in {policy.pi_features_extractor, policy.vf_features_extractor}:
            if isinstance(features, NormalizedVector):
                rows = torch.as_tensor(seen, device=self.core.device)
                features.normalizer.update(rows.reshape(-1, rows.shape[-1]))
            elif isinstance(features, GroupFeatures):
                features.update({name: torch.as_tensor(seen[name]) for name in features.encoder.names})

    def save(self, path: Path, meta: CheckpointMeta) -> None:
        """As ``model.save`` does, with our description as one more member of the archive."""
        whole = io.BytesIO()
        self.model.save(whole)

        def write(part: Path) -> None:
            with zipfile.ZipFile(whole) as given, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as kept:
                for name in given.namelist():
                    if name not in _LEFT_OUT:
                        kept.writestr(name, given.read(name))
                kept.writestr(f"{META_KEY}.json", json.dumps(meta.plain()))

        write_whole(path, write)

    def load(self, path: Path, *, trust: bool = False) -> None:
        """Policy, statistics and optimizer. What SB3 pickles with them is not read: nothing needs trust."""
        del trust
        try:
            with zipfile.ZipFile(path) as archive:
                files = {name: io.BytesIO(archive.read(f"{name}.pth")) for name in _STATES}
            states = {
                name: torch.load(file, map_location=self.core.device, weights_only=True) for name, file in files.items()
            }
        except (zipfile.BadZipFile, KeyError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise DataError(f"{path}: not a checkpoint of sb3, or cut off: {error}") from error
        checked_fit(path, self.library, lambda: self.model.set_parameters(states, device=self.core.device))

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.model._last_obs = self._env.arrays(self.core.obs)  # pyright: ignore[reportPrivateUsage]  # where learn() goes on

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """SB3's ``predict``."""

        def act(obs: Obs, _: Memory | None) -> tuple[Tensor, None]:
            chosen = self.model.predict(self._env.arrays(obs), deterministic=deterministic)[0]
            return self.core.rescaled(torch.from_numpy(chosen).to(self.core.device)), None

        return InferencePolicy(act)


def _policy(settings: PPOCfg, read: ReadGroups) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "net_arch": {"pi": list(settings.hidden), "vf": list(settings.hidden)},
        "activation_fn": nn.ELU,
        "log_std_init": math.log(settings.initial_std),
        "ortho_init": False,
        "optimizer_kwargs": {"eps": 1e-8},
    }
    if len(read.all) > 1:
        groups = {"actor_groups": read.actor, "critic_groups": read.critic, "normalize": settings.normalize_obs}
        return chosen | {"features_extractor_kwargs": groups, "share_features_extractor": False}
    if any(map(is_image, read.all.values())):
        return chosen | {"features_extractor_class": Convolutions, "share_features_extractor": False}
    return chosen | ({"features_extractor_class": NormalizedVector} if settings.normalize_obs else {})
