"""Forks services whose modules are loaded already, so that a test can afford dozens of processes.

A script: `service_processes.py` starts it. It reads one request a line from stdin, forks, and answers with the child's
`{"pid": …, "address": …}`; the address is empty if the child ended before it listened. A child is the real service,
`main()` of its package in a process of its own. It may be told where to kill itself. Of several ranks the child is
torchrun, but that the ranks are forks, too.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

MODULES = (
    *("tool_service.__main__", "rollout_service.__main__", "rollout_service.build"),
    *("trainer_service.__main__", "trainer_service.loop", "torch.utils.tensorboard", "matplotlib.backends.backend_agg"),
)
"""What the services load when they start or later."""


def main() -> None:
    """Serve requests until stdin ends, then end what is left."""
    for name in MODULES:
        importlib.import_module(name)
    children: set[int] = set()
    outputs = []  # open to the end: who starts once more writes once more
    for line in sys.stdin:
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        request = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os._exit(serve(request, writing))
        os.close(writing)
        children.add(pid)
        outputs.append(os.fdopen(reading))
        address = outputs[-1].readline().rpartition(" ")[2].strip()
        sys.stdout.write(json.dumps({"pid": pid, "address": address}) + "\n")
        sys.stdout.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def serve(request: dict[str, Any], output: int) -> int:
    """In the child: be the service. `request` has `service`, `config` and `log` (paths), `ranks`, perhaps `death`."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, log)):
        os.dup2(source, number)
    if request["ranks"] == 1:
        return run(request, rank=0)
    options = [f"--nproc-per-node={request['ranks']}", "--max-restarts=9", "--shutdown-timeout=600", "--rdzv-id=test"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]  # what --standalone stands for
    options += [f"--log-dir={request['config']}.logs"]  # else a folder of torchrun's is left in /tmp
    config, _, _ = config_from_args(parse_args([*options, request["service"]]))
    elastic_launch(dataclasses.replace(config, start_method="fork"), be_rank)(request)
    return 0


def run(request: dict[str, Any], rank: int) -> int:
    """`python -m SERVICE --config CONFIG`."""
    death = request["death"]
    if death and rank == death.pop("rank"):
        die_at(**death)
    sys.argv = [request["service"], "--config", request["config"]]
    code: int = importlib.import_module(f"{request['service']}.__main__").main()
    return code


def be_rank(request: dict[str, Any]) -> NoReturn:
    """In one of torchrun's processes. Its id is in a file beside the config."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a fork has inherited torchrun's handlers
        signal.signal(number, signal.SIG_DFL)
    rank, starts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(f"{request['config']}.{rank}").write_text(str(os.getpid()))
    os._exit(run(request if starts == 0 else {**request, "death": None}, rank))  # who returns waits for torchrun


def die_at(function: str, call: int, when: str) -> None:
    """Have this process kill itself before or after call number `call` of `function`, as `module:Class.method`."""
    module, _, path = function.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def awaited(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == call
        if last and when == "before":
            die()
        result = await original(*arguments, **named)
        if last:
            die()
        return result

    def called(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == call
        if last and when == "before":
            die()
        result = original(*arguments, **named)
        if last:
            die()
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(original) else called)


if __name__ == "__main__":
    main()
