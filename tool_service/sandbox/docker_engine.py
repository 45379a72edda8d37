"""Requests to a Docker engine: the SDK's calls, in a few threads, with errors of one kind."""

import asyncio
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException
from docker.tls import TLSConfig

from tool_service.sandbox.base import SandboxUnavailable
from tool_service.sandbox.docker_config import Endpoint

_T = TypeVar("_T")
_THREADS_BESIDE_CREATIONS = 8
"""So that creations that hang cannot keep removals from being sent."""
_EVENT_SECONDS = 1.0
"""How long an engine may keep silent when it is asked what has happened."""


class EngineError(SandboxUnavailable):
    """The engine refused a request, or could not be reached. `status`: of HTTP, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Client(docker.APIClient):
    """Asks nothing of the environment: its proxies are for the internet, and so is its bundle of certificates, which
    would come before the engine's own. A property, since the first request is sent while the client is being made."""

    trust_env = property(lambda self: False, lambda self, value: None)

    def ran_out_of_memory(self, container: str, seconds: float) -> bool:
        """What `Engine.ran_out_of_memory` asks. `events` of the SDK would wait for ever."""
        parameters = {
            "since": f"{time.time() - seconds:.9f}",
            "filters": json.dumps({"container": [container], "event": ["oom", "destroy"]}),
        }
        url = f"{self.base_url}/v{self.api_version}/events"
        with self.get(url, params=parameters, stream=True, timeout=_EVENT_SECONDS) as answer:
            answer.raise_for_status()
            first = next(answer.iter_lines(chunk_size=None), b"{}")
        return bool(json.loads(first).get("Action") == "oom")


class Engine:
    """One engine. `creations`: how many containers are made at once; `seconds`: for one request."""

    def __init__(self, endpoint: Endpoint, creations: int, seconds: float) -> None:
        self.endpoint = endpoint
        self._seconds = seconds
        self._workers = creations + _THREADS_BESIDE_CREATIONS
        self._threads = ThreadPoolExecutor(self._workers, "docker")
        self._client: _Client | None = None

    async def connect(self) -> None:
        """Raises `EngineError` when nobody answers."""
        self._client = await self._in_thread(self._new_client)

    def _new_client(self) -> _Client:
        folder = self.endpoint.tls_folder
        tls: TLSConfig | bool = False
        if folder:
            tls = TLSConfig((f"{folder}/cert.pem", f"{folder}/key.pem"), f"{folder}/ca.pem", verify=True)
        return _Client(
            self.endpoint.base_url,
            version="auto",
            timeout=int(self._seconds) or 1,
            tls=tls,
            max_pool_size=self._workers,
        )

    @property
    def client(self) -> _Client:
        if self._client is None:
            raise EngineError(f"the engine at {self.endpoint.url} is not connected")
        return self._client

    async def call(self, method: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """One of the client's methods. Raises `EngineError`. A cancelled call goes on in its thread."""
        return await self._in_thread(functools.partial(method, *arguments, **options))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except APIError as error:
            status = getattr(error.response, "status_code", 0) or 0
            raise EngineError(str(error.explanation or error), status) from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise EngineError(f"the Docker engine at {self.endpoint.url} cannot be reached: {error}") from error

    async def ran_out_of_memory(self, container: str, seconds: float) -> bool:
        """Whether the kernel has killed something for the container's limit in the last `seconds`, or does so before
        the container is removed. The engine remembers its last 256 events. Raises `EngineError`, also when it knows
        neither of a kill nor of the removal."""
        return await self.call(self.client.ran_out_of_memory, container, seconds)

    async def containers(self, label: str) -> list[dict[str, Any]]:
        """All that carry the label, in whatever state. An engine that was killed can list as dead, until it starts the
        next time, what it has removed and no longer knows."""
        listed = await self.call(self.client.containers, all=True, filters={"label": label})
        return [one for one in listed if one["State"] != "dead" or await self._knows(one["Id"])]

    async def _knows(self, container: str) -> bool:
        try:
            await self.call(self.client.inspect_container, container)
        except EngineError as error:
            if error.status != requests.codes.not_found:
                raise
            return False
        return True

    async def remove(self, container: str) -> None:
        """Kill and remove, volumes too; all is gone when it returns. Idempotent. Raises `EngineError`."""
        try:
            await self.call(self.client.remove_container, container, v=True, force=True)
        except EngineError as error:
            if error.status == requests.codes.conflict:  # the engine removes it by itself already
                await self._await_removal(container)
            elif error.status != requests.codes.not_found:
                raise

    async def _await_removal(self, container: str) -> None:
        try:
            await self.call(self.client.wait, container, timeout=self._seconds, condition="removed")
        except EngineError as error:
            if error.status != requests.codes.not_found:
                raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()
