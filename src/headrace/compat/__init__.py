"""Names of other libraries over our own parts, for code that comes from there: ``headrace.compat.isaaclab``."""

from headrace.compat import isaaclab

__all__ = ["isaaclab"]
