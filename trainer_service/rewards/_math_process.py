"""The process behind `math.py`: a line of JSON in, a line of JSON out, under limits of memory and of CPU time."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer until stdin ends. The first line says that the process is ready. Arguments: MiB of memory, and seconds of
    CPU time for each answer."""
    limit, seconds = int(sys.argv[1]) * 1024 * 1024, float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    from math_verify import parse, verify  # noqa: PLC0415 - under the limit

    verify(_read("x^2 - 1", parse), _read("(x-1)(x+1)", parse), timeout_seconds=None)  # loads what no answer shall pay
    _say({"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also amid a loop in C
        request = json.loads(line)
        right = [_read(text, parse) for text in request["right"]]
        if not all(right):
            _say({"error": f"math-verify cannot read the ground truth {request['right']!r}"})
            continue
        given = _read(request["given"], parse)
        equal = any(verify(gold, given, timeout_seconds=None) for gold in right)
        _say({"equal": equal})


def _read(text: str, parse: Callable[..., list[Any]]) -> list[Any]:
    """All readings of a text: as LaTeX, which math-verify looks for between dollars, and as what it finds in it."""
    whole = [] if "$" in text else parse(f"${text}$", parsing_timeout=None)
    return [*whole, *parse(text, parsing_timeout=None)]


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
