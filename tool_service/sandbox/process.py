"""Backend `process`, the embedded default: sandboxes are forks of a warm interpreter behind namespaces and limits.

    service --SOCK_SEQPACKET--> zygote --fork--> supervisor (pid 1 of its namespace) --fork--> workers
       '-------------- one stream socket a sandbox ------------------'

Who ends whom: a sandbox ends when its stream closes, or by SIGKILL through the zygote; the zygote ends when the
service's socket closes, and with it, by the kernel, every sandbox. Nothing has a name on the host: no folder, mount or
address outlives the processes (the restricted tier alone keeps workspaces in a temporary folder, known to the sweep).
"""

import asyncio
import logging
import os
import secrets
import socket
from typing import Annotated, Literal

import msgspec

from tool_service.sandbox.base import (
    BackendStats,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxUnavailable,
    Tier,
    TurnStatus,
    check_tier,
)
from tool_service.sandbox.facts import seen_from_inside
from tool_service.sandbox.inside import jail, landlock
from tool_service.sandbox.scratch import Scratch
from tool_service.sandbox.supervised import SupervisedSandbox, limits_as_dict
from tool_service.sandbox.uids import UID_BASE, UID_BLOCKS, Uids
from tool_service.sandbox.zygote_process import ZygoteProcess, default_interpreter

log = logging.getLogger(__name__)

_PARALLEL_CREATIONS = 16
_HOW_TO_ISOLATE = (
    "Run the service as root, or as a user who may make user namespaces (sysctl user.max_user_namespaces above 0, "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu) on Linux 5.12 or later. A container of root needs "
    "--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
    "one of another user --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined."
)


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the process backend."""

    minimum_tier: Literal["restricted", "isolated"] = "isolated"
    """The least tier accepted; `start` fails below it."""
    tier: Literal["auto", "isolated", "restricted"] = "auto"
    """Which walls to build. `auto`: the strongest that the machine gives."""
    interpreter: str = ""
    """Path of the Python 3.11+ that runs inside. Empty: the one behind the service's own."""
    read_only_paths: tuple[str, ...] = ()
    """Host files and folders that every sandbox shows at the same path, read-only."""
    uid_base: Annotated[int, msgspec.Meta(ge=10_000, le=2_000_000_000)] = UID_BASE
    """First of the uids that sandboxes get when the service is root. No account may have one of them."""
    uid_blocks: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = UID_BLOCKS
    """Blocks of 4,096 uids from `uid_base` on. Each service of this host holds one block."""


