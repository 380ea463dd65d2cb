"""Names of nested observations."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

from headrace._leaves import flatten, leaves, nest
from headrace.errors import ConfigError
from headrace.replay import ReplayBuffer
from headrace.types import Step

NESTED = {"policy": 1, "camera": {"left": 2, "wrist": {"rgb": 3}}}


def test_names_are_joined_with_slashes_and_nest_is_the_inverse() -> None:
    flat = {"policy": 1, "camera/left": 2, "camera/wrist/rgb": 3}
    assert flatten(NESTED) == flat
    assert nest(flat) == NESTED
    assert list(flatten(NESTED, "obs")) == ["obs/policy", "obs/camera/left", "obs/camera/wrist/rgb"]


def test_spaces_have_the_names_of_their_observations() -> None:
    pair = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
    assert [(leaf.name, leaf.path) for leaf in leaves(spaces.Dict({"a": spaces.Dict({"b": pair})}), "policy")] == [
        ("a/b/0", ("a", "b", 0)),
        ("a/b/1", ("a", "b", 1)),
    ]
    assert [leaf.name for leaf in leaves(pair, "policy")] == ["policy/0", "policy/1"]
    assert [leaf.name for leaf in leaves(pair[0], "policy")] == ["policy"]


@pytest.mark.parametrize("tree", [{"a/b": 1, "a": {"b": 2}}, {"": 1}, {"a": {}}, {}, {"a/": 1}])
def test_names_that_collide_or_are_empty_are_refused(tree) -> None:
    with pytest.raises(ConfigError):
        leaves(tree)


def test_a_bridged_group_with_a_slash_is_stored_and_sampled_under_its_own_name() -> None:
    space = spaces.Dict({"camera/left": spaces.Box(0, 9, (2,)), "policy": spaces.Box(0, 9, (1,))})
    buffer = ReplayBuffer(8, observation=space, action=spaces.Box(-1, 1, (1,)), num_envs=1)
    rows = {"camera/left": torch.ones(1, 2), "policy": torch.zeros(1, 1)}
    flags = torch.zeros(1, dtype=torch.bool)
    for _ in range(4):
        buffer.extend(rows, torch.zeros(1, 1), Step(rows, torch.zeros(1), flags, flags, {}))
    sample = buffer.sample(3)
    assert sample["observation", "camera/left"].tolist() == [[1.0, 1.0]] * 3
