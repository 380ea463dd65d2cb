"""Cameras that are late, slow, stalled and noisy: exact however and whenever their pictures are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import headrace
from headrace.envs import ImageNoise, ImageSpec
from headrace.envs._sensors import add_noise, disturb_colors
from headrace.errors import ConfigError
from headrace.sim import CameraSpec

N, STEPS = 3, 9
CAMERA = CameraSpec(name="c", width=4, height=4)
NOISE = ImageNoise(additive=9.0, salt_and_pepper=0.05)
EVERYTHING = {"delay": (1, 3), "hold": 0.4, "period": 2, "noise": NOISE}


def make(num_envs: int = N, frames: int = 1, threads: int = 1, **sensor: object):
    overrides = {f"images.policy.{name}": value for name, value in ({"frames": frames} | sensor).items()}
    overrides |= {"images.policy.camera.width": 20, "images.policy.camera.height": 16}
    return headrace.make("cartpole-camera-terms", num_envs, seed=4, threads=threads, overrides=overrides)


def act(num_envs: int, step: int) -> torch.Tensor:
    """The same for an environment whatever the batch is."""
    return torch.sin(torch.arange(num_envs) * 3.0 + step * 1.7)[:, None].float()


def play(env, steps: int = STEPS, first: int = 0) -> list[np.ndarray]:
    shown = [env.reset()[0]["policy"].numpy()] if first == 0 else []
    for step in range(first, steps):
        shown.append(env.step(act(env.num_envs, step)).obs["policy"].numpy())
    return shown


@pytest.mark.parametrize("frames", [1, 3])
def test_a_delayed_camera_shows_the_pictures_of_some_steps_ago(frames: int) -> None:
    plain, late = play(make(frames=frames)), play(make(frames=frames, delay=3))
    for step in range(STEPS + 1):
        assert np.array_equal(late[step], plain[max(step - 3, 0)])
    assert not np.array_equal(plain[0], plain[STEPS])


def test_every_episode_draws_its_lag_from_the_range() -> None:
    env = make(32, delay=(1, 3))
    plain, late = play(make(32)), play(env)
    lags = env._held._cameras[0]._sensor._lag
    assert set(lags) == {1, 2, 3}
    assert all(np.array_equal(late[8][row], plain[8 - lags[row]][row]) for row in range(32))


@pytest.mark.parametrize("frames", [1, 2])
def test_a_slow_camera_repeats_its_picture_without_drawing_it_again(frames: int) -> None:
    env = make()
    plain = play(env)
    slow = make(frames=frames, period=2)
    shown = play(slow)
    for step in range(STEPS + 1):
        newest = shown[step][..., -3:]
        assert np.array_equal(newest, plain[step // 2 * 2])
    # the first picture and one of two steps, of each environment
    assert slow.frames_drawn == N * (1 + STEPS // 2)
    assert env.frames_drawn == N * (1 + STEPS)


def test_a_stalled_camera_shows_the_picture_of_the_step_before_or_the_newest() -> None:
    plain, env = play(make(16)), make(16, hold=0.5)
    shown = play(env)
    repeats = 0
    for step in range(1, STEPS + 1):
        for row in range(16):
            again = np.array_equal(shown[step][row], shown[step - 1][row])
            assert again or np.array_equal(shown[step][row], plain[step][row])
            repeats += again
    assert 0.35 < repeats / (16 * STEPS) < 0.65
    assert env.frames_drawn < 16 * (1 + STEPS) * 0.7


@pytest.mark.parametrize("frames", [1, 3])
def test_pictures_do_not_depend_on_batch_threads_or_when_they_are_drawn(frames: int) -> None:
    whole = play(make(frames=frames, **EVERYTHING))
    wide = play(make(7, frames=frames, threads=2, **EVERYTHING))
    for step in range(STEPS + 1):
        assert np.array_equal(wide[step][:N], whole[step])
    seldom = make(frames=frames, **EVERYTHING)
    seldom.reset()
    nobody = torch.zeros(N, dtype=torch.bool)
    for step in range(STEPS):
        seldom.step(act(N, step), observe=nobody)
        if step % 4 == 3:
            assert np.array_equal(seldom.observe()["policy"].numpy(), whole[step + 1])
    assert seldom.frames_drawn < N * (STEPS + 1)


def test_a_suspended_environment_goes_on_as_if_it_had_never_been_paused() -> None:
    whole = play(make(frames=2, **EVERYTHING))
    env = make(frames=2, **EVERYTHING)
    env.reset()
    taken, paused = 0, torch.tensor([1])
    for step in range(2 * STEPS):
        if step % 2:
            env.suspend(paused)
            env.step(act(N, 0))
            env.resume(paused)
            continue
        actions = act(N, 0)
        actions[1] = act(N, taken)[1]
        shown = env.step(actions).obs["policy"].numpy()
        taken += 1
        assert np.array_equal(shown[1], whole[taken][1])


def test_a_snapshot_continues_with_the_same_pictures() -> None:
    whole = play(make(frames=2, **EVERYTHING))
    env = make(frames=2, **EVERYTHING)
    play(env, 4)
    state = env.state_dict()
    other = make(frames=2, **EVERYTHING)
    other.load_state_dict(state)
    for step, shown in enumerate(play(other, STEPS, first=4)):
        assert np.array_equal(shown, whole[5 + step])


def test_noise_is_new_in_each_step_and_that_of_its_episode_and_step() -> None:
    plain, noisy = play(make()), play(make(noise=NOISE))
    assert all(np.array_equal(a, b) for a, b in zip(noisy, play(make(noise=NOISE)), strict=True))
    added = [noisy[step].astype(int) - plain[step] for step in range(STEPS + 1)]
    assert len({difference.tobytes() for difference in added}) == STEPS + 1


def test_additive_noise_and_salt_and_pepper_have_the_size_that_was_asked_for() -> None:
    frames = np.full((40, 32, 32, 3), 128, np.uint8)
    ids, stamps = np.arange(40), np.zeros(40, np.int64)
    add_noise(ImageNoise(additive=10.0), "rgb", frames, 1.0, 0, ids, stamps, "x")
    error = frames.astype(float) - 128
    assert abs(error.std() - 10) < 0.2
    assert abs(error.mean()) < 0.2
    frames[:] = 128
    add_noise(ImageNoise(salt_and_pepper=0.1), "rgb", frames, 1.0, 0, ids, stamps, "x")
    changed = (frames != 128).any(-1)
    assert abs(changed.mean() - 0.1) < 0.01
    assert set(np.unique(frames)) == {0, 128, 255}
    assert (frames[changed].min(-1) == frames[changed].max(-1)).all()


def mixed(state: int) -> int:
    """SplitMix64, in Python's integers."""
    value = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def noisy_row(row: np.ndarray, start: int, std: float, share: float, channels: int) -> np.ndarray:
    """What the kernel does to one picture, a value at a time."""
    draws = (mixed((start + k * 0x9E3779B97F4A7C15) % 2**64) for k in range(1, 10**6))
    row, half, scale = row.copy(), len(row) // 2, np.float32(std / 209.02153)
    numbers = [list(next(draws).to_bytes(8, "little")) for _ in range(half + len(row) % 2)]
    low, high = (np.array([sum(number[first : first + 4]) for number in numbers], int) for first in (0, 4))
    noise = np.concatenate(((low + high - 1020)[:half], (low - high)[:half], (low + high - 1020)[half:]))
    if std:
        row[:] = np.clip(row.astype(np.float32) + scale * noise.astype(np.float32) + np.float32(0.5), 0, 255)
    draws = (mixed((start + k * 0x9E3779B97F4A7C15) % 2**64) for k in range(len(row) + 1, 10**6))
    pixel = -1
    while share:
        bits = next(draws)
        pixel += 1 + int(min(math.log(((bits >> 11) + 1) * 2.0**-53) / math.log1p(-share), 1e9)) if share < 1 else 1
        if pixel * channels >= len(row):
            break
        row[pixel * channels : (pixel + 1) * channels] = 255 * (bits & 1)
    return row


