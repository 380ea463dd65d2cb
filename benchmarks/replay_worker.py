"""One library's replay buffer, filled and sampled in this process; prints one line of JSON. Started by replay.py."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil

ENVS, STACK, SIDE, BATCH = 16, 4, 84, 256
FRAME = SIDE * SIDE
MOVED = BATCH * (STACK + 1) * FRAME
"""Bytes of the K + 1 frames of a batch."""


class Source:
    """Steps of 16 environments with stamped frames: bytes 0–9 of a frame are environment, episode, step.

    Episodes last 60 to 180 steps, half of them end by truncation.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.texture = self.rng.integers(0, 256, (512, FRAME), dtype=np.uint8)
        self.episode = np.zeros(ENVS, np.int32)
        self.step_of = np.zeros(ENVS, np.int32)
        self.limit = self.rng.integers(60, 181, ENVS)
        self.count = 0
        first = self._frames(np.arange(ENVS))
        self.obs = np.repeat(first[:, None], STACK, 1)

    def _frames(self, envs: np.ndarray) -> np.ndarray:
        """A stamped frame of each of these environments."""
        frames = self.texture[(self.count + np.arange(envs.shape[0])) % 512]
        self.count += envs.shape[0]
        frames[:, :2] = envs.astype(np.int16)[:, None].view(np.uint8)
        frames[:, 2:6] = self.episode[envs][:, None].view(np.uint8)
        frames[:, 6:10] = self.step_of[envs][:, None].view(np.uint8)
        return frames.reshape(-1, SIDE, SIDE)

    def step(self) -> tuple[np.ndarray, ...]:
        """Observation, true next observation, what follows it, reward, terminated, truncated."""
        obs = self.obs
        true_next = np.empty_like(obs)
        true_next[:, :-1] = obs[:, 1:]
        self.step_of += 1
        true_next[:, -1] = self._frames(np.arange(ENVS))
        ended = (self.step_of >= self.limit).nonzero()[0]
        following = true_next
        terminated, truncated = np.zeros(ENVS, bool), np.zeros(ENVS, bool)
        if ended.size:
            terminated[ended] = self.episode[ended] % 2 == 0
            truncated[ended] = ~terminated[ended]
            self.episode[ended] += 1
            self.step_of[ended] = 0
            self.limit[ended] = self.rng.integers(60, 181, ended.size)
            following = true_next.copy()
            following[ended] = self._frames(ended)[:, None]
        self.obs = following
        reward = self.rng.standard_normal(ENVS).astype(np.float32)
        return obs, true_next, following, reward, terminated, truncated


def stamps(frames: np.ndarray) -> np.ndarray:
    """(B, 84, 84) → (B, 3): environment, episode, step."""
    head = np.ascontiguousarray(frames.reshape(frames.shape[0], -1)[:, :10])
    return np.concatenate([head[:, :2].view(np.int16).astype(np.int64), head[:, 2:].view(np.int32).astype(np.int64)], 1)


def exactness(obs: np.ndarray, following: np.ndarray, done: np.ndarray, seen: dict[str, list[bool]]) -> None:
    """Note whether next observations follow their observation, inside and at ends."""
    here, there = stamps(obs[:, -1]), stamps(following[:, -1])
    right = (here[:, 0] == there[:, 0]) & (here[:, 1] == there[:, 1]) & (here[:, 2] + 1 == there[:, 2])
    done = done.reshape(-1).astype(bool)
    seen["ends"] += right[done].tolist()
    seen["inside"] += right[~done].tolist()


def verdict(values: list[bool]) -> str:
    return "–" if not values else "yes" if all(values) else f"no ({100 * np.mean(values):.0f} % right)"


ROUNDS = 4


