"""Backend `docker`: a sandbox is a container whose first process is the same supervisor as in the process backend.

    service --HTTP--> engine: create, start, remove        service <--attach--> container's stdin and stdout

Control goes through the container's own stdin and stdout, attached before it starts, so that an engine on another
machine will do, and a turn costs no request. Who ends whom: a container is removed by the service; when the service
dies, its connection closes, with it the container's stdin, at whose end the supervisor exits, and the engine removes
the container. What is left nevertheless (an engine that died too) carries labels and falls to a sweep: see `instance`.
"""

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from tool_service.sandbox import docker_container
from tool_service.sandbox.base import (
    BackendStats,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxUnavailable,
    Tier,
    TurnStatus,
)
from tool_service.sandbox.docker_config import DEFAULT_IMAGE, DockerConfig, endpoint_of
from tool_service.sandbox.docker_engine import Engine, EngineError
from tool_service.sandbox.docker_runtime import check_runtime
from tool_service.sandbox.docker_stream import AttachedStream, attach
from tool_service.sandbox.facts import seen_from_inside
from tool_service.sandbox.instance import Instance, lives
from tool_service.sandbox.supervised import SupervisedSandbox
from tool_service.sandbox.uids import Uids

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_NAME = "turnwire-sandbox-{}"
_STATE_SECONDS = 0.3
"""How long the engine may take to say what state a silent container is in."""
_CAUSE_SECONDS = 1.0
"""And why one has ended."""
_REMOVAL_PAUSES = (0.2, 1.0)
"""Seconds between tries to remove a container. After the last it is left to a sweep, which tries again for ever."""
_HTTP_NOT_FOUND = 404
_WALLS = {
    "capabilities": "none",
    "no new privileges": "yes",
    "network": "none",
    "root": "read-only",
}
"""What every sandbox must see of itself, whatever the engine said; see `facts`."""


class Leftover(msgspec.Struct, frozen=True):
    """A container that nobody will end."""

    container: str
    sandbox: str
    instance: str
    status: str
    """In the engine's words, as "Up 3 minutes"."""


