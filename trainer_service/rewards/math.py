"""1 when the final answer is mathematically equal to the ground truth, by `math-verify`.

Parsing an expression that a policy wrote can take for ever or eat all memory, so it happens in a process of its own,
with a limit of memory and one of CPU time, at which the kernel kills it, and an empty environment. An answer that does
this is wrong: 0. A process that says nothing and has reached neither is no answer's doing, but that of a machine that
is crowded or stands still: a failure, and no reward.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Annotated

import msgspec

from trainer_service.data.task import Task
from trainer_service.rewards.base import Attempt, Reward, accepted

_MAX_CHARACTERS = 4096
_SILENT_SECONDS = 60.0
"""Of wall time, in which a process has started, or has used up its CPU time."""


class MathOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """seconds: of CPU time, for one comparison. memory_mib: of the process that compares."""

    seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    memory_mib: Annotated[int, msgspec.Meta(ge=512)] = 2048


class Math(Reward):
    """The final answer equals the ground truth as mathematics: `1/2`, `0.5` and `\\frac{1}{2}` are one answer."""

    name = "math"
    options_type = MathOptions

    def __init__(self, options: MathOptions) -> None:
        super().__init__(options)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def score(self, task: Task, attempt: Attempt) -> float:
        right = accepted(task.ground_truth)
        if attempt.final_answer is None or len(attempt.final_answer) > _MAX_CHARACTERS:
            return 0.0
        request = json.dumps({"right": right, "given": attempt.final_answer})
        with self._lock:
            process = self._process if self._process and self._process.poll() is None else self._start()
            try:
                answer = _exchange(process, request, self.options.seconds + _SILENT_SECONDS)
            except TimeoutError:
                self.close()
                raise
            if answer is None:  # killed by one of its limits: only the answer can be the cause
                self.close()
                return 0.0
        reply = json.loads(answer)
        if "error" in reply:
            raise ValueError(reply["error"])
        return float(reply["equal"])

    def _start(self) -> subprocess.Popen[str]:
        limits = (str(self.options.memory_mib), str(self.options.seconds))
        command = [sys.executable, "-I", "-m", "trainer_service.rewards._math_process", *limits]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PATH": "/usr/bin:/bin"}
        )
        if _exchange(self._process, None, _SILENT_SECONDS) is None:
            self.close()
            raise RuntimeError("the process that compares mathematics did not start; is math-verify installed?")
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _exchange(process: subprocess.Popen[str], request: str | None, seconds: float) -> str | None:
    """Send a line, read a line. None if the process ended. Raises TimeoutError if none came in time, and it is dead."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    answer = ""
    try:
        if request is not None:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:  # it died before it read
        pass
    finally:
        timer.cancel()
    if not answer and late.is_set():
        raise TimeoutError(f"the process that compares mathematics said nothing for {seconds:g} s")
    return answer or None