@pytest.mark.parametrize(("std", "share"), [(7.0, 0.0), (0.0, 0.2), (200.0, 0.02), (3.0, 1.0), (1.0, 1e-310)])
@pytest.mark.parametrize(("channels", "pixels"), [(3, 35), (3, 1), (1, 77), (1, 64)])
def test_noise_is_that_of_a_plain_program_for_any_share_of_the_rows(
    std: float, share: float, channels: int, pixels: int
) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (6, channels * pixels), np.uint8)
    starts = rng.integers(-(2**63), 2**63, 6)
    found, pieces = frames.copy(), frames.copy()
    disturb_colors(0, 6, found, starts, std, share, channels)
    for row in range(6):
        disturb_colors(row, row + 1, pieces, starts, std, share, channels)
    wanted = [
        noisy_row(row, int(start) % 2**64, std, share, channels) for row, start in zip(frames, starts, strict=True)
    ]
    assert np.array_equal(found, wanted)
    assert np.array_equal(pieces, wanted)


def test_noise_of_colors_is_nearly_normal_and_not_correlated() -> None:
    frames = np.full((200, 3 * 4096), 128, np.uint8)
    starts = np.random.default_rng(1).integers(-(2**63), 2**63, 200)
    disturb_colors(0, 200, frames, starts, 20.0, 0.0, 3)
    noise = (frames.astype(float) - 128) / 20
    assert abs((noise**4).mean() - 3) < 0.2
    half = noise.shape[1] // 2
    for distance in (1, 3, 192, half):
        pairs = noise[:, :-distance] * noise[:, distance:]
        assert abs(pairs.mean()) < 0.004
        # two values that far apart share eight bytes
        dependence = (noise[:, :-distance] ** 2 * noise[:, distance:] ** 2).mean() - 1
        assert abs(dependence) < (0.2 if distance == half else 0.02)


