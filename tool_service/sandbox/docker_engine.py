"""Requests to a Docker engine: the SDK's calls, in a few threads, with errors of one kind."""

import asyncio
import functools
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


class EngineError(SandboxUnavailable):
    """The engine refused a request, or could not be reached. `status`: of HTTP, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Client(docker.APIClient):
    """Asks nothing of the environment: its proxies are for the internet, and so is its bundle of certificates, which
    would come before the engine's own. A property, since the first request is sent while the client is being made."""

    trust_env = property(lambda self: False, lambda self, value: None)


class Engine:
    """One engine. `creations`: how many containers are made at once; `seconds`: for one request."""

    def __init__(self, endpoint: Endpoint, creations: int, seconds: float) -> None:
        self.endpoint = endpoint
        self._seconds = seconds
        self._workers = creations + _THREADS_BESIDE_CREATIONS
        self._threads = ThreadPoolExecutor(self._workers, "docker")
        self._client: docker.APIClient | None = None

    async def connect(self) -> None:
        """Raises `EngineError` when nobody answers."""
        self._client = await self._in_thread(self._new_client)

    def _new_client(self) -> docker.APIClient:
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
    def client(self) -> docker.APIClient:
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
