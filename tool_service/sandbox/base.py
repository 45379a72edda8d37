"""One interface, many backends: read this file first, it explains all of them.

A *backend* (`process`, `docker`) makes *sandboxes*; a sandbox runs *turns*, one at a time, and
keeps state between them: variables of its workers, files of its workspace, background processes. One sandbox serves one
trajectory and is then thrown away.

Inside every sandbox the same two kinds of standard-library Python run (`inside/`):

- the *supervisor*, first process of the sandbox and only holder of the service's connection. It starts workers, feeds
  them turns, drains their output under a cap, enforces deadlines and memory, and is the only source of a status;
- one *worker* a runtime (`python`, `sql`, ...), in which untrusted code runs; the first is started before it is known
  which runtime it will be. Whatever a worker says is untrusted: bounded, checked, never unpickled.

Invariants that every backend keeps (hostile/ runs the same cases on each):

1. `run` answers every turn with a `TurnResult` within `turn.timeout` + `GRACE_SECONDS`; it raises only
   `asyncio.CancelledError`, and then the sandbox is dead (and RuntimeError where calls overlap, a bug of the caller).
2. A status never comes out of the text of a program. `INFRA` means that we failed, never that the program did.
3. When `kill` returns, nothing of the sandbox is left: no process, mount or descriptor, and no folder that anybody can
   reach (deleting a large one may go on in the background; `close` waits for it).
4. Nothing of another sandbox or of the service is visible: files, processes, environment, memory, network.
5. When the service dies, even by SIGKILL, its sandboxes die by themselves.
6. Memory that the service spends on a sandbox is bounded, whatever the program prints or returns.
"""

import abc
import enum
from typing import Annotated, TypeAlias

import msgspec

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"
"""What crosses between the tool service and a sandbox besides bytes."""

GRACE_SECONDS = 1.5
"""How long after `Turn.timeout` the service waits for the supervisor's answer before it kills the whole sandbox."""

MIB = 1024 * 1024


class TurnStatus(enum.StrEnum):
    """How a turn ended. The values are the names of the wire's `ErrorKind`, and `OK`."""

    OK = "OK"
    """The code ran to its end."""
    TOOL_ERROR = "TOOL_ERROR"
    """The code failed: an exception, a syntax error, a SQL error, `sys.exit(1)`. State is kept."""
    TIMEOUT = "TIMEOUT"
    """Wall or CPU time ran out. Output so far is kept. Processes were killed unless the runtime could stop softly."""
    MEMORY = "MEMORY"
    """An uncaught `MemoryError` (state is kept), or the processes together went over the cap and were killed; of a
    container that ran out of memory the whole sandbox may be gone."""
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    """The output flooded past `flood_bytes`; all was killed. A turn that is merely long is OK and `truncated`."""
    SIGNALED = "SIGNALED"
    """The worker died of a signal (`TurnResult.signal`). Its state is lost; the next turn starts a new one."""
    SESSION_LOST = "SESSION_LOST"
    """The worker exited, or broke the protocol, or the sandbox is gone by the program's own doing. State is lost."""
    INFRA = "INFRA"
    """We failed: the sandbox or its backend died without the program's doing. Never training data; worth a retry."""


class Tier(enum.IntEnum):
    """How strong the walls are, ordered. docs/security.md says what holds in which."""

    NONE = 0
    """A plain child process. Never chosen by a backend."""
    RESTRICTED = 1
    """No namespaces: seccomp (no sockets), Landlock (no files of the machine but the system's own programs), rlimits,
    memory watchdog; as root also a uid of its own per sandbox."""
    ISOLATED = 2
    """All namespaces, own root by pivot_root, own uid or user namespace, no capabilities, seccomp, limits, watchdog."""


class SandboxLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one sandbox. They hold for all of its processes together unless the field says otherwise."""

    memory_bytes: Annotated[int, msgspec.Meta(ge=32 * MIB)] = 512 * MIB
    """Bytes of anonymous and shared memory, plus the workspace, of all processes together. A single process gets
    MemoryError at the same figure; the sum is watched by the supervisor and ends the turn as MEMORY. Where it watches
    processes, and no cgroup, a mapping of shared memory without a file counts in full, used or not."""
    processes: Annotated[int, msgspec.Meta(ge=4, le=4096)] = 64
    """Processes and threads. Past it fork and thread creation fail with EAGAIN inside. What leaves three quarters of so
    many processes behind when its turn is over, as a fork bomb does, is ended with all state."""
    open_files: Annotated[int, msgspec.Meta(ge=32, le=65536)] = 256
    """Descriptors of each process. Past it open fails with EMFILE inside."""
    file_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 64 * MIB
    """Bytes of one file. Past it writes fail with EFBIG inside. Also the cap of `put_file`."""
    workspace_bytes: Annotated[int, msgspec.Meta(ge=MIB)] = 128 * MIB
    """Bytes of /workspace, /tmp and /dev/shm together. Past it writes fail with ENOSPC inside. In a container the three
    are separate mounts, and get five, two and one eighths of it."""
    workspace_inodes: Annotated[int, msgspec.Meta(ge=64)] = 16384
    """Files and folders in /workspace, /tmp and /dev/shm together, shared out as the bytes are. Past it ENOSPC
    inside."""
    cpu_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """CPU seconds that one turn may use, all processes together. Past it the turn is a TIMEOUT."""
    output_bytes: Annotated[int, msgspec.Meta(ge=1024, le=16 * MIB)] = 256 * 1024
    """Most bytes of stdout, and of stderr, that a turn may ask to keep (`Turn.output_bytes`)."""
    flood_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 64 * MIB
    """Bytes of stdout and stderr that are read and thrown away past the kept ones before the turn is killed as
    OUTPUT_LIMIT. Also the bound on what background processes may print between turns."""
    value_bytes: Annotated[int, msgspec.Meta(ge=1024, le=16 * MIB)] = MIB
    """Bytes of a turn's structured value as JSON. A worker that sends more loses its session."""


class Turn(msgspec.Struct, frozen=True):
    """One piece of work. `payload` is what the runtime documents:

    - `python`: `{"code": str}`. Runs in the namespace of earlier turns; a last expression is shown by `repr`. With
      `"figures": True` matplotlib's open figures are saved in `outputs`; `"paths"` are added to `sys.path`.
    - `bash`: `{"script": str}` without NUL. Runs in the shell of earlier turns; stdout and stderr both come as stdout,
      in order. TOOL_ERROR is an exit code that is not 0.

      The value of `python` and `bash` has, where there are any, `"files"`: `[path, bytes]` of what the turn left in
      `outputs`.
    - `sql`: `{"script": str}` (several statements, no result: to set a database up) or `{"query": str}` (one statement)
      with `"read_only": bool`, `"max_rows": int`, `"max_cell_bytes": int` where wanted. The database is
      /workspace/database.sqlite3; a query's value is `{"columns", "rows", "truncated", "changes"}`; an error's text is
      in `TurnResult.detail`. Or `{"schema": str}`, a table's name or empty for all: sql/schema.py has the value.
    - `tests`: `{"code": str}`, a candidate program, with `"tests"`, Python source, or `"cases"`, a list of
      `{"call", "args", "kwargs", "returns"}` and `{"stdin", "stdout"}`; also `"module"`, under which tests import the
      candidate, `"language"` (`python`, or `bash` for programs) and `"test_seconds"`, of each test. The value is
      `{"passed", "total", "tests": [{"name", "passed", "detail"}]}`.
    """

    runtime: str
    payload: dict[str, JSON]
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Wall seconds from the supervisor's receipt of the turn."""
    output_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * 1024
    """Bytes kept of stdout, and as many of stderr, so that a flood of one never hides the other. At most the limit."""
    cpu_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """CPU seconds of all processes together. At most the limit, which also holds where this is not set."""


class TurnResult(msgspec.Struct, frozen=True):
    """What a turn did. Bytes are what the program wrote: decode with `errors="replace"` where text is needed."""

    status: TurnStatus
    stdout: bytes = b""
    """The first `output_bytes` bytes. Includes what background processes printed since the turn before."""
    stderr: bytes = b""
    """The same for stderr; tracebacks are here."""
    value: JSON = None
    """The runtime's structured value (`sql`: columns and rows)."""
    exit_code: int | None = None
    """Of `sys.exit(n)`, or of a worker that ended by itself."""
    signal: int | None = None
    """That the worker died of."""
    truncated: bool = False
    """stdout or stderr was longer than what is kept."""
    total_bytes: int = 0
    """Bytes written to stdout and stderr, kept or not."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the worker process and its threads, by the kernel's clock."""
    restarted: bool = False
    """The runtime lost its in-memory state since its turn before: this turn began in a fresh worker."""
    detail: str = ""
    """One line for people: the exception's type, the limit that was hit, what was missing."""


