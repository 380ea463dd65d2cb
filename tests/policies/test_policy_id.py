"""What tells policies apart: weights, settings and code, or a name that somebody gives."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace import load_policy
from headrace._published import find_published_file
from headrace.errors import ConfigError
from headrace.policies import as_chunk_policy
from headrace.policies.act import ActCfg, ActPolicy, instruction_numbers
from headrace.policies.load_policy import PusherWordsPolicy, list_shipped_policies
from headrace.policies.step_policy import current_id, policy_hash


class Net(nn.Module):
    horizon, action_dim = 4, 1

    def __init__(self, scale: float = 1.0, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 4)
        self.scale = scale
        self.register_buffer("shift", torch.zeros(4), persistent=False)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return self.scale * self.layer(obs["policy"])[..., None]


class Other(Net):
    pass


@dataclass
class Wrapped:
    policy: object
    noise: float = 0.1
    table: np.ndarray | None = None


def plan(obs: dict[str, Tensor], gain: float = 1.0) -> Tensor:
    return gain * torch.zeros(len(obs["policy"]), 4, 1)


def _closing_over(value: object) -> Callable[[], object]:
    return lambda: value


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # of what torch.compile imports
def test_equal_policies_have_equal_hashes_in_any_mode_and_form() -> None:
    assert policy_hash(Net()) == policy_hash(Net().eval()) == policy_hash(as_chunk_policy(Net()))
    assert policy_hash(Wrapped(Net())) == policy_hash(Wrapped(Net()))
    compiled = [policy_hash(torch.compile(Net(), backend="eager")) for _ in range(2)]
    assert compiled[0] == compiled[1] != policy_hash(Net())  # its last bits are others
    assert policy_hash(plan) == policy_hash(plan)


def test_every_weight_setting_and_class_makes_a_difference() -> None:
    moved = Net()
    moved.layer.bias.data[2] += 1e-6
    shifted = Net()
    shifted.shift += 1.0
    policies = [
        *(Net(), Net(seed=1), Net(scale=2.0), Other(), moved, shifted),
        *(Wrapped(Net()), Wrapped(Net(scale=2.0)), Wrapped(Net(), noise=0.2), Wrapped(Net(), table=np.zeros(2))),
        *(Wrapped(Net(), table=np.ones(2)), Wrapped([1, 2]), Wrapped([2, 1]), Wrapped({"a": 1}), Wrapped({"a": True})),
        *(plan, functools.partial(plan, gain=2.0), functools.partial(plan, gain=3.0), Net().forward),
        *(_closing_over(1), _closing_over(2), _closing_over(Net())),
    ]
    assert len({policy_hash(policy) for policy in policies}) == len(policies)


def test_an_edit_of_the_code_makes_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for number, gain in enumerate((1, 2)):
        file = tmp_path / f"edited_{number}" / "edited_policy.py"
        file.parent.mkdir()
        file.write_text(f"def plan(obs):\n    return helper(obs)\n\n\ndef helper(obs):\n    return {gain}\n")
        monkeypatch.syspath_prepend(file.parent)
        hashes.append(policy_hash(importlib.import_module("edited_policy").plan))
        del sys.modules["edited_policy"]
    assert hashes[0] != hashes[1]


def test_code_without_a_file_is_told_apart_by_what_it_does() -> None:
    spaces: list[dict[str, object]] = [{"__name__": "typed"} for _ in range(3)]
    for space, gain in zip(spaces, (1, 1, 2), strict=True):
        exec(f"class P:\n    def __call__(self, obs):\n        return obs * {gain}\np = P()", space)
    one, same, other = (policy_hash(space["p"]) for space in spaces)
    assert one == same != other


def test_cycles_and_shared_parts_are_taken_once() -> None:
    one, other = Wrapped(None), Wrapped(None)
    one.policy, other.policy = [one, one], [other, other]
    assert policy_hash(one) == policy_hash(other)


def test_what_cannot_be_seen_through_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"policy_id \(--policy-id\): expected a text .* policy.noise is a lock"):
        policy_hash(Wrapped(Net(), noise=threading.Lock()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"policy.policy is a Generator"):
        policy_hash(Wrapped(torch.Generator()))


SHIPPED = {
    "pusher-solid": lambda: load_policy("pusher-solid"),
    "aloha-transfer-cube-state": lambda: load_policy("aloha-transfer-cube-state"),
    "pusher-words": PusherWordsPolicy,
}
OF_0_2 = json.loads((Path(__file__).parents[1] / "data/v0_2/expected.json").read_text())["policies"]


@pytest.mark.parametrize("task", SHIPPED)
def test_the_id_that_0_2_gave_to_a_policy_that_ships_is_known(task: str) -> None:
    """Where this fails, what the class computes or holds has changed: see ``policy_identity``."""
    assert current_id(OF_0_2[task]) == policy_hash(SHIPPED[task]()) != OF_0_2[task]
    assert current_id("mine") == "mine"


def test_every_chunk_policy_that_ships_had_an_id_in_0_2() -> None:
    assert {*list_shipped_policies(), "pusher-words"} == OF_0_2.keys()


def test_neither_text_nor_place_of_headrace_is_in_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same policy from a module of another name with one more comment."""
    before = policy_hash(load_policy("pusher-solid"))
    source = Path(inspect.getfile(ActPolicy)).read_text()
    (tmp_path / "moved_act.py").write_text(source + "# a comment\n")
    home = sys.modules[ActPolicy.__module__.rpartition(".")[0]]
    monkeypatch.setattr(home, "__path__", [*home.__path__, str(tmp_path)])
    moved = importlib.import_module(f"{home.__name__}.moved_act")
    policy = moved.read_policy(find_published_file("pusher-solid-act"))
    assert type(policy) is not ActPolicy
    assert policy_hash(policy) == before
    monkeypatch.setattr(moved.ActPolicy, "policy_identity", "act-2")
    assert policy_hash(policy) != before
    assert policy_hash(moved.instruction_numbers) == policy_hash(instruction_numbers)
    assert policy_hash(Wrapped(moved)) != policy_hash(Wrapped(home))


def test_the_code_of_a_class_that_extends_one_of_headrace_is_in_its_id() -> None:
    class Cautious(ActPolicy):
        pass

    cfg = ActCfg(obs_dim=3, action_dim=1)
    torch.manual_seed(0)
    ours = ActPolicy(cfg)
    theirs = Cautious(cfg)
    theirs.load_state_dict(ours.state_dict())
    assert policy_hash(theirs) != policy_hash(ours)
