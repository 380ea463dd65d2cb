"""The exception tree: drawn as it is, and messages that help."""

from __future__ import annotations

import inspect
import re

import pytest

from headrace import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.HeadraceError)]


def test_every_error_is_drawn_in_the_tree_with_its_standard_base() -> None:
    drawing = errors.__doc__ or ""
    for error in CLASSES:
        line = re.search(rf"^.*\b{error.__name__}\b.*$", drawing, re.MULTILINE)
        assert line is not None, f"{error.__name__} is not in the drawing"
        standard = [base for base in error.__bases__ if not issubclass(base, errors.HeadraceError)]
        if standard != [Exception]:
            for base in standard:
                assert f"({base.__name__})" in line.group()


def test_every_error_is_caught_as_headrace_error_and_says_what_it_is() -> None:
    assert len(CLASSES) >= 14
    for error in CLASSES:
        assert issubclass(error, errors.HeadraceError)
        assert error.__doc__


def test_unknown_name_suggests_the_nearest() -> None:
    error = errors.UnknownNameError("task", "cartpol", ["ant", "cartpole", "humanoid"])
    assert str(error) == "unknown task 'cartpol'; did you mean 'cartpole'?"


def test_unknown_name_lists_the_choices_when_none_is_near() -> None:
    error = errors.UnknownNameError("task", "zzz", ["humanoid", "ant"])
    assert str(error) == "unknown task 'zzz'; choose from ant, humanoid"


def test_require_extra_gives_the_module() -> None:
    assert errors.require_extra("json.decoder", extra="none", purpose="a test").__name__ == "json.decoder"


def test_require_extra_says_what_to_install() -> None:
    with pytest.raises(errors.MissingExtraError, match=re.escape("pip install 'headrace[fast]'")) as caught:
        errors.require_extra("no_such_module_at_all.inner", extra="fast", purpose="going fast")
    assert str(caught.value).startswith("going fast needs 'no_such_module_at_all'")


def test_require_extra_does_not_hide_a_module_that_is_there_but_broken(tmp_path, monkeypatch) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_dependency_of_it\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency_of_it") as caught:
        errors.require_extra("half_installed", extra="fast", purpose="going fast")
    assert not isinstance(caught.value, errors.MissingExtraError)
