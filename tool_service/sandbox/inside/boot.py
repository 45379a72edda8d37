"""The first code of a container: `python3 -I -S -B -X utf8 -c BOOT`, where BOOT is this file's text.

Reads one message from stdin, a big-endian u32 length and JSON `{"sources": {module: text}, "code": {module: base64},
"python": tag, "start": ...}`, lets the modules be imported as the package `inside`, and hands over to
`inside.container`. So an image needs nothing but Python: the code inside is always the service's own, nothing is
mounted, and the engine may be on another machine.
"""

import binascii
import importlib
import json
import marshal
import os
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "inside"
_OLDEST_PYTHON = (3, 11)


def _take(count: int) -> bytes:
    """Exactly `count` bytes of stdin: what follows is the supervisor's."""
    data = bytearray()
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(0)  # the service is gone
        data += part
    return bytes(data)


class Importer:
    """Finds and loads the modules of the package. `code`: base64 of marshalled code, where the service has the same
    Python, which spares each container the compilation."""

    def __init__(self, sources: "dict[str, str]", code: "dict[str, str]") -> None:
        self.sources = sources
        self.code = code

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        package, _, module = name.partition(".")
        if package != PACKAGE or (module or "__init__") not in self.sources:
            return None
        return ModuleSpec(name, self, origin=f"<{name}>", is_package=not module)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code(module.__name__), module.__dict__)  # noqa: S102 - the service's own code

    def get_source(self, name: str) -> str:
        return self.sources[name.partition(".")[2] or "__init__"]

    def _code(self, name: str) -> CodeType:
        compiled = self.code.get(name.partition(".")[2] or "__init__")
        if compiled is not None:
            code: CodeType = marshal.loads(binascii.a2b_base64(compiled))  # noqa: S302 - as above
            return code
        return compile(self.get_source(name), f"<{name}>", "exec", dont_inherit=True)


def main() -> None:
    if sys.version_info < _OLDEST_PYTHON:
        sys.exit(f"the image's Python is {sys.version.split()[0]}; 3.11 or later is needed")
    message: dict[str, Any] = json.loads(_take(int.from_bytes(_take(4), "big")))
    same = message["python"] == sys.implementation.cache_tag
    sys.meta_path.insert(0, Importer(message["sources"], message["code"] if same else {}))
    importlib.import_module(f"{PACKAGE}.container").main(message["start"])


if __name__ == "__main__":
    main()
