"""`python -m turnwire.health HOST:PORT`: ask a service how it is, for the health checks of containers.

Exits with 0 if it serves, with 1 if not; stderr says why. TLS as for every client: TURNWIRE_CA, TURNWIRE_CERTIFICATE,
TURNWIRE_KEY and TURNWIRE_SERVER_NAME. No token is needed. It loads nothing but gRPC, for it is run again and again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from turnwire.errors import ConfigError
from turnwire.security.config import PLAINTEXT, ConnectionSecurity
from turnwire.security.tls import channel_credentials

TIMEOUT_SECONDS = 3.0


def security() -> ConnectionSecurity:
    """What the environment says. Raises ConfigError or ValueError where it cannot be used."""
    names = {"ca": "CA", "certificate": "CERTIFICATE", "key": "KEY", "server_name": "SERVER_NAME"}
    return ConnectionSecurity(**{field: os.environ.get(f"TURNWIRE_{name}") or None for field, name in names.items()})


def ask(target: str, timeout: float, how: ConnectionSecurity = PLAINTEXT) -> str:
    """The state as grpc.health.v1 names it. Raises grpc.RpcError where nothing answers in time, and ConfigError."""
    if how.ca is None:
        channel = grpc.insecure_channel(target)
    else:
        name = [("grpc.ssl_target_name_override", how.server_name)] if how.server_name else []
        channel = grpc.secure_channel(target, channel_credentials(how), options=name)
    with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m turnwire.health", description=__doc__.partition("\n")[0])
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--alive", action="store_true", help="any answer will do, NOT_SERVING too")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS")
    options = parser.parse_args(arguments)
    try:
        state = ask(options.target, options.timeout, security())
    except grpc.RpcError as error:
        sys.stderr.write(f"{options.target}: {error.code().name}: {error.details()}\n")
        return 1
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"{options.target}: {error}\n")
        return 1
    if state == "SERVING" or options.alive:
        return 0
    sys.stderr.write(f"{options.target}: {state}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
