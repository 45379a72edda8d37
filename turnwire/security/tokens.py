"""Bearer tokens: who shows one, and with which role.

A server's file holds digests, never tokens, so that reading it lets nobody in. Nothing here puts a token, or any text
that might be one by mistake, into a message.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path

from turnwire.config import nearest, parse_yaml
from turnwire.errors import ConfigError, Problem, UnauthenticatedError
from turnwire.security.files import Watched
from turnwire.security.roles import Role

SCHEME = "Bearer "
METADATA_KEY = "authorization"

_ROLES = {role.label: role for role in Role}
_FIELDS = ("name", "role", "sha256")

_DIGITS = "64 hexadecimal digits in quotes (without, YAML takes some for numbers)"


@dataclass(frozen=True)
class Holder:
    """Who has a token."""

    name: str
    role: Role


@dataclass(frozen=True)
class _Tokens:
    """One content of the file. `known` are tokens that were shown and are right: only these are remembered."""

    entries: tuple[tuple[bytes, Holder], ...]
    known: dict[str, Holder] = field(default_factory=dict, repr=False)


class TokenTable:
    """The tokens that a server takes: a YAML or JSON file with a list of {name, role, sha256}."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError with all that is wrong with the file."""
        self._file = Watched([path], lambda: _Tokens(tuple(_entries(Path(path)))))

    def holder(self, authorization: str | None) -> Holder:
        """Who shows this header. Raises UnauthenticatedError for none, and for one that is not known."""
        if authorization is None:
            raise UnauthenticatedError(f"this service asks for a token: send metadata `{METADATA_KEY}: {SCHEME}TOKEN`")
        tokens = self._file.get()
        known = tokens.known.get(authorization)
        if known is not None:
            return known
        scheme, token = authorization[: len(SCHEME)], authorization[len(SCHEME) :]
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for expected, holder in tokens.entries:  # all of them: how long it takes tells nothing
            if hmac.compare_digest(expected, digest):
                found = holder
        if found is None or scheme.lower() != SCHEME.lower():
            raise UnauthenticatedError(f"the token is not known to this service (metadata `{METADATA_KEY}`)")
        tokens.known[authorization] = found
        return found


def _entries(path: Path) -> list[tuple[bytes, Holder]]:
    source = f"tokens file {path}"
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"), source)
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}")], source) from error
    except (UnicodeDecodeError, ConfigError):  # these show what they found
        value = None
    if not isinstance(value, list) or not value:
        raise ConfigError(
            [Problem("", f"is no YAML or JSON list of {{name, role, sha256}}, the last {_DIGITS}")], source
        )
    problems: list[Problem] = []
    entries = [_entry(str(place), item, problems) for place, item in enumerate(value)]
    names = [entry[1].name for entry in entries if entry]
    problems += [Problem("name", f"{name!r} is there twice") for name in sorted(set(names)) if names.count(name) > 1]
    digests = {entry[0] for entry in entries if entry}
    if len(digests) < len(names):
        problems.append(Problem("sha256", "two entries have the same token"))
    if problems:
        raise ConfigError(problems, source)
    return [entry for entry in entries if entry]


def _entry(place: str, item: object, problems: list[Problem]) -> tuple[bytes, Holder] | None:
    if not isinstance(item, dict) or set(item) != set(_FIELDS):
        problems.append(Problem(place, f"must have {', '.join(_FIELDS)}, and nothing else"))
        return None
    name, role, digest = (item[key] for key in _FIELDS)
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        problems.append(Problem(f"{place}.name", "must be a text of up to 100 characters"))
        return None
    if not isinstance(role, str) or role not in _ROLES:
        problems.append(Problem(f"{place}.role", f"is no role; {nearest(str(role), list(_ROLES))}"))
        return None
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-fA-F]{64}", digest):
        problems.append(
            Problem(f"{place}.sha256", f"must be {_DIGITS}: the digest of the token, never the token itself")
        )
        return None
    return bytes.fromhex(digest), Holder(name, _ROLES[role])


def read_token(path: str) -> str:
    """A client's token, from its file. Raises ConfigError."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError([Problem("token_file", f"{path} cannot be read: {error.strerror}")], "connection") from error
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise ConfigError([Problem("token_file", f"{path} holds no token: one line of visible ASCII")], "connection")
    return token
