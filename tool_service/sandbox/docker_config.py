"""Settings of the docker backend, and where its engine is."""

import os
import ssl
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from tool_service.sandbox.base import SandboxUnavailable
from tool_service.sandbox.uids import UID_BASE, UID_BLOCKS

DEFAULT_IMAGE = "turnwire/sandbox-python:1"
_DEFAULT_HOST = "unix:///var/run/docker.sock"


class DockerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the docker backend."""

    image: str = DEFAULT_IMAGE
    """What sandboxes are made of: any image with Python 3.11 or later (sandbox_images/ has some)."""
    pull: Literal["missing", "never"] = "never"
    """`missing`: fetch the image at start when the engine does not have it."""
    host: str = ""
    """The engine: unix:///path, tcp://host:port. Empty: $DOCKER_HOST, or /var/run/docker.sock."""
    tls_folder: str = ""
    """Folder of ca.pem, cert.pem and key.pem for a tcp host. Empty: $DOCKER_CERT_PATH when $DOCKER_TLS_VERIFY is set,
    else no TLS."""
    allow_plaintext_engine: bool = False
    """Whether a tcp host without TLS is accepted: whoever reaches such an engine is root on its machine."""
    runtime: str = ""
    """The engine's runtime, as `runsc`. Empty: the engine's default."""
    accept_runtime_version: str = ""
    """The exact version of a runc that is too old to hold known escapes, where you know that your distribution has
    repaired it."""
    cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Processors that one sandbox may use at a time."""
    read_only_paths: tuple[str, ...] = ()
    """Files and folders of the engine's host that every sandbox shows at the same path, read-only."""
    parallel_creations: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Containers that are made at once."""
    control_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """How long the engine may take over one request before it counts as unreachable."""
    uid_base: Annotated[int, msgspec.Meta(ge=10_000, le=2_000_000_000)] = UID_BASE
    """First of the uids that sandboxes get. No account of the engine's host may have one of them."""
    uid_blocks: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = UID_BLOCKS
    """Blocks of 4,096 uids from `uid_base` on. Each service holds one block."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where the engine listens."""

    url: str
    """For people."""
    unix_path: str = ""
    host: str = ""
    port: int = 0
    tls_folder: str = ""

    @property
    def base_url(self) -> str:
        """As the docker SDK wants it."""
        if self.unix_path:
            return f"http+unix://{self.unix_path}"
        return f"{'https' if self.tls_folder else 'http'}://{self.host}:{self.port}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Both sides show certificates."""
        if not self.tls_folder:
            return None
        context = ssl.create_default_context(cafile=f"{self.tls_folder}/ca.pem")
        context.load_cert_chain(f"{self.tls_folder}/cert.pem", f"{self.tls_folder}/key.pem")
        return context


def endpoint_of(config: DockerConfig) -> Endpoint:
    """Raises `SandboxUnavailable` for an address that is none, or that is not safe to use."""
    url = config.host or os.environ.get("DOCKER_HOST", "") or _DEFAULT_HOST
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return Endpoint(url, unix_path=parts.path)
    if parts.scheme != "tcp" or not parts.hostname:
        raise SandboxUnavailable(
            f"sandbox.docker.host is {url!r}; it must be unix:///path or tcp://host:port (for an engine behind ssh, "
            "forward its socket and name that)"
        )
    folder = config.tls_folder
    if not folder and os.environ.get("DOCKER_TLS_VERIFY"):
        folder = os.environ.get("DOCKER_CERT_PATH") or os.path.expanduser("~/.docker")
    if not folder and not config.allow_plaintext_engine:
        raise SandboxUnavailable(
            f"the engine at {url} would be used without TLS, and whoever can reach it is root on its machine: set "
            "sandbox.docker.tls_folder, or accept it with sandbox.docker.allow_plaintext_engine: true"
        )
    missing = [name for name in ("ca.pem", "cert.pem", "key.pem") if folder and not os.path.isfile(f"{folder}/{name}")]
    if missing:
        raise SandboxUnavailable(f"{folder} (sandbox.docker.tls_folder) lacks {', '.join(missing)}")
    return Endpoint(url, host=parts.hostname, port=parts.port or (2376 if folder else 2375), tls_folder=folder)