class ProcessBackend(SandboxBackend):
    """See the module's docstring. A zygote that dies takes its sandboxes along (INFRA); `create` starts another."""

    name = "process"

    def __init__(self, config: ProcessConfig | None = None) -> None:
        self.config = config or ProcessConfig()
        self.tier = Tier.NONE
        self.facts: dict[str, str] = {}
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._creating = asyncio.Semaphore(_PARALLEL_CREATIONS)
        self._sandboxes: dict[str, SupervisedSandbox] = {}
        self._uids = Uids(self.config.uid_base, self.config.uid_blocks)
        self._scratch = Scratch()
        self._mode = ""
        self._created = 0
        self._leaked_removed = 0
        self._closed = False
        self._cleaning: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        wanted = ("isolated", "restricted") if self.config.tier == "auto" else (self.config.tier,)
        self._check_paths(jail.OWN_FOLDERS if "isolated" in wanted else ())
        missing = ""
        for mode in wanted:
            try:
                self._mode = mode
                if os.geteuid() == 0:
                    self._uids.claim()
                await self._probe()
            except SandboxUnavailable as error:
                missing += f"{mode}: {error}. "
                await self._stop_zygote()
                continue
            self.tier = Tier[mode.upper()]
            break
        missing = missing.strip()
        advice = f" {_HOW_TO_ISOLATE}" if "isolated" in (*wanted, self.config.minimum_tier) else ""
        try:
            check_tier(self.name, self.tier, Tier[self.config.minimum_tier.upper()], missing + advice)
        except SandboxUnavailable:
            await self.close()
            raise
        self.facts |= {
            "tier": self.tier.name.lower(),
            "user": self._user_fact(),
            "interpreter": self._interpreter,
            "landlock": f"version {landlock.ABI}" if landlock.ABI else "not in this kernel",
            "missing": missing,
        }
        await self.sweep()
        log.info("sandbox backend process: tier %s", self.tier.name.lower())

    def _check_paths(self, hidden: tuple[str, ...]) -> None:
        """Refuse paths that sandboxes could not show. `hidden`: folders that they have themselves."""
        for path in self.config.read_only_paths:
            key = f"sandbox.process.read_only_paths: {path}"
            if not os.path.isabs(path) or not os.path.exists(path):
                raise SandboxUnavailable(f"{key} is not on this host, or not absolute")
            if any(os.path.commonpath((path, folder)) in (path, folder) for folder in hidden):
                raise SandboxUnavailable(f"{key} cannot be shown: sandboxes have their own {', '.join(hidden)}")

    def _user_fact(self) -> str:
        if os.geteuid() == 0:
            return "a uid of its own each"
        return "the service's own uid" + (", in a user namespace each" if self._mode == "isolated" else "")

    @property
    def _interpreter(self) -> str:
        return self.config.interpreter or default_interpreter()

    async def _probe(self) -> None:
        """One sandbox, made and ended, proves the whole way."""
        sandbox = await self.create(SandboxLimits())
        try:
            self.facts = await seen_from_inside(sandbox)
        finally:
            await sandbox.kill()
        self._created = 0

    async def _ensure_zygote(self) -> ZygoteProcess:
        async with self._starting:
            if self._zygote is None or not self._zygote.alive:
                await self._stop_zygote()
                zygote = ZygoteProcess(self._on_gone, self._on_death)
                await zygote.start(self._interpreter, self._mode, self.config.read_only_paths)
                self._zygote = zygote
            return self._zygote

    async def _stop_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()

    def _on_gone(self, sandbox_id: str) -> None:
        self._forget(sandbox_id, infra=False)

    def _on_death(self) -> None:
        if self._sandboxes:
            log.error("the sandbox zygote died with %d sandboxes; the next one starts it anew", len(self._sandboxes))
        for sandbox_id in list(self._sandboxes):
            self._forget(sandbox_id, infra=True)

    def _forget(self, sandbox_id: str, infra: bool) -> None:
        sandbox = self._sandboxes.pop(sandbox_id, None)
        self._uids.give_back(sandbox_id)
        retired = self._scratch.retire(sandbox_id)
        if retired:
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._scratch.remove, retired))
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)
        if sandbox is not None:
            sandbox.gone(infra)

    def _kill(self, sandbox_id: str) -> None:
        if self._zygote is not None:
            self._zygote.kill(sandbox_id)

    async def create(self, limits: SandboxLimits) -> Sandbox:
        if self._closed:
            raise SandboxUnavailable("the backend is closed")
        async with self._creating:
            sandbox_id = secrets.token_hex(8)
            try:
                sandbox = await self._ask_for(sandbox_id, limits)
            except BaseException as error:  # the zygote knows nothing of it, so nobody else would free what it holds
                self._forget(sandbox_id, infra=True)
                if isinstance(error, OSError):
                    raise SandboxUnavailable(f"no sandbox can be asked for: {error}") from error
                raise
            try:
                await sandbox.wait_ready()
            except SandboxUnavailable:
                await sandbox.kill()
                raise
            self._created += 1
            return sandbox

    async def _ask_for(self, sandbox_id: str, limits: SandboxLimits) -> SupervisedSandbox:
        """Get all that a sandbox needs, and tell the zygote. Raises OSError for what this process lacks."""
        zygote = await self._ensure_zygote()
        uid = self._uids.take(sandbox_id) if os.geteuid() == 0 else os.geteuid()
        workspace = "" if self._mode == "isolated" else self._scratch.make(sandbox_id, uid)
        own_death = TurnStatus.INFRA if self._mode == "isolated" else TurnStatus.SESSION_LOST
        sandbox = SupervisedSandbox(sandbox_id, self._kill, own_death)
        self._sandboxes[sandbox_id] = sandbox
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.get_running_loop().create_unix_connection(lambda: sandbox, sock=ours)
            zygote.create(sandbox_id, uid, workspace, limits_as_dict(limits), theirs)
        return sandbox

    async def sweep(self) -> int:
        """Only the restricted tier leaves anything on the host that can outlive a service: workspaces."""
        count = await asyncio.to_thread(self._scratch.sweep)
        self._leaked_removed += count
        return count

    def stats(self) -> BackendStats:
        return BackendStats(self._created, len(self._sandboxes), self._leaked_removed)

    async def close(self) -> None:
        self._closed = True
        await self._stop_zygote()
        for sandbox_id in list(self._sandboxes):
            self._forget(sandbox_id, infra=False)
        await asyncio.gather(*self._cleaning)
        self._scratch.close()
        self._uids.close()
