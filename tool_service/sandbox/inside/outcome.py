"""Why a turn ended: by a worker's answer, of which nothing is believed but a few words, or by its death."""

import os
import signal
from typing import NamedTuple

from . import runtimes, worker

_STATUS_OF_TAG = {
    runtimes.OK: "OK",
    runtimes.ERROR: "TOOL_ERROR",
    runtimes.MEMORY: "MEMORY",
    runtimes.TIMEOUT: "TIMEOUT",
    runtimes.EXHAUSTED: "MEMORY",
    runtimes.SIGNALED: "SIGNALED",
    runtimes.LOST: "SESSION_LOST",
}

_SIGNALS = range(1, signal.NSIG)
_EXIT_CODES = (runtimes.NO_EXIT_CODE, *range(256))


class Outcome(NamedTuple):
    """How a turn ended."""

    status: str
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    value: bytes = b""
    ends: bool = True
    """All processes must end with it."""


def of_death(status: int) -> Outcome:
    """`status` is what wait(2) gives."""
    code = os.waitstatus_to_exitcode(status)  # negative for a signal
    if code < 0:
        return Outcome("SIGNALED", f"the process died of signal {-code}", signal=-code)
    return Outcome("SESSION_LOST", f"the process ended by itself with exit code {code}", exit_code=code)


def of_answer(answer: bytearray, turn_number: int, most_value_bytes: int) -> Outcome | None:
    """What a worker has said so far; None while it is incomplete."""
    size = worker.ANSWER.size
    if len(answer) < size:
        return None
    length, number, tag, exit_code = worker.ANSWER.unpack_from(answer)
    excess = len(answer) - size - length
    known = tag in _STATUS_OF_TAG and exit_code in (_SIGNALS if tag == runtimes.SIGNALED else _EXIT_CODES)
    if length > most_value_bytes or number != turn_number or not known or excess > 0:
        return Outcome("SESSION_LOST", "the worker broke the protocol")
    if excess < 0:
        return None
    body = bytes(answer[size:])
    code = None if exit_code == runtimes.NO_EXIT_CODE else exit_code
    if tag == runtimes.OK:
        return Outcome("OK", exit_code=code, value=body, ends=False)
    text, _, value = body.partition(b"\0")
    status, detail = _STATUS_OF_TAG[tag], _line(text[:2000].decode("utf-8", "replace"))
    if tag == runtimes.SIGNALED:
        return Outcome(status, detail, signal=exit_code, value=value, ends=False)
    return Outcome(status, detail, exit_code=code, value=value, ends=tag == runtimes.EXHAUSTED)


def _line(text: str) -> str:
    """One line, without what a terminal would obey: it goes to people and into logs."""
    return "".join(one if one.isprintable() else " " for one in text)
