"""Policy files from others: TorchScript needs trust, ONNX stays in its directory."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

import headrace
from headrace.errors import DataError


class _Writes(torch.nn.Module):
    """Saves a file when it is called, as any TorchScript module can."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        torch.save(obs, self.target)
        return obs[:, :1]


def script(path: Path, target: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(_Writes(str(target))).save(str(path))
    return path


def test_torchscript_is_not_run_without_trust(tmp_path: Path) -> None:
    # under the name of a checkpoint, as an attacker would
    file, target = script(tmp_path / "last.pt", tmp_path / "written"), tmp_path / "written"
    env = headrace.make("cartpole", 2)
    for load in (
        lambda: headrace.load_policy(file, env),
        lambda: headrace.evaluate("cartpole", str(file), episodes=1),
        lambda: headrace.play("cartpole", policy=file, run=headrace.RunCfg(output=tmp_path / "played")),
    ):
        with pytest.raises(DataError, match=r"TorchScript .* can write files.*trust=True"):
            load()
    assert not target.exists()
    # what was refused does run once it is trusted: the test would notice if the code were harmless
    env.reset(seed=0)
    headrace.evaluate("cartpole", headrace.load_policy(file, env, trust=True), episodes=1)
    assert target.exists()
    env.close()


def model(path: Path, location: str | None = None, operator: str = "Identity", domain: str = "") -> Path:
    """Add a weight of four numbers, inside the file or at ``location``."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    if location is None:
        weight.raw_data = np.zeros(4, np.float32).tobytes()
    else:
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    nodes = [helper.make_node("Add", ["x", "w"], ["z"]), helper.make_node(operator, ["z"], ["y"], domain=domain)]
    shape = [None, 4]
    graph = helper.make_graph(
        nodes,
        "policy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [weight],
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    made = helper.make_model(graph, opset_imports=versions, ir_version=8)
    path.write_bytes(made.SerializeToString())
    return path


def test_onnx_reads_nothing_outside_its_directory_and_runs_no_foreign_operator(tmp_path: Path) -> None:
    folder, env = tmp_path / "received", headrace.make("cartpole", 2)
    folder.mkdir()
    for place in (tmp_path / "secret.bin", folder / "own.bin"):
        place.write_bytes(np.ones(4, np.float32).tobytes())
    os.symlink(tmp_path / "secret.bin", folder / "link.bin")
    for location in ("../secret.bin", str(tmp_path / "secret.bin"), "link.bin", "none.bin"):
        with pytest.raises(DataError, match=r"policy\.onnx"):
            headrace.load_policy(model(folder / "policy.onnx", location), env)
    with pytest.raises(DataError, match=r"policy\.onnx"):
        headrace.load_policy(model(folder / "policy.onnx", operator="Steal", domain="mine"), env)
    for location in (None, "own.bin"):
        headrace.load_policy(model(folder / "policy.onnx", location), env)
    env.close()