class SandboxError(Exception):
    """Root of what this package raises. All of it is infrastructure, never the program's doing."""


class SandboxUnavailable(SandboxError, RuntimeError):  # noqa: N818 - says what is the case
    """The backend cannot start or cannot make a sandbox here. The message says what is missing and how to get it."""


class PoolExhausted(SandboxError):  # noqa: N818 - says what is the case
    """Every sandbox is taken and the queue is full, or the wait was too long. Try again after `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class FileRefused(SandboxError, OSError):  # noqa: N818 - says what is the case
    """A file could not be put or fetched: unsafe path, missing, not a regular file, too large, no space."""


class Sandbox(abc.ABC):
    """One sandbox, for one trajectory. Calls do not overlap: the caller runs one turn or file at a time."""

    id: str
    """Unique among the sandboxes of this service."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """False once the sandbox is killed or known to be gone; it never comes back."""

    @abc.abstractmethod
    async def run(self, turn: Turn) -> TurnResult:
        """Run one turn. Never raises for what happens inside. On a dead sandbox the result is SESSION_LOST (or INFRA).

        Cancelling this call kills the sandbox with all its processes at once.
        """

    @abc.abstractmethod
    async def put_file(self, path: str, data: bytes) -> None:
        """Write a file below the workspace, making its folders. `path` is relative, without `..`; symbolic links that
        lead out are refused. Raises `FileRefused`, or `SandboxError` when the sandbox is gone."""

    @abc.abstractmethod
    async def get_file(self, path: str, max_bytes: int) -> bytes:
        """Read a regular file below the workspace. A file larger than `max_bytes` is refused, not cut. Raises as
        `put_file`."""

    @abc.abstractmethod
    async def ping(self) -> bool:
        """Whether the supervisor answers, at once. Never raises. A sandbox that does not answer is killed."""

    @abc.abstractmethod
    async def reset(self) -> str:
        """Make it as new: no process, no variable, no file, no IPC object is left, and that is verified; and what it
        was sent and has answered is in no memory that a program could come to see. Empty when it is so, else why it
        cannot be vouched for: then kill it. Never raises."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """End it. Idempotent, also while a turn runs (which then answers SESSION_LOST). All is gone when it returns."""


class BackendStats(msgspec.Struct, frozen=True):
    """Counters since the backend's start, for GetStatus."""

    created: int
    """Sandboxes made."""
    running: int
    """Sandboxes that are not known to be gone."""
    leaked_removed: int
    """Leftovers of dead sandboxes or dead services that were found and removed."""


class SandboxBackend(abc.ABC):
    """Makes sandboxes. `start` once, before anything else of the service; `close` at the end."""

    name: str
    tier: Tier
    """What this machine gives; known after `start`."""
    facts: dict[str, str]
    """What the probe found, for people (`turnwire sandbox check`); filled by `start`."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Probe the machine. Raises `SandboxUnavailable` when the tier is below the configured minimum."""

    @abc.abstractmethod
    async def create(self, limits: SandboxLimits) -> Sandbox:
        """Make a sandbox that is ready for its first turn. Raises `SandboxUnavailable`."""

    @abc.abstractmethod
    async def sweep(self) -> int:
        """Remove leftovers of this owner's dead services and sandboxes; the number removed."""

    @abc.abstractmethod
    def stats(self) -> BackendStats:
        """Counters, without waiting."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Kill all sandboxes and free everything. Idempotent."""


def check_tier(backend: str, tier: Tier, minimum: Tier, missing: str) -> None:
    """Refuse a machine that is weaker than asked for. `missing` says what was not there and how to get it."""
    if tier < minimum:
        weaker = f" To accept the weaker walls, say so: sandbox.minimum_tier: {tier.name.lower()}."
        raise SandboxUnavailable(
            f"sandbox backend '{backend}' reaches tier '{tier.name.lower()}' on this machine, and the configuration "
            f"asks for at least '{minimum.name.lower()}'. Missing: {missing}" + (weaker if tier > Tier.NONE else "")
        )
