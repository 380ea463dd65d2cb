"""``headrace run --frame-stack``."""

from __future__ import annotations

import pytest
import torch

from headrace.cli.main import main

seen: list[tuple[int, ...]] = []


def look(obs: dict[str, torch.Tensor]) -> torch.Tensor:
    seen.append(tuple(obs["policy"].shape))
    return torch.zeros(2, 1)


@pytest.mark.parametrize("task", ["cartpole-camera", "cartpole-camera-terms"])
def test_the_stack_of_a_camera_task_is_set_whichever_way_it_is_written(task: str) -> None:
    seen.clear()
    asked = ["run", task, "--num-envs", "2", "--num-steps", "2", "--frame-stack", "3", "--policy", f"{__name__}:look"]
    assert main(asked) == 0
    assert set(seen) == {(2, 48, 48, 9)}


def test_a_task_without_pictures_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "cartpole", "--frame-stack", "3"]) == 2
    assert "expected a task seen by a camera, got 'cartpole'" in capsys.readouterr().err