class Neighbors:
    """How much of the machine other processes took meanwhile."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float:
        """Cores that others kept busy, on average since this was made."""
        (all_, own, clock), (all_0, own_0, clock_0) = self._now(), self._start
        return max((all_ - all_0) - (own - own_0), 0.0) / (clock - clock_0)

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        own = psutil.Process().cpu_times()
        return busy, own.user + own.system, time.perf_counter()


def measure(frames: int, batches: int, extend: Callable, sample: Callable, read: Callable, nbytes: Callable) -> dict:
    """Fill; then rounds of writes to the full buffer (in groups of 64, as some libraries write in blocks) and samples.

    Each figure is the median of its best round: a neighbor who takes a core for a second spoils a round, not the run.
    """
    source, process = Source(), psutil.Process()
    before = process.memory_info().rss
    for _ in range(frames // ENVS):
        extend(*source.step())
    resident = process.memory_info().rss - before
    seen: dict[str, list[bool]] = {"inside": [], "ends": []}
    for _ in range(3):
        sample()
    writes, reads = [], []
    neighbors = Neighbors()
    for _ in range(ROUNDS):
        groups, times = [], []
        for _ in range(3):
            steps = [source.step() for _ in range(64)]
            start = time.perf_counter()
            for step in steps:
                extend(*step)
            groups.append((time.perf_counter() - start) / 64)
        for _ in range(max(batches // ROUNDS, 1)):
            start = time.perf_counter()
            batch = sample()
            times.append(time.perf_counter() - start)
            exactness(*read(batch), seen)
            del batch
        writes.append(np.median(groups))
        reads.append(np.median(times))
    return {
        "bytes": nbytes() / frames,
        "resident": resident / frames,
        "sample_ms": 1e3 * float(min(reads)),
        "extend_us": 1e6 * float(min(writes)),
        "inside": verdict(seen["inside"]),
        "ends": verdict(seen["ends"]),
        "neighbors": neighbors.share(),
    }


def run_torchrl(frames: int, batches: int, variant: str) -> dict:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, RandomSampler, SliceSampler, TensorDictReplayBuffer
    from torchrl.envs.transforms import NextObservationDelta, NextStateReconstructor

    sampler, transform = RandomSampler(), None
    if variant == "compact":
        sampler = SliceSampler(slice_len=16, traj_key=("collector", "traj_ids"), strict_length=False)
        transform = NextStateReconstructor(
            keys=("observation",), done_key=("next", "done"), step_count_key="step_count", fill_value=0
        )
    if variant == "delta":
        transform = NextObservationDelta(in_keys=["observation"], delta_dtype=torch.float16)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(frames), sampler=sampler, batch_size=BATCH)
    if transform is not None:
        buffer.append_transform(transform)
    episode_key = np.zeros(ENVS, np.int64)
    counts = np.zeros(ENVS, np.int64)
    # a compact buffer is read in slices: environments one after another, as a collector delivers them
    pending: list[TensorDict] = []

    def make(obs, true_next, _following, reward, terminated, truncated):
        nonlocal episode_key
        done = terminated | truncated
        after = {
            "reward": torch.from_numpy(reward)[:, None],
            "done": torch.from_numpy(done)[:, None],
            "terminated": torch.from_numpy(terminated)[:, None],
            "truncated": torch.from_numpy(truncated)[:, None],
        }
        observed, nexts = torch.from_numpy(obs), torch.from_numpy(true_next)
        if variant == "default":
            after["observation"] = nexts
        if variant == "delta":
            after["delta"] = {"observation": (nexts.to(torch.float16) - observed.to(torch.float16))}
        data = TensorDict(
            {
                "observation": observed,
                "action": torch.zeros(ENVS, dtype=torch.int64),
                "step_count": torch.from_numpy(counts.copy())[:, None],
                "collector": {"traj_ids": torch.from_numpy(np.arange(ENVS) + ENVS * episode_key)},
                "next": after,
            },
            [ENVS],
        )
        episode_key = episode_key + done
        counts[:] = np.where(done, 0, counts + 1)
        return data

    def extend(*step):
        data = make(*step)
        if variant != "compact":
            buffer.extend(data)
            return
        pending.append(data)
        if len(pending) == 64:
            buffer.extend(torch.stack(pending, 1).reshape(-1))
            pending.clear()

    def read(batch):
        return batch["observation"].numpy(), batch["next", "observation"].numpy(), batch["next", "done"].numpy()

    def nbytes():
        return sum(value.numel() * value.element_size() for value in buffer._storage._storage.values(True, True))

    return measure(frames, batches, extend, buffer.sample, read, nbytes)


def run_sb3(frames: int, batches: int, variant: str) -> dict:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    optimize = variant == "optimize"
    buffer = ReplayBuffer(
        frames,
        spaces.Box(0, 255, (STACK, SIDE, SIDE), np.uint8),
        spaces.Discrete(4),
        device="cpu",
        n_envs=ENVS,
        optimize_memory_usage=optimize,
        handle_timeout_termination=not optimize,
    )
    action = np.zeros((ENVS, 1), np.int64)

    def extend(obs, true_next, _following, reward, terminated, truncated):
        done = terminated | truncated
        # SB3's algorithms give the true last observation; the optimized form loses it to the next episode's first
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in truncated]
        buffer.add(obs, true_next, action, reward, done, infos)

    def read(batch):
        # flags after timeout handling say "terminated" only: ends are read from the stamps of episodes instead
        obs, following = batch.observations.numpy(), batch.next_observations.numpy()
        here, there = stamps(obs[:, -1]), stamps(following[:, -1])
        changed = (here[:, 1] != there[:, 1]) | (batch.dones.numpy().reshape(-1) > 0)
        return obs, following, changed

    def nbytes():
        names = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
        return sum(getattr(buffer, name).nbytes for name in names if hasattr(buffer, name))

    return measure(frames, batches, extend, lambda: buffer.sample(BATCH), read, nbytes)


def run_tianshou(frames: int, batches: int, variant: str) -> dict:
    from tianshou.data import Batch, VectorReplayBuffer

    settings = {
        "default": {},
        "ignore_next": {"ignore_obs_next": True},
        "last_frame": {"ignore_obs_next": True, "save_only_last_obs": True, "stack_num": STACK},
    }[variant]
    buffer = VectorReplayBuffer(frames, ENVS, **settings)
    action = np.zeros(ENVS, np.int64)

    def extend(obs, true_next, _following, reward, terminated, truncated):
        done = terminated | truncated
        buffer.add(
            Batch(obs=obs, act=action, rew=reward, terminated=terminated, truncated=truncated, done=done,
                  obs_next=true_next, info={})
        )  # fmt: skip

    def read(batch):
        return np.asarray(batch.obs), np.asarray(batch.obs_next), np.asarray(batch.done)

    def nbytes():
        def size(batch) -> int:
            total = 0
            for value in batch.values():
                total += size(value) if isinstance(value, Batch) else getattr(value, "nbytes", 0)
            return total

        return size(buffer._meta)

    return measure(frames, batches, extend, lambda: buffer.sample(BATCH)[0], read, nbytes)


def run_cpprb(frames: int, batches: int, variant: str) -> dict:
    from cpprb import ReplayBuffer

    # next_of and stack_compress know one environment: a buffer for each, whose frames are stacked along the last axis
    shape = {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8}
    columns = {"obs": shape, "act": {"dtype": np.int64}, "rew": {"dtype": np.float32}, "done": {"dtype": bool}}
    saving = {"next_of": "obs"} | ({"stack_compress": "obs"} if variant == "compress" else {})
    process = psutil.Process()
    before = process.memory_info().rss
    buffers = [ReplayBuffer(frames // ENVS, columns, **saving) for _ in range(ENVS)]

    def extend(obs, true_next, _following, reward, terminated, truncated):
        done = terminated | truncated
        for env, buffer in enumerate(buffers):
            here, there = np.moveaxis(obs[env], 0, -1), np.moveaxis(true_next[env], 0, -1)
            buffer.add(obs=here, next_obs=there, act=0, rew=reward[env], done=done[env])
            if done[env]:
                buffer.on_episode_end()

    def sample():
        parts = [buffer.sample(BATCH // ENVS) for buffer in buffers]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def nbytes():
        return process.memory_info().rss - before  # its arrays are not reachable

    def read(batch):
        return np.moveaxis(batch["obs"], -1, 1), np.moveaxis(batch["next_obs"], -1, 1), batch["done"]

    return measure(frames, batches, extend, sample, read, nbytes)


def headrace_buffer(frames: int, depth: int = STACK, **settings):
    import torch

    from headrace.replay import ArraySpec, ReplayBuffer
    from headrace.types import StackSpec

    picture, action = ArraySpec((depth, SIDE, SIDE), torch.uint8), ArraySpec((), torch.int64)
    return ReplayBuffer(frames, ENVS, picture, action, stack=StackSpec(frames=depth, dim=0), **settings)


def headrace_extend(buffer):
    import torch

    from headrace.types import Step

    action = torch.zeros(ENVS, dtype=torch.int64)
    last: dict[str, torch.Tensor] = {}

    def extend(obs, true_next, following, reward, terminated, truncated):
        # as in any loop: the observation is the tensor that the last step gave
        nonlocal last
        info = {}
        done = terminated | truncated
        if done.any():
            info = {"final_obs": {"policy": torch.from_numpy(true_next)}, "_final_obs": torch.from_numpy(done)}
        step = Step(
            {"policy": torch.from_numpy(following)},
            torch.from_numpy(reward),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            info,
        )
        buffer.extend(last or {"policy": torch.from_numpy(obs)}, action, step)
        last = step.obs

    return extend


def headrace_read(batch):
    flat = batch.reshape(-1)
    return flat["observation"].numpy(), flat["next", "observation"].numpy(), flat["next", "done"].numpy()


def run_headrace(frames: int, batches: int, variant: str, directory: str | None) -> dict:
    where = None if variant == "ram" else Path(directory or ".") / "store"
    buffer = headrace_buffer(frames, directory=where)
    extend = headrace_extend(buffer)
    return measure(frames, batches, extend, lambda: buffer.sample(BATCH), headrace_read, lambda: buffer.nbytes)


def run_samplers(frames: int, batches: int) -> dict:
    """Every sampler of ours and the memcpy limit, one after another in each round."""
    import torch

    from headrace.replay import PrioritizedSampler, SliceSampler, UniformSampler

    steps = 16
    # two stores, and every sampler over them
    stacks, single = headrace_buffer(frames), headrace_buffer(frames, 1)
    buffers = {
        "uniform": stacks,
        "n_step": stacks.with_sampler(UniformSampler(), "n_step", n_step=3),
        "prioritized": stacks.with_sampler(PrioritizedSampler(), "prioritized"),
        "slices": stacks.with_sampler(SliceSampler(steps), "slices"),
        "prioritized_slices": stacks.with_sampler(PrioritizedSampler(steps), "prioritized_slices"),
        "single": single,
        "single_n_step": single.with_sampler(UniformSampler(), "single_n_step", n_step=3),
    }
    feed, single_feed = headrace_extend(stacks), headrace_extend(single)
    source = Source()
    for _ in range(frames // ENVS):
        step = source.step()
        feed(*step)
        single_feed(*(np.ascontiguousarray(pictures[:, -1:]) for pictures in step[:3]), *step[3:])
    memory = torch.zeros(max(frames * FRAME, 2 * MOVED), dtype=torch.uint8)
    memory.fill_(1)
    to = torch.zeros(MOVED, dtype=torch.uint8)
    rng = np.random.default_rng(0)
    others = ("prioritized_update", "slices_64", "memcpy", "memcpy_hot")
    times: dict[str, list[float]] = {name: [] for name in (*buffers, *others)}

    def timed(name: str, action: Callable) -> object:
        start = time.perf_counter()
        result = action()
        times[name].append(time.perf_counter() - start)
        return result

    for _ in range(batches):
        start = int(rng.integers(0, memory.shape[0] - MOVED))
        piece = memory[start : start + MOVED]
        for name, source_ in (("memcpy", piece), ("memcpy_hot", piece)):
            timed(name, lambda source_=source_: to.copy_(source_))
        for name, buffer in buffers.items():
            count = {"slices": BATCH // steps, "prioritized_slices": 64}.get(name, BATCH)
            batch = timed(name, lambda buffer=buffer, count=count: buffer.sample(count))
            if name == "prioritized":
                index, priority = batch["index"], torch.rand(BATCH)
                timed("prioritized_update", partial(buffer.update_priorities, index, priority))
            del batch
        # as many frames as 256 transitions alone
        timed("slices_64", lambda: buffers["slices"].sample(64))
    return {name: 1e3 * float(np.median(values[2:])) for name, values in times.items()}


def run_writes(frames: int, batches: int) -> dict:
    """The same 64 steps one by one and as one batch, by turns, into full buffers; and what comparing bytes takes."""
    import torch
    from tensordict import TensorDict

    from headrace.replay import ring

    steps = 64
    one, whole = headrace_buffer(frames), headrace_buffer(frames)
    feed, whole_feed, source = headrace_extend(one), headrace_extend(whole), Source()
    for _ in range(frames // ENVS):
        step = source.step()
        feed(*step)
        whole_feed(*step)
    times: dict[str, list[float]] = {"extend_steps": [], "extend_batch": [], "extend_compact": [], "compare": []}
    for _ in range(max(batches // 20, 4)):
        taken, named = [], []
        for _ in range(steps):
            named.append(np.arange(ENVS) + ENVS * source.episode.astype(np.int64))
            taken.append(source.step())
        columns = [torch.from_numpy(np.stack(part, 1)) for part in zip(*taken, strict=True)]
        after = {
            "reward": columns[3],
            "done": columns[4] | columns[5],
            "terminated": columns[4],
            "truncated": columns[5],
        }
        content = {
            "observation": columns[0],
            "action": torch.zeros(ENVS, steps, dtype=torch.int64),
            "collector": {"traj_ids": torch.from_numpy(np.stack(named, 1))},
        }
        full = TensorDict(content | {"next": after | {"observation": columns[1]}}, [ENVS, steps])
        compact = TensorDict(content | {"next": after}, [ENVS, steps])
        start = time.perf_counter()
        for step in taken:
            feed(*step)
        times["extend_steps"].append((time.perf_counter() - start) / steps)
        for name, batch in (("extend_batch", full), ("extend_compact", compact)):
            start = time.perf_counter()
            whole.extend(batch, fill_value=0)
            times[name].append((time.perf_counter() - start) / steps)
        pool, last = one.store.pool, torch.from_numpy(taken[-1][2])
        for _ in range(8):
            start = time.perf_counter()
            differs = np.zeros(ENVS, np.bool_)
            for plan in pool._plans:  # as FramePool.write does for every step that may not follow the one before
                expected = np.empty((ENVS, plan.frames), np.int64)
                ring.pending(pool.all_envs, differs, pool.counts, pool.ring, pool.stacks[plan.name], expected)
                plan.rows.differ(expected, plan.outer, last, pool.all_envs, differs)
            times["compare"].append(time.perf_counter() - start)
    return {name: 1e6 * float(np.median(values[1:])) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["torchrl", "sb3", "tianshou", "cpprb", "headrace", "samplers", "writes"])
    parser.add_argument("variant")
    parser.add_argument("--frames", type=int, required=True, help="transitions that the buffer holds")
    parser.add_argument("--batches", type=int, required=True, help="batches of 256 to time")
    parser.add_argument("--directory", help="for a store on disk")
    arguments = parser.parse_args()
    frames = arguments.frames // ENVS * ENVS
    if arguments.library == "samplers":
        result = run_samplers(frames, arguments.batches)
    elif arguments.library == "writes":
        result = run_writes(frames, arguments.batches)
    elif arguments.library == "headrace":
        result = run_headrace(frames, arguments.batches, arguments.variant, arguments.directory)
    else:
        run = {"torchrl": run_torchrl, "sb3": run_sb3, "tianshou": run_tianshou, "cpprb": run_cpprb}[arguments.library]
        result = run(frames, arguments.batches, arguments.variant)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