def test_depth_is_rounded_and_lost_beside_edges_alone() -> None:
    far = 50.0
    frames = np.full((8, 16, 16), 2.03, np.float32)
    frames[:, :, 8:] = 3.0
    frames[:, 12:] = far
    ids, stamps = np.arange(8), np.zeros(8, np.int64)
    rounded = frames.copy()
    add_noise(ImageNoise(depth_step=0.25), "depth", rounded, far, 0, ids, stamps, "x")
    assert np.array_equal(np.unique(rounded), [2.0, 3.0, far])
    lost = frames.copy()
    add_noise(ImageNoise(edge_dropout=1.0), "depth", lost, far, 0, ids, stamps, "x")
    edges = np.zeros((16, 16), bool)
    edges[:12, 7:9] = edges[11, :] = True
    assert np.array_equal(lost[0] == far, edges | (frames[0] == far))
    noisy = np.full((8, 16, 16), 2.0, np.float32)
    add_noise(ImageNoise(additive=0.01), "depth", noisy, far, 0, ids, stamps, "x")
    assert abs((noisy - 2).std() - 0.01) < 5e-4


def test_samples_are_averaged() -> None:
    env = headrace.make(
        "cartpole-camera-terms", N, seed=4, threads=1,
        overrides={"images.policy.frames": 1, "images.policy.camera.width": 40, "images.policy.camera.height": 32},
    )  # fmt: skip
    large = env.reset()[0]["policy"].numpy().reshape(N, 16, 2, 20, 2, 3).astype(int)
    small = make(samples=2).reset()[0]["policy"].numpy()
    assert np.array_equal(small, (large.sum((2, 4)) + 2) // 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delay": -1}, "delay: expected steps from 0 on"),
        ({"delay": (3, 1)}, "delay: expected steps from 0 on"),
        ({"hold": 1.0}, "hold: expected a probability"),
        ({"period": 0}, "period: expected at least 1"),
        ({"samples": 2, "kind": "depth"}, "only colors can be averaged"),
        ({"noise": ImageNoise(additive=1.0), "kind": "normals"}, "colors and depth can have some"),
        ({"noise": ImageNoise(depth_step=1.0)}, "depth_step is not for images of kind 'rgb'"),
        ({"noise": ImageNoise(salt_and_pepper=0.1), "kind": "depth"}, "salt_and_pepper is not for images"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        ImageSpec(camera=CAMERA, **settings)


def test_noise_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="edge_dropout: expected a number from 0 to 1"):
        ImageNoise(edge_dropout=1.5)


def _terms(**settings: object):
    return headrace.make("cartpole-terms", 5, seed=1, threads=1, overrides=settings)


@pytest.mark.parametrize("path", ["observations.policy.{}.delay", "delays"])
def test_a_late_term_and_a_late_group_show_what_was_measured_some_steps_ago(path: str) -> None:
    env = _terms()
    name = next(iter(env.task.cfg.observations["policy"]))
    settings = {"delays": {"policy": 2}} if path == "delays" else {path.format(name): 2}
    plain, late = play(env), play(_terms(**settings))
    # the first term has the first column
    columns = slice(None) if path == "delays" else slice(0, 1)
    for step in range(STEPS + 1):
        assert np.array_equal(late[step][:, columns], plain[max(step - 2, 0)][:, columns])
    assert not np.array_equal(late[5], plain[5])


def test_a_late_group_continues_from_a_snapshot_and_forgets_the_last_episode() -> None:
    settings = {"delays": {"policy": (1, 4)}}
    whole, env = play(_terms(**settings)), _terms(**settings)
    play(env, 4)
    other = _terms(**settings)
    other.load_state_dict(env.state_dict())
    for step, shown in enumerate(play(other, STEPS, first=4)):
        assert np.array_equal(shown, whole[5 + step])
    first = env.reset(seed=1)[0]["policy"].numpy()
    assert np.array_equal(first, whole[0])


def test_a_delay_of_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="critic"):
        _terms(delays={"critic": 1})


