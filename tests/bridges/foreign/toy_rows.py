"""Batched toy simulators of the row protocol, of numpy and of torch; entries for another interpreter, too."""

from __future__ import annotations

from typing import Any

import numpy as np

WIDTH = 3


class NumpyRows:
    """Rows that walk: hidden velocity, a length per episode, success, an instruction; all of it from the seed.

    Made to catch mistakes: a row that has ended refuses to step, and randomness goes on within an episode (a counter
    per row).
    """

    name = "toy-rows"

    def __init__(self, num_envs: int, ends_at: int = 9) -> None:
        self.num_envs = num_envs
        self._ends_at = ends_at
        self.observation_space = {
            "type": "dict",
            "spaces": {
                "policy": {"type": "box", "shape": [WIDTH]},
                "image": {"type": "box", "shape": [2, 2, 1], "dtype": "uint8"},
            },
        }
        self.action_space = {"type": "box", "shape": [2], "low": -1, "high": 1}
        self.state: dict[str, Any] = {
            "place": np.zeros((num_envs, WIDTH)),
            "speed": np.zeros((num_envs, WIDTH)),
            "seed": np.zeros(num_envs, np.int64),
            "count": np.zeros(num_envs, np.int64),
            "length": np.full(num_envs, ends_at),
            "done": np.ones(num_envs, np.bool_),
        }
        self.calls: list[str] = []

    def _noise(self, rows: Any) -> Any:
        draws = [
            np.random.default_rng([self.state["seed"][i], self.state["count"][i]]).normal(size=WIDTH) for i in rows
        ]
        return np.array(draws).reshape(-1, WIDTH)

    def _obs(self) -> dict[str, Any]:
        shade = (np.abs(self.state["place"][:, :1]) * 40 % 256).astype(np.uint8)
        image = np.broadcast_to(shade[:, :, None, None], (self.num_envs, 1, 2, 2)).transpose(0, 2, 3, 1)
        return {"policy": self.state["place"].astype(np.float32), "image": image}

    def reset_rows(self, ids: Any, seeds: Any) -> tuple[Any, Any]:
        self.calls.append(f"reset {len(ids)}")
        state = self.state
        state["seed"][ids], state["count"][ids], state["done"][ids] = seeds, 0, False
        state["length"][ids] = self._ends_at + seeds % 5
        state["place"][ids] = self._noise(ids)
        state["speed"][ids] = 0.0
        return self._obs(), {"instruction": [f"walk {length} steps" for length in state["length"]]}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.calls.append("step")
        actions, state = np.asarray(actions), self.state
        if state["done"].any():
            raise RuntimeError(f"rows {np.flatnonzero(state['done'])} have ended and were not reset")
        if not np.isfinite(actions).all():
            raise RuntimeError("expected finite actions for every row")
        state["count"] += 1
        state["speed"][:, :2] += 0.3 * actions
        state["speed"] += 0.05 * self._noise(range(self.num_envs))
        state["place"] += state["speed"]
        fell = np.abs(state["place"][:, 2]) > 2.5
        cut = (state["count"] >= state["length"]) & ~fell
        state["done"] = fell | cut
        return self._obs(), state["place"][:, 0].copy(), fell, cut, {"success": state["place"][:, 0] > 0}

    def close(self) -> None:
        self.calls.append("close")


class SavedRows(NumpyRows):
    """With both functions of row restore."""

    def save_rows(self, mask: Any) -> Any:
        self.calls.append("save")
        return {name: values[mask] for name, values in self.state.items()}

    def restore_rows(self, mask: Any, saved: Any) -> None:
        self.calls.append("restore")
        for name, values in saved.items():
            self.state[name][mask] = values


