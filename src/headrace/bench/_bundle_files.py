"""Bundles as JSON: made, and read back in any version we know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from headrace.bench._schema import BUNDLES, SCHEMA_VERSION, Bundle
from headrace.bench._upgrade import UPGRADED, upgraded
from headrace.errors import DataError


def bundle_text(bundle: Bundle) -> str:
    """The JSON of a bundle."""
    return bundle.model_dump_json(indent=1) + "\n"


def parse_bundle(text: str, *, source: str = "bundle") -> Bundle:
    """A bundle from its JSON, upgraded from an older schema where needed.

    Args:
        text: the JSON.
        source: named in errors.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DataError(f"{source}: expected the JSON of a benchmark bundle, got text that is not JSON") from error
    if not isinstance(data, dict) or "schema_version" not in data or "run" not in data:
        raise DataError(f"{source}: expected a benchmark bundle, with schema_version and run; got another JSON value")
    fields = cast("dict[str, object]", data)
    version = fields["schema_version"]
    if version != SCHEMA_VERSION:
        if version not in UPGRADED:
            raise DataError(
                f"{source}: expected schema_version {SCHEMA_VERSION} or older ({', '.join(UPGRADED)}), "
                f"got {version!r}; a newer headrace wrote this: upgrade with pip install -U headrace"
            )
        fields = upgraded(fields)
    kind = fields.get("kind")
    if kind not in BUNDLES:
        raise DataError(f"{source}: expected kind to be one of {', '.join(BUNDLES)}; got {kind!r}")
    try:
        return BUNDLES[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{source}: not a valid {kind} bundle of schema {version}: {where}: {first['msg']} "
            f"({error.error_count()} problems)"
        ) from error


def read_bundle(path: Path | str) -> Bundle:
    """A bundle from a file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected the JSON of a benchmark bundle, got a file that is not text") from error
    except OSError as error:
        raise DataError(f"{path}: expected a benchmark bundle, got: {error.strerror or error}") from error
    return parse_bundle(text, source=str(path))


def bundle_paths(path: Path | str) -> list[Path]:
    """The bundle files that ``path`` means: itself, or the bundles anywhere below a folder, by name."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: expected a bundle file or a folder of them, got nothing there")
    found = sorted(file for kind in BUNDLES for file in path.rglob(f"{kind}.json"))
    if not found:
        names = ", ".join(f"{kind}.json" for kind in BUNDLES)
        raise DataError(f"{path}: expected bundles in it ({names}), found none")
    return found