class DockerBackend(SandboxBackend):
    """See the module's docstring. An engine that stops takes its sandboxes along (INFRA); `create` raises
    `SandboxUnavailable` until it is back."""

    name = "docker"

    def __init__(self, config: DockerConfig | None = None, *, owner: str = "") -> None:
        """`owner`: whose leftovers a sweep removes; empty: this host's, see `instance`."""
        self.config = config or DockerConfig()
        self.tier = Tier.NONE
        self.facts: dict[str, str] = {}
        self._endpoint = endpoint_of(self.config)
        self._engine = Engine(self._endpoint, self.config.parallel_creations, self.config.control_seconds)
        self._instance = Instance(owner)
        self._uids = Uids(self.config.uid_base, self.config.uid_blocks)
        self._creating = asyncio.Semaphore(self.config.parallel_creations)
        self._sandboxes: dict[str, SupervisedSandbox] = {}
        self._removing: set[str] = set()
        self._left: set[str] = set()
        """Sandboxes of ours that are not known to be gone, and that a sweep will remove. They keep their uids."""
        self._making: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._created = 0
        self._leaked_removed = 0
        self._closed = False

    async def start(self) -> None:
        try:
            await self.connect()
            await self._check_engine()
            await self._have_image()
            self._instance.announce()
            self._uids.claim()
            await self.sweep()
            await self._probe()
            self.tier = Tier.ISOLATED
        except BaseException:  # also where the start is given up: nothing stays behind
            await self.close()
            raise
        log.info("sandbox backend docker: image %s, runtime %s", self.config.image, self.facts["runtime"])

    async def connect(self) -> None:
        """Reach the engine; enough for `leftovers` and `sweep`."""
        await self._engine.connect()

    async def _check_engine(self) -> None:
        """Whether it can build the walls that it will be asked for; what it cannot, it leaves out in silence."""
        client = self._engine.client
        version, info = await self._engine.call(client.version), await self._engine.call(client.info)
        names = {"MemoryLimit": "memory limits", "PidsLimit": "process limits", "CpuCfsQuota": "CPU quotas"}
        missing = [text for name, text in names.items() if not info.get(name)]
        if not any("seccomp" in option for option in info.get("SecurityOptions") or ()):
            missing.append("seccomp")
        if info.get("OSType") != "linux" or missing:
            raise SandboxUnavailable(
                f"the engine at {self._endpoint.url} ({info.get('OSType')}) lacks {', '.join(missing) or 'Linux'}: "
                "enable the cgroup controllers memory, pids and cpu for it"
            )
        self.facts = {
            "tier": Tier.ISOLATED.name.lower(),
            "engine": f"{version.get('Version')} at {self._endpoint.url}",
            "runtime": check_runtime(self.config, version, info.get("DefaultRuntime", ""), info.get("Runtimes")),
            "owner": self._instance.owner,
            "image": self.config.image,
            "swap": "limited" if info.get("SwapLimit") else "not limited by this engine (boot with swapaccount=1)",
        }

    async def _have_image(self) -> None:
        client, image = self._engine.client, self.config.image
        try:
            found = await self._engine.call(client.inspect_image, image)
        except EngineError as error:
            if error.status != _HTTP_NOT_FOUND:
                raise
            found = await self._pull()
        if (found.get("Config") or {}).get("Volumes"):
            raise SandboxUnavailable(
                f"image {image} declares a VOLUME: it would be a writable folder without a limit. Use one without."
            )

    async def _pull(self) -> dict[str, Any]:
        client, image = self._engine.client, self.config.image
        hint = f"`make images` builds {DEFAULT_IMAGE}" if image == DEFAULT_IMAGE else f"docker build -t {image} FOLDER"
        if self.config.pull == "never":
            raise SandboxUnavailable(
                f"the engine at {self._endpoint.url} has no image {image} (sandbox.docker.image): {hint}, or let it be "
                "fetched with sandbox.docker.pull: missing"
            )
        log.info("pulling image %s", image)
        try:
            await self._engine.call(client.pull, image)
            return await self._engine.call(client.inspect_image, image)
        except EngineError as error:
            raise SandboxUnavailable(f"image {image} cannot be pulled: {error}. Or build it: {hint}") from error

    async def _probe(self) -> None:
        """One sandbox, made and ended, proves the whole way."""
        sandbox = await self.create(SandboxLimits())
        try:
            seen = await seen_from_inside(sandbox)
        finally:
            await sandbox.kill()
        self._created = 0
        wrong = [f"{name} is {seen[name]!r}, not {value!r}" for name, value in _WALLS.items() if seen[name] != value]
        if wrong:
            raise SandboxUnavailable(
                f"the engine was asked for walls that a sandbox does not see: {'; '.join(wrong)}. It, or its runtime "
                "(sandbox.docker.runtime), ignores options."
            )
        self.facts |= seen

    async def create(self, limits: SandboxLimits) -> Sandbox:
        if self._closed:
            raise SandboxUnavailable("the backend is closed")
        async with self._creating:
            sandbox = SupervisedSandbox(
                secrets.token_hex(8),
                self._begin_removal,
                TurnStatus.INFRA,
                self._why_silent,
                self._ask_for_cause,
                begin_again=docker_container.first_message(limits, again=True),
            )
            self._sandboxes[sandbox.id] = sandbox
            making = self._spawn(self._make(sandbox, limits), self._making)
            try:
                await asyncio.shield(making)
            except BaseException:
                self._spawn(self._undo(making, sandbox), self._tasks)
                raise
            self._created += 1
            return sandbox

    async def _make(self, sandbox: SupervisedSandbox, limits: SandboxLimits) -> None:
        labels = {
            docker_container.OWNER: self._instance.owner,
            docker_container.INSTANCE: self._instance.id,
            docker_container.SANDBOX: sandbox.id,
        }
        name = _NAME.format(sandbox.id)
        client, uid = self._engine.client, self._uids.take(sandbox.id)
        specification = docker_container.specification(self.config, limits, uid, labels)
        await self._engine.call(client.create_container_from_config, specification, name)
        stream = await attach(self._endpoint, name, sandbox, lambda: self._begin_removal(sandbox.id))
        stream.write(docker_container.first_message(limits))
        await self._engine.call(client.start, name)
        try:
            await sandbox.wait_ready()
        except SandboxUnavailable as error:
            raise SandboxUnavailable(f"{error}{_what_it_said(stream)}") from error

    async def _undo(self, making: "asyncio.Task[None]", sandbox: SupervisedSandbox) -> None:
        """A creation failed or was cancelled. What it asked of the engine is waited for, so that it can be removed."""
        await asyncio.wait((making,))
        if not making.cancelled():
            making.exception()  # told already, or of no interest to one who was cancelled
        self._begin_removal(sandbox.id)

    def _begin_removal(self, sandbox_id: str) -> None:
        if sandbox_id in self._sandboxes and sandbox_id not in self._removing:
            self._removing.add(sandbox_id)
            self._spawn(self._remove(sandbox_id), self._tasks)

    async def _remove(self, sandbox_id: str) -> None:
        why_not = ""
        for pause in (*_REMOVAL_PAUSES, None):
            try:
                await self._engine.remove(_NAME.format(sandbox_id))
            except EngineError as error:
                why_not = str(error)
            else:
                why_not = ""
                break
            if pause is not None:
                await asyncio.sleep(pause)
        self._removing.discard(sandbox_id)
        sandbox = self._sandboxes.pop(sandbox_id)
        if why_not:
            log.warning("sandbox %s could not be removed, and is left to the next sweep: %s", sandbox_id, why_not)
            self._left.add(sandbox_id)
        else:
            self._uids.give_back(sandbox_id)
        sandbox.gone(infra=False, why_not=why_not)

    async def _why_silent(self, sandbox_id: str) -> str:
        """A container can be paused from outside, and an engine can hang."""
        client = self._engine.client
        try:
            async with asyncio.timeout(_STATE_SECONDS):
                found = await self._engine.call(client.inspect_container, _NAME.format(sandbox_id))
        except (EngineError, TimeoutError) as error:
            return f"the engine does not say how the container is: {error}"
        status = found["State"]["Status"]
        return "" if status == "running" else f"the container is {status}"

    def _ask_for_cause(self, sandbox_id: str, seconds: float) -> "asyncio.Task[bool]":
        """A container has ended. The kernel, should it find memory short again while the program that it has killed is
        not yet gone, kills the supervisor, too: no failure of ours."""
        return self._spawn(self._ran_out_of_memory(sandbox_id, seconds), self._tasks)

    async def _ran_out_of_memory(self, sandbox_id: str, seconds: float) -> bool:
        try:
            async with asyncio.timeout(_CAUSE_SECONDS):
                return await self._engine.ran_out_of_memory(_NAME.format(sandbox_id), seconds)
        except (EngineError, TimeoutError):  # who does not answer has taken the container along
            return False

    async def leftovers(self) -> list[Leftover]:
        """Containers of this owner whose service is dead, or that this service has lost sight of."""
        listed = []
        for container in await self._engine.containers(f"{docker_container.OWNER}={self._instance.owner}"):
            labels = container["Labels"]
            one = Leftover(
                container["Id"],
                labels.get(docker_container.SANDBOX, ""),
                labels.get(docker_container.INSTANCE, ""),
                container["Status"],
            )
            if one.sandbox not in self._sandboxes if one.instance == self._instance.id else not lives(one.instance):
                listed.append(one)
        return listed

    async def sweep(self) -> int:
        left = set(self._left)
        listed = await self.leftovers()
        await asyncio.gather(*(self._engine.remove(one.container) for one in listed))
        for sandbox_id in left:
            self._uids.give_back(sandbox_id)
        self._left -= left
        self._leaked_removed += len(listed)
        if listed:
            log.warning("removed %d containers that dead services left", len(listed))
        return len(listed)

    def stats(self) -> BackendStats:
        return BackendStats(self._created, len(self._sandboxes) + len(self._left), self._leaked_removed)

    def _spawn(self, work: Coroutine[Any, Any, _T], kept: "set[asyncio.Task[Any]]") -> "asyncio.Task[_T]":
        task = asyncio.get_running_loop().create_task(work)
        kept.add(task)
        task.add_done_callback(kept.discard)
        return task

    async def close(self) -> None:
        in_use = self.tier is Tier.ISOLATED and not self._closed
        self._closed = True
        if self._making:  # what the engine has been asked for can be removed only once it is there
            await asyncio.wait(tuple(self._making))
        for sandbox_id in list(self._sandboxes):
            self._begin_removal(sandbox_id)
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        if in_use:
            try:
                await self.sweep()  # an engine that failed may have made what it never told of
            except EngineError as error:
                log.warning("leftovers could not be looked for at the end: %s", error)
        self._engine.close()
        self._uids.close()
        self._instance.close()


def _what_it_said(stream: AttachedStream) -> str:
    return f": {stream.stderr}" if stream.stderr else ""
