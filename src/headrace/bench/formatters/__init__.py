"""The forms in which a result is written, any number of them in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from headrace._named import load
from headrace.bench.figures import summary_text
from headrace.bench.formatters._isaaclab import isaaclab_text, json_text, omniperf_text, osmo_text
from headrace.bench.formatters._tensorboard import require_tensorboard, write_tensorboard
from headrace.bench.schema import Bundle, Kind, bundle_text
from headrace.errors import ConfigError, UnknownNameError
from headrace.files import hide_secrets, write_whole


class Form(NamedTuple):
    """How one form is written."""

    suffix: str
    """What the name of the file has after the kind: ``runtime`` + ``_osmo.json``."""
    write: Callable[[Bundle, Path], None]
    """Writes a bundle to a path, whole or not at all."""
    require: Callable[[], object] | None = None
    """Raises if a library is missing; asked before the run."""


def _text(make: Callable[[Bundle], str]) -> Callable[[Bundle, Path], None]:
    return lambda bundle, path: write_whole(path, hide_secrets(make(bundle)))


FORMATTERS: dict[str, Form] = {
    "schema": Form(".json", _text(bundle_text)),
    "isaaclab": Form("_isaaclab.json", _text(isaaclab_text)),
    "json": Form("_json.json", _text(json_text)),
    "omniperf": Form("_omniperf.json", _text(omniperf_text)),
    "osmo": Form("_osmo.json", _text(osmo_text)),
    "summary": Form("_summary.txt", _text(summary_text)),
    "tensorboard": Form("_tensorboard", write_tensorboard, require_tensorboard),
}
"""Name as in ``--formatter`` → how it is written."""


def register_formatter(name: str, form: Form) -> None:
    """Give a form of your own a name, for ``--formatter`` and ``formatters=``; one that is taken is refused."""
    if name in FORMATTERS or form.suffix in {known.suffix for known in FORMATTERS.values()}:
        raise ConfigError(
            f"register_formatter: the name {name!r} or the suffix {form.suffix!r} is taken; choose others"
        )
    FORMATTERS[name] = form


def checked_formatters(names: Sequence[str]) -> tuple[str, ...]:
    """Formatter names, each once, in the order given; an unknown one raises an error that suggests the nearest.

    ``module:function`` is imported and registered under the function's name.
    """
    found: list[str] = []
    for name in names:
        _, colon, function = name.partition(":")
        if colon:
            make = cast("Callable[[Bundle], str]", load(name, "--formatter"))
            if function not in FORMATTERS:
                register_formatter(function, Form(f"_{function}.txt", _text(make)))
            name = function
        if name not in FORMATTERS:
            raise UnknownNameError("formatter", name, FORMATTERS)
        require = FORMATTERS[name].require
        if require is not None:
            require()
        found.append(name)
    return tuple(dict.fromkeys(found))


def output_path(formatter: str, kind: Kind, folder: Path) -> Path:
    """Where a formatter writes: the bundle to ``runtime.json``, other forms to names with a suffix."""
    return folder / f"{kind}{FORMATTERS[formatter].suffix}"


def write_formats(bundle: Bundle, names: Sequence[str], folder: Path) -> list[Path]:
    """Write a bundle in every form asked for; returns the files."""
    paths = [output_path(name, bundle.kind, folder) for name in names]
    for name, path in zip(names, paths, strict=True):
        FORMATTERS[name].write(bundle, path)
    return paths
