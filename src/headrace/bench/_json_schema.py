"""The JSON Schema of the bundles: ``python -m headrace.bench._json_schema docs/schema`` writes it.

``versions.json`` beside it keeps a digest per schema version. Fields that change without a new version are refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import cast

from headrace.bench.schema import BUNDLES, SCHEMA_VERSION
from headrace.errors import ConfigError
from headrace.files import write_whole

VERSIONS = "versions.json"


def json_schemas() -> dict[str, dict[str, object]]:
    """File name → JSON Schema of what is written; every field is there, missing values are null."""
    found: dict[str, dict[str, object]] = {}
    for kind, bundle in BUNDLES.items():
        schema = bundle.model_json_schema(mode="serialization")
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"headrace/{kind}-{SCHEMA_VERSION}"}
        found[f"{kind}.json"] = {**head, **schema}
    return found


def digest(schemas: dict[str, dict[str, object]]) -> str:
    """Return a hash that changes with any field, type or constraint, but not with wording."""
    return hashlib.sha256(json.dumps(_bare(schemas), sort_keys=True).encode()).hexdigest()


def write_schemas(folder: Path) -> None:
    """Write the files; refused if the version of today stands there with other fields."""
    schemas = json_schemas()
    known = _known(folder)
    if known.setdefault(SCHEMA_VERSION, digest(schemas)) != digest(schemas):
        raise ConfigError(
            f"schema: expected the fields of version {SCHEMA_VERSION} as published, got others; "
            "raise SCHEMA_VERSION in headrace/bench/schema.py and teach _bundle_files.py to read the old one"
        )
    for name, schema in schemas.items():
        write_whole(folder / name, _text(schema))
    write_whole(folder / VERSIONS, _text(known))


def _known(folder: Path) -> dict[str, str]:
    path = folder / VERSIONS
    return cast("dict[str, str]", json.loads(path.read_text())) if path.is_file() else {}


def _text(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _bare(value: object) -> object:
    """Without descriptions and titles. A field of the name is a schema itself, not a text, and stays."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {k: _bare(v) for k, v in items if k not in ("description", "title") or not isinstance(v, str)}
    return [_bare(item) for item in cast("list[object]", value)] if isinstance(value, list) else value


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
