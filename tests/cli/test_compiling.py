"""What a user hears while kernels are compiled, with a real kernel and a real compiler."""

from __future__ import annotations

import logging
import time

import pytest

from headrace._kernels.compiled import inline
from headrace.cli import printing
from headrace.cli.printing import compile_bar, compile_notice

LOG = logging.getLogger("headrace.kernels")


def _compile() -> None:
    @inline
    def double(value: float) -> float:
        return 2 * value

    assert double(1.5) == 3.0
    assert double(2.5) == 5.0  # compiled already: not heard again


def test_each_function_is_told_when_it_is_compiled_and_not_when_it_is_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "headrace.kernels"):
        _compile()
    heard = [record.getMessage() for record in caplog.records]
    assert heard == [f"compiling {__name__}._compile.<locals>.double"]


def test_a_long_compilation_is_told_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "_PATIENCE_S", 0.05)
    with compile_notice():
        _compile()
        assert capsys.readouterr().err == "", "a short one is not worth a line"
        time.sleep(0.06)
        _compile()
        _compile()
    assert capsys.readouterr().err.count("compiling kernels") == 1


def test_the_bar_hears_instead_of_the_notice_and_everything_is_as_before_afterwards(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "_PATIENCE_S", -1.0)
    before = LOG.level, list(LOG.handlers)
    with compile_notice():
        with compile_bar():
            _compile()
        assert "compiling kernels, once" not in capsys.readouterr().err
        _compile()
        assert "compiling kernels, once" in capsys.readouterr().err
    assert (LOG.level, list(LOG.handlers)) == before
