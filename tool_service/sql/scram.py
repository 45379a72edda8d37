"""SCRAM-SHA-256 (RFC 5802, 7677), as PostgreSQL uses it: the client's side, and the verifier that a server stores.

Of the standard library's hmac and pbkdf2: scramp, the library for it, brings a parser of X.509 for channel binding,
which is not used here.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import unicodedata

MECHANISM = "SCRAM-SHA-256"
_ITERATIONS = 4096
_MOST_ITERATIONS = 1_000_000
"""A server that asks for more would keep the service computing."""


def verifier(password: str) -> str:
    """What CREATE ROLE takes in place of a password, so that none is ever in a statement or a server's log."""
    salt = secrets.token_bytes(16)
    client_key, server_key = _keys(password, salt, _ITERATIONS)
    stored_key = hashlib.sha256(client_key).digest()
    return f"{MECHANISM}${_ITERATIONS}:{_text(salt)}${_text(stored_key)}:{_text(server_key)}"


class Client:
    """One log-in: `first`, then `final` with the server's answer, then `check` with its last word.

    Raises ValueError when the server does not do its part, as when it does not know the password.
    """

    def __init__(self, password: str) -> None:
        self._password = unicodedata.normalize("NFKC", password)
        self._nonce = _text(secrets.token_bytes(18))
        self._bare = f"n=,r={self._nonce}"  # PostgreSQL takes the user's name from the start-up message
        self._server_signature = b""

    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        parts = _parts(server_first)
        nonce, iterations = parts["r"], int(parts["i"])
        if not nonce.startswith(self._nonce) or not 0 < iterations <= _MOST_ITERATIONS:
            raise ValueError("the server's SCRAM challenge is not an answer to ours")
        client_key, server_key = _keys(self._password, base64.b64decode(parts["s"]), iterations)
        stored_key = hashlib.sha256(client_key).digest()
        unproved = f"c=biws,r={nonce}"  # biws: base64 of "n,,"
        transcript = f"{self._bare},{server_first.decode()},{unproved}".encode()
        signature = hmac.digest(stored_key, transcript, "sha256")
        proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
        self._server_signature = hmac.digest(server_key, transcript, "sha256")
        return f"{unproved},p={_text(proof)}".encode()

    def check(self, server_final: bytes) -> None:
        if not hmac.compare_digest(base64.b64decode(_parts(server_final).get("v", "")), self._server_signature):
            raise ValueError("the server could not prove that it knows the password")


def _keys(password: str, salt: bytes, iterations: int) -> tuple[bytes, bytes]:
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    return hmac.digest(salted, b"Client Key", "sha256"), hmac.digest(salted, b"Server Key", "sha256")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _parts(message: bytes) -> dict[str, str]:
    """`a=1,b=2` as a mapping."""
    return {part[:1]: part[2:] for part in message.decode().split(",")}
