"""Short trainings and plays for the tests of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.bench import read_bundle
from headrace.bench.schema import PlayBundle, TrainingBundle
from headrace.cli.main import main

if TYPE_CHECKING:
    from onnx import GraphProto

QUICK = ("--num-envs", "8", "--threads", "1", "--ppo", "steps=16", "--ppo", "epochs=1", "--ppo", "minibatches=2")


def trained(folder: str, *more: str, library: str = "headrace") -> int:
    return main(["train", "cartpole", "--library", library, "--output", folder, *QUICK, *more])


def training_bundle(folder: str) -> TrainingBundle:
    bundle = read_bundle(Path(folder) / "training.json")
    assert isinstance(bundle, TrainingBundle)
    return bundle


def play_bundle(folder: str) -> PlayBundle:
    bundle = read_bundle(Path(folder) / "play.json")
    assert isinstance(bundle, PlayBundle)
    return bundle


def played(*more: str, envs: int = 4) -> int:
    return main(["play", "cartpole", "--num-envs", str(envs), "--threads", "1", *more])


def save_onnx(graph: GraphProto, path: Path) -> None:
    """In an older format, that every runtime knows."""
    import onnx

    operators = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=[operators]), path)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())
