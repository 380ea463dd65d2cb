"""A griffe extension: cross-reference roles of docstrings (``:class:`~headrace.Step```) become plain names."""

from __future__ import annotations

import re

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?(?:[\w.]*\.)?(\w+)`")


class PlainRoles(Extension):
    """Shows the last part of the name, as code."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
