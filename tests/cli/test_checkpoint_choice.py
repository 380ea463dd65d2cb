"""Where the checkpoint to play comes from, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from train_play import play_bundle, played, said, trained

from headrace.cli.main import main
from headrace.policies.load_policy import _find_file, find_policy, strip_name

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


def test_chain_takes_the_newest_run_then_the_published_one(tmp_path: Path) -> None:
    assert find_policy(None, "cartpole", newest=True).origin == "published"
    for name, score, moment in (("run_9", 5.0, 1.0), ("run_10", 3.0, 2.0)):
        folder = tmp_path / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "last.pt").touch()
        index = {"task": "cartpole", "library": "skrl", "last": "checkpoints/last.pt", "best": "checkpoints/best.pt"}
        index |= {"num_envs": 8, "iteration": 1, "score": score, "best_score": score, "saved_at": moment}
        (folder.parent / "checkpoint.json").write_text(json.dumps(index))
    assert _find_file(None, "cartpole", None, newest=True).path.parts[-3] == "run_10"
    assert _find_file("latest", "cartpole", "skrl", newest=False).path.parts[-3] == "run_10"
    assert _find_file("best", "cartpole", None, newest=False).path.parts[-3:] == ("run_9", "checkpoints", "best.pt")
    assert find_policy(None, "cartpole", library="headrace", newest=True).origin == "published"
    assert strip_name("my.module:cartpole-Play") == "cartpole"


def test_checkpoint_is_fetched_from_a_uri(tmp_path: Path) -> None:
    published = find_policy("published", "cartpole").path
    assert played("--policy", f"file://{published}", "--output", "p") == 0
    bundle = play_bundle("p")
    assert bundle.checkpoint is not None
    assert bundle.checkpoint.uri == f"file://{published}"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://me:word@host:8000/a/b.pt?X-Amz-Signature=abc&t=1#x", "https://host:8000/a/b.pt"),
        ("s3://me:wo@rd@host/a.pt", "s3://host/a.pt"),
        ('{"uri": "s3://bucket/key?token=1", "next": 2}', '{"uri": "s3://bucket/key", "next": 2}'),
        ("--policy=openpi://key@host:9 done?", "--policy=openpi://host:9 done?"),
        ("no address: a/b?c=d", "no address: a/b?c=d"),
    ],
)
def test_texts_lose_the_secrets_of_their_addresses(text: str, public: str) -> None:
    from headrace.files import hide_secrets

    assert hide_secrets(text) == public


@pytest.mark.parametrize("ends", ["well", "missing"])
def test_a_signed_address_leaves_no_secret_in_files_or_output(tmp_path: Path, capsys, monkeypatch, ends: str) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    content = find_policy("published", "cartpole").path.read_bytes()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # as the library names it
            assert "X-Amz-Signature=SECRET" in self.path
            self.send_response(200 if ends == "well" else 404)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}/last.pt?X-Amz-Signature=SECRET&token=SECRET"
        formatters = ["--formatter", "schema", "--formatter", "summary", "--formatter", "isaaclab"]
        arguments = ["--policy", uri, "--output", "p", *formatters]
        monkeypatch.setattr(sys, "argv", ["headrace", "play", "cartpole", *arguments])
        assert (played(*arguments) == 0) == (ends == "well")
        server.shutdown()
    written = [path for path in (tmp_path / "p").rglob("*") if path.is_file()]
    assert len(written) >= (3 if ends == "well" else 0)
    for path in written:
        assert b"SECRET" not in path.read_bytes(), path
    output = capsys.readouterr()
    assert "SECRET" not in output.out + output.err


def test_every_published_checkpoint_is_the_one_of_the_manifest() -> None:
    import hashlib
    from importlib.resources import files

    from headrace._published import read_published

    for name, entry in read_published().items():
        content = files("headrace").joinpath("checkpoints", entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], name
        assert entry["made_by"]
        assert len(content) < 900_000, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "cartpole", "--success-window", "20"), "expected --check-success with them"),
        (("train", "cartpole", "--success-threshold", "0.5"), "expected --check-success with them"),
        (("train", "cartpole", "--success-rule", "each"), "expected --check-success with them"),
        (("train", "cartpole", "--library", "rsl-rl"), "did you mean 'rsl_rl'"),
        (("train", "cartpol"), "did you mean 'cartpole'"),
        (("train", "cartpole", "--iterations", "0"), "--iterations"),
        (("train", "cartpole", "--ppo", "lerning_rate=1"), "did you mean 'learning_rate'"),
        (("train", "cartpole", "--num-envs", "3", "--ppo", "steps=5"), "divisor"),
        (("train", "ant", "--check-success", "--iterations", "1"), "success measure"),
        (("train", "cartpole-discrete", "--iterations", "1"), "continuous actions"),
        (("play", "cartpole", "--policy", "nothing.pt"), "no such file"),
        (("play", "cartpole", "--policy", "my_module.Policy"), "a function or class is named as 'my_module:Policy'"),
        (("play", "my_module.TASK"), "did you mean 'my_module:TASK'"),
        (("play", "cartpole", "--policy", "no_such_module:f"), "cannot be imported"),
        (("play", "cartpole", "--policy", "http://127.0.0.1:9/x.pt"), "cannot be fetched"),
        (("play", "humanoid"), "--policy"),
        (("play", "cartpole", "--policy", "best"), "no training"),
        (("play", "cartpole", "--library", "sb4"), "did you mean 'sb3'"),
    ],
)
def test_bad_input_is_refused_with_a_hint(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    assert words in said(capsys)


def test_a_directory_of_lerobot_needs_no_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "step" / "pretrained_model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for named in (folder, folder.parent):
        assert main(["evaluate", "pusher-camera", "--policy", str(named)]) == 2
        assert "does not say the policy's type" in said(capsys)


def test_checkpoints_of_another_task_or_library_and_damaged_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = find_policy("published", "cartpole").path
    assert main(["play", "ant", "--policy", str(published)]) == 2
    assert "task 'ant', got one of 'cartpole'" in said(capsys)
    assert played("--policy", str(published), "--library", "skrl") == 2
    assert "of skrl, got one of headrace" in said(capsys)
    content = published.read_bytes()
    damaged = bytearray(content)
    for place in range(len(content) // 2, len(content) // 2 + 600):  # more than the padding between two tensors
        damaged[place] ^= 0xFF
    for name, part in (("cut.pt", content[: len(content) // 2]), ("bits.pt", bytes(damaged)), ("not.pt", b"hello")):
        (tmp_path / name).write_bytes(part)
        assert played("--policy", name) == 2, name
        assert "error" in said(capsys)
    torch.save({"model": print, "optimizer": {}, "epoch": 1}, tmp_path / "code.pt")
    assert played("--policy", "code.pt") == 2
    assert "--trust-checkpoint" in said(capsys)


def test_missing_extra_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rsl_rl", None)
    assert main(["train", "cartpole", "--library", "rsl_rl"]) == 2
    assert "headrace[rsl-rl]" in said(capsys)


def test_one_broken_run_does_not_keep_others_from_being_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained("runs/one", "--iterations", "1") == 0
    Path("runs/broken").mkdir()
    Path("runs/broken/checkpoint.json").write_text("[" * 100_000)
    assert played("--episodes", "2", "--output", "p") == 0
    shutil.rmtree("runs/one")
    assert played("--policy", "latest", "--output", "q") == 2
    assert "runs/broken/checkpoint.json" in said(capsys)


def test_an_sb3_archive_with_a_bad_policy_is_an_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    import zipfile

    assert trained("one", "--iterations", "1", library="sb3") == 0
    with zipfile.ZipFile("one/checkpoints/last.zip") as good, zipfile.ZipFile("bad.zip", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, b"not weights" if name == "policy.pth" else good.read(name))
    assert played("--policy", "bad.zip", "--output", "p") == 2
    assert "bad.zip: damaged, or not the expected kind of file" in said(capsys)


def test_a_trusted_file_of_our_own_learner_is_loaded_and_an_untrusted_one_executes_nothing() -> None:
    assert trained("one", "--iterations", "1") == 0
    content = torch.load("one/checkpoints/last.pt", weights_only=True)
    torch.save({**content, "more": _Executes()}, "more.pt")
    assert played("--policy", "more.pt", "--output", "p") == 2
    assert not Path("executed").exists()
    assert played("--policy", "more.pt", "--trust-checkpoint", "--output", "p") == 0
    assert Path("executed").exists()


class _Executes:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("executed"),)
