"""Behavior cloning: a chunk policy learns to plan as the demonstrations act, and can go on after a stop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace._interrupts import delay_signals
from headrace._published import read_form
from headrace.errors import ConfigError, check_counts
from headrace.files import write_whole
from headrace.imitation.demonstrations import Demonstrations
from headrace.policies.act import ActCfg, ActPolicy
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs

_FORMAT = "headrace-clone-1"
_MOST_HELD_OUT = 4096
"""Held-out steps that a loss is taken over; evenly chosen where there are more."""


@dataclass(frozen=True, kw_only=True)
class CloneCfg:
    """Settings of :func:`clone`."""

    updates: int = 8000
    """Steps of the optimizer, about 20 ms each on a core without images; the learning rate falls to nothing over
    them."""
    batch: int = 128
    learning_rate: float = 1e-3
    average: float = 0.998
    """Decay of the running average of the weights, which is what :func:`clone` returns."""
    held_out: float = 0.0
    """Share of the episodes that are not learned from; the loss on them is measured."""
    check_every: int = 500
    """Updates from one held-out loss, and checkpoint, to the next."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(updates=self.updates, batch=self.batch, check_every=self.check_every)
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"clone: held_out: expected 0 or more and less than 1, got {self.held_out}")
        if not 0 <= self.average < 1 or not self.learning_rate > 0:
            raise ConfigError(
                f"clone: expected average from 0 to 1 and a learning_rate above 0, got {self.average} and "
                f"{self.learning_rate}"
            )


class CloneLoss(NamedTuple):
    """Mean absolute error of planned actions, in units of their spread."""

    updates: int
    """Made so far."""
    train: float
    """Mean over the updates since the last check."""
    held_out: float | None
    """Of the averaged weights, on episodes that were not learned from; None where there are none."""


OnCheck = Callable[["CloneTraining"], None]


def clone(demos: Demonstrations, cfg: CloneCfg, *, progress: Callable[[int, float], None] | None = None) -> ActPolicy:
    """Train a chunk policy on demonstrations by least absolute error.

    Args:
        demos: at least one episode.
        cfg: see there.
        progress: called with the updates made and the recent loss, now and then.
    """
    training = CloneTraining(demos, cfg)
    training.run(progress=progress)
    return training.policy