class SelectedRows(SavedRows):
    """Only the rows of a mask change."""

    def step_rows(self, actions: Any, mask: Any) -> tuple[Any, ...]:
        self.calls.append("step_rows")
        before = {name: values.copy() for name, values in self.state.items()}
        self.state["done"][~mask] = False  # what an ended row does here is thrown away
        result = super().step(actions)
        self.calls.pop()  # a step of its own
        for name, values in before.items():
            self.state[name][~mask] = values[~mask]
        return result


class UnseededRows(SelectedRows):
    """Its randomness goes on where it was, whatever the seed: no identity of episodes."""

    reseeds = False

    def __init__(self, num_envs: int, ends_at: int = 9) -> None:
        super().__init__(num_envs, ends_at)
        self.state["begun"] = np.zeros(num_envs, np.int64)

    def reset_rows(self, ids: Any, seeds: Any) -> tuple[Any, Any]:
        self.state["begun"][ids] += 1
        return super().reset_rows(ids, ids * 1000 + self.state["begun"][ids])


class ForgetfulRows(SavedRows):
    """A mistake that the checks must find: the hidden speed is not saved."""

    def save_rows(self, mask: Any) -> Any:
        saved = super().save_rows(mask)
        del saved["speed"]
        return saved


def torch_rows(num_envs: int, ends_at: int = 9, device: str = "cpu") -> Any:
    """The same walk on tensors, kept on their device."""
    import torch

    class TorchRows:
        name = "toy-rows-torch"

        def __init__(self) -> None:
            self.num_envs, self.device = num_envs, device
            like = NumpyRows(1)
            self.observation_space, self.action_space = like.observation_space, like.action_space
            zeros = torch.zeros((num_envs, WIDTH), dtype=torch.float64, device=device)
            flags = torch.zeros(num_envs, dtype=torch.int64, device=device)
            self.state = {"place": zeros, "speed": zeros.clone(), "seed": flags, "count": flags.clone()}
            self.seen: list[Any] = []

        def _noise(self) -> Any:
            # a hash of (seed, count, column): the same for a row in a batch of any size
            mix = self.state["seed"][:, None] * 7919 + self.state["count"][:, None] * 104729
            mix = (mix + torch.arange(WIDTH, device=device) * 31337) % 1_000_003
            return (mix * 48271 % 1_000_003).double() / 1_000_003 - 0.5

        def _obs(self) -> Any:
            shade = (self.state["place"][:, :1].abs() * 40 % 256).to(torch.uint8)
            return {"policy": self.state["place"].float(), "image": shade[:, :, None, None].repeat(1, 2, 2, 1)}

        def reset_rows(self, ids: Any, seeds: Any) -> Any:
            rows = torch.as_tensor(ids, device=device)
            self.state["seed"][rows] = torch.as_tensor(seeds, device=device)
            self.state["count"][rows] = 0
            self.state["speed"][rows] = 0.0
            self.state["place"][rows] = self._noise()[rows]
            return self._obs(), {"instruction": "walk"}

        def step(self, actions: Any) -> Any:
            self.seen.append(actions)
            state = self.state
            state["count"] += 1
            state["speed"][:, :2] += 0.3 * torch.as_tensor(actions, device=device)
            state["speed"] += 0.1 * self._noise()
            state["place"] += state["speed"]
            fell = state["place"][:, 2].abs() > 2.5
            cut = (state["count"] >= ends_at + state["seed"] % 5) & ~fell
            return self._obs(), state["place"][:, 0], fell, cut, {}

        def save_rows(self, mask: Any) -> Any:
            rows = torch.as_tensor(mask, device=device)
            return {name: values[rows] for name, values in self.state.items()}

        def restore_rows(self, mask: Any, saved: Any) -> None:
            rows = torch.as_tensor(mask, device=device)
            for name, values in saved.items():
                self.state[name][rows] = values

    return TorchRows()


def no_rows(num_envs: int) -> Any:
    """A mistake: no simulator of the row protocol."""
    return object()


def one_row(num_envs: int) -> Any:
    """A mistake: not as many rows as it was asked for."""
    return SavedRows(1)
