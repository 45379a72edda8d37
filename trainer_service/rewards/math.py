"""1 when the final answer is mathematically equal to the ground truth, by `math-verify`.

Parsing an expression that a policy wrote can take for ever or eat all memory, so it happens in a process of its own,
with a memory limit, an empty environment and a deadline after which it is killed and replaced. An answer that does
this is wrong: 0.
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
_START_SECONDS = 60.0


class MathOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """seconds: for one comparison. memory_mib: of the process that compares."""

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
            answer = _exchange(process, request, self.options.seconds)
            if answer is None:  # killed, or killed by its memory limit: only the answer can be the cause
                self.close()
                return 0.0
        reply = json.loads(answer)
        if "error" in reply:
            raise ValueError(reply["error"])
        return float(reply["equal"])

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", "-m", "trainer_service.rewards._math_process", str(self.options.memory_mib)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PATH": "/usr/bin:/bin"}
        )
        if _exchange(self._process, None, _START_SECONDS) is None:
            self.close()
            raise RuntimeError("the process that compares mathematics did not start; is math-verify installed?")
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _exchange(process: subprocess.Popen[str], request: str | None, seconds: float) -> str | None:
    """Send a line, read a line. None if none came in time or the process ended; it is then dead."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        if request is not None:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        return process.stdout.readline() or None
    except OSError:  # it died before it read
        return None
    finally:
        timer.cancel()