class CloneTraining:
    """A training that can be stopped, saved, and gone on with, to the same weights bit for bit.

    Args:
        demos: at least one episode.
        cfg: of the training.
        act: sizes of the policy; those of the demonstrations where None.
    """

    def __init__(self, demos: Demonstrations, cfg: CloneCfg, act: ActCfg | None = None) -> None:
        self.cfg = cfg
        self.losses: list[CloneLoss] = []
        """One for every ``check_every`` updates, and one at the end."""
        self.updates = 0
        """Made so far."""
        self._demos = demos
        self._steps, self._held = demos.split(cfg.held_out, cfg.seed)
        self._learner = make_untrained(demos, seed=cfg.seed, act=act, steps=self._steps).train()
        self.policy = copy.deepcopy(self._learner).eval()
        """The running average of the weights: the result so far."""
        self._optimizer = torch.optim.AdamW(self._learner.parameters(), lr=cfg.learning_rate, weight_decay=1e-4)
        self._generator = torch.Generator().manual_seed(cfg.seed)
        self._since: list[float] = []

    @property
    def held_out_episodes(self) -> int:
        """Episodes that are not learned from."""
        return int((self._demos.left[self._held] == 1).sum())

    def run(
        self, *, progress: Callable[[int, float], None] | None = None, on_check: OnCheck | None = None
    ) -> list[CloneLoss]:
        """Make the updates that are left; returns :attr:`losses`.

        A signal that raises takes effect between two updates: what is saved then is whole.

        Args:
            progress: called with the updates made and the recent loss, now and then.
            on_check: called whenever a loss was added to :attr:`losses`.
        """
        cfg = self.cfg
        while self.updates < cfg.updates:
            with delay_signals():
                loss = self._update()
            if progress is not None and self.updates % 20 == 0:
                progress(self.updates, loss)
            if self.updates % cfg.check_every == 0 or self.updates == cfg.updates:
                with delay_signals():
                    held_out = self.measure_held_out_loss() if len(self._held) else None
                    self.losses.append(CloneLoss(self.updates, sum(self._since) / len(self._since), held_out))
                    self._since.clear()
                    if on_check is not None:
                        on_check(self)
        return self.losses

    def _update(self) -> float:
        cfg, policy = self.cfg, self._learner
        falling = 0.5 * (1.0 + math.cos(math.pi * self.updates / cfg.updates))
        for group in self._optimizer.param_groups:
            group["lr"] = cfg.learning_rate * min(1.0, (self.updates + 1) / 100) * falling
        index = self._steps[torch.randint(len(self._steps), (cfg.batch,), generator=self._generator)]
        loss = self._loss(policy, index)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        self._optimizer.step()
        # the average forgets its random start first
        decay = min(cfg.average, (self.updates + 1) / (self.updates + 11))
        with torch.no_grad():
            for kept, new in zip(self.policy.parameters(), policy.parameters(), strict=True):
                kept.lerp_(new, 1.0 - decay)
        self.updates += 1
        self._since.append(float(loss.detach()))
        return self._since[-1]

    def _loss(self, policy: ActPolicy, index: Tensor) -> Tensor:
        mean, std = policy.get_buffer("action_mean"), policy.get_buffer("action_std")
        target, inside = self._demos.chunks(index, policy.horizon)
        error = (policy.normalized(self._demos.inputs(index)) - (target - mean) / std.clamp(min=1e-3)).abs().mean(dim=2)
        return (error * inside).sum() / inside.sum()

    def measure_held_out_loss(self) -> float:
        """Return the loss of the averaged weights on the episodes that are not learned from."""
        held = self._held
        if len(held) > _MOST_HELD_OUT:
            held = held[torch.linspace(0, len(held) - 1, _MOST_HELD_OUT).long()]
        with torch.no_grad():
            parts = [(float(self._loss(self.policy, index)), len(index)) for index in held.split(self.cfg.batch)]
        return sum(loss * count for loss, count in parts) / len(held)

    def save(self, path: Path) -> None:
        """Write everything that going on needs; ``torch.load(weights_only=True)`` reads it."""
        content = {
            "format": _FORMAT,
            "identity": self._identity(),
            "updates": self.updates,
            "learner": self._learner.state_dict(),
            "policy": self.policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "losses": [tuple(loss) for loss in self.losses],
            "since": list(self._since),
        }
        write_whole(path, lambda part: torch.save(content, part))

    def load(self, path: Path) -> None:
        """Go on from a file of :meth:`save`; one of other settings or demonstrations is refused."""
        saved = read_form(path, "the state of a training by 'headrace imitate' (train without --resume)", _FORMAT)
        for name, value in self._identity().items():
            if saved["identity"].get(name) != value:
                raise ConfigError(
                    f"resume (--resume): {name} was {saved['identity'].get(name)!r} when {path} was saved, and is "
                    f"{value!r} now; use the same settings and data, or train anew"
                )
        self._learner.load_state_dict(saved["learner"])
        self.policy.load_state_dict(saved["policy"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._generator.set_state(saved["generator"])
        self.updates = int(saved["updates"])
        self.losses = [CloneLoss(*loss) for loss in saved["losses"]]
        self._since = list(saved["since"])

    def _identity(self) -> dict[str, Any]:
        return {**asdict(self.cfg), **asdict(self.policy.cfg), "demonstrations": self._demos.fingerprint()}


def act_cfg(demos: Demonstrations) -> ActCfg:
    """Sizes of a policy for demonstrations."""
    return ActCfg(
        obs_dim=demos.obs.shape[1],
        action_dim=demos.actions.shape[1],
        vectors=demos.vectors,
        images=tuple((name, tuple(images.shape)) for name, images in demos.images.items()),
        instructions=demos.instructions,
    )


def make_untrained(
    demos: Demonstrations, *, seed: int, act: ActCfg | None = None, steps: Tensor | None = None
) -> ActPolicy:
    """Return a policy with random weights and the statistics of the demonstrations: what :func:`clone` starts from.

    Args:
        demos: at least one episode.
        seed: of the weights.
        act: sizes; those of the demonstrations where None.
        steps: int64, those that the statistics are taken of; None for all.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = ActPolicy(act_cfg(demos) if act is None else act)
    chosen = slice(None) if steps is None or len(steps) == len(demos.obs) else steps
    policy.set_statistics(demos.obs[chosen], demos.actions[chosen])
    return policy.eval()


@dataclass(frozen=True, slots=True)
class MeanAction:
    """A chunk policy that replays one action (A,): the least that a learner must beat."""

    action: Tensor
    horizon: int = 16
    obs_steps: int = 1

    @property
    def action_dim(self) -> int:
        """Size of the action."""
        return len(self.action)

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Return the action, (n, horizon, A)."""
        del obs
        return self.action.expand(len(context.env_ids), self.horizon, -1).clone()
