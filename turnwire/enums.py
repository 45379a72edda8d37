"""Names of the contract's enums, as people read them."""

from __future__ import annotations

import functools
import re
from typing import Any


def short_name(enum: Any, value: int) -> str:
    """A value's name without the prefix that all names of its enum have: TOOL_ERROR for ERROR_KIND_TOOL_ERROR."""
    name: str = enum.Name(value)
    return name.removeprefix(_prefix(enum.DESCRIPTOR.name))


@functools.cache
def _prefix(enum_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", enum_name).upper() + "_"