@pytest.mark.parametrize("case", range(6))
def test_any_order_of_pauses_late_pictures_and_snapshots_shows_the_same(case: int) -> None:
    numbers = np.random.default_rng(case)
    frames, count = int(numbers.integers(1, 5)), int(numbers.integers(2, 6))
    settings = EVERYTHING | {"period": int(numbers.integers(1, 3)), "normalize": bool(case % 2)}

    def begin(num_envs: int):
        env = make(num_envs, frames=frames, threads=1 + num_envs % 2, **settings)
        env.reset()
        return env

    whole = play(make(6, frames=frames, **settings), 14)
    env = begin(count)
    taken = np.zeros(count, np.int64)
    for _ in range(40):
        paused = torch.from_numpy(numbers.random(count) < 0.4) | torch.from_numpy(taken >= 14)
        read = torch.from_numpy(numbers.random(count) < 0.3)
        env.suspend(paused)
        actions = torch.stack([act(count, int(step))[row] for row, step in enumerate(taken)])
        shown = env.step(actions, observe=read).obs["policy"].numpy()
        taken += ~paused.numpy()
        env.resume(paused)
        for row in (read & ~paused).nonzero()[:, 0].tolist():
            assert np.array_equal(shown[row], whole[taken[row]][row])
        if numbers.random() < 0.2:
            saved, env = env.state_dict(), begin(count)
            env.load_state_dict(saved)
        if numbers.random() < 0.2:
            rows = numbers.permutation(count)[: 1 + count // 2]
            late = env.observe(torch.from_numpy(np.sort(rows)))["policy"].numpy()
            assert all(np.array_equal(late[k], whole[taken[row]][row]) for k, row in enumerate(np.sort(rows)))
    assert taken.min() > 6
