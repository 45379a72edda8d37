"""Files in and out of a trajectory's workspace, for tools that work in it (`python`, `bash`).

In: the context's `files` are written before any call. Out: what a call leaves in the workspace's folder
`outputs`, new or changed, comes back in its observation: images as images, text as text, anything else by name and
size. What a file is, its first bytes say, not its name; both ways are bounded in number and bytes, and go through
paths that cannot leave the workspace.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec

from tool_service.action import Media, ToolObservation
from tool_service.base import BaseTool, ToolConfig, TurnContext
from tool_service.sandbox.base import MIB, FileRefused, Sandbox, TurnResult
from tool_service.tools.outcome import value_of
from turnwire.errors import InvalidRequestError

_LONGEST_PATH = 1024
"""Bytes; the sandbox takes no longer one."""
_DATA_BYTES = 256 * 1024
"""Of texts in one observation's data, which is left out as a whole where it is too long (`limits.data_bytes`)."""
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

Count = Annotated[int, msgspec.Meta(ge=1)]


class WorkspaceConfig(ToolConfig, frozen=True):
    """
    cpu_seconds: CPU time of one call, all its processes together; unset: `sandbox.limits.cpu_seconds`.
    max_input_files, max_input_bytes: files that one trajectory may bring, and their bytes together.
    max_output_files: files of one call that are shown; of further ones their number alone. 0: none is looked for.
    max_output_bytes: of one such file; of a larger one the observation has name and size.
    """

    cpu_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_input_files: Count = 256
    max_input_bytes: Count = 2 * MIB
    max_output_files: Annotated[int, msgspec.Meta(ge=0)] = 8
    max_output_bytes: Count = MIB


class Base64File(msgspec.Struct, forbid_unknown_fields=True):
    """A file that is not text."""

    base64: str


class WorkspaceContext(msgspec.Struct, forbid_unknown_fields=True):
    """What a trajectory brings into its workspace."""

    files: Annotated[
        dict[str, str | Base64File],
        msgspec.Meta(description='By path below the workspace: text, or {"base64": "…"}.'),
    ] = {}


class WorkspaceTool(BaseTool):
    """A tool whose calls run in the workspace."""

    needs_sandbox = True
    modalities = ("text", "image")
    Config = WorkspaceConfig
    Context = WorkspaceContext

    config: WorkspaceConfig

    @classmethod
    def check_context(cls, config: WorkspaceConfig, context: WorkspaceContext) -> None:
        _decoded(cls.name, config, context)

    async def reset(self, context: WorkspaceContext) -> None:
        self._files = _decoded(self.name, self.config, context)

    async def prepare_sandbox(self, sandbox: Sandbox) -> None:
        for path, data in self._files.items():
            try:
                await sandbox.put_file(path, data)
            except FileRefused as error:
                raise InvalidRequestError(f"context of tool {self.name!r}: files: {error}") from error

    async def with_outputs(
        self, observation: ToolObservation, result: TurnResult, turn: TurnContext
    ) -> ToolObservation:
        """The observation, and behind its text what the call left in `outputs`."""
        found = _listed(value_of(result).get("files")) if self.config.max_output_files else []
        if not found or turn.sandbox is None:
            return observation
        parts: list[str | Media] = [str(observation.content)] if observation.content else []
        told: list[dict[str, Any]] = []
        room = _DATA_BYTES
        for path, size in found[: self.config.max_output_files]:
            try:
                data = await turn.sandbox.get_file(path, self.config.max_output_bytes)
            except FileRefused:  # too large, or replaced by something that is no file
                _append(parts, f"[{path}: {size} bytes, not shown]")
                told.append({"path": path, "bytes": size})
                continue
            told.append({"path": path, "bytes": len(data)})
            media_type, text = _kind_of(data)
            if media_type:
                _append(parts, f"[{path}]")
                parts.append(Media(data, media_type))
            elif text is not None:
                _append(parts, f"[{path}]\n{text.rstrip()}")
                room -= len(data)
                if room >= 0:
                    told[-1]["text"] = text
            else:
                _append(parts, f"[{path}: {len(data)} bytes]")
        if len(found) > len(told):
            _append(parts, f"[{len(found) - len(told)} more files in outputs]")
        observation.content = parts
        observation.data = {**(observation.data or {}), "files": told}
        return observation


def _append(parts: list[str | Media], line: str) -> None:
    """On a line of its own."""
    parts.append(f"\n{line}" if parts else line)


def _decoded(tool: str, config: WorkspaceConfig, context: WorkspaceContext) -> dict[str, bytes]:
    """A context's files as bytes. Raises InvalidRequestError for a path or content that cannot be."""
    if len(context.files) > config.max_input_files:
        raise InvalidRequestError(
            f"context of tool {tool!r}: {len(context.files)} files; at most {config.max_input_files} are taken "
            f"(tools.{tool}.max_input_files)"
        )
    files = {}
    for path, content in context.files.items():
        try:
            _check_path(path, context.files)
            files[path] = (
                content.encode() if isinstance(content, str) else base64.b64decode(content.base64, validate=True)
            )
        except (ValueError, binascii.Error) as error:
            raise InvalidRequestError(f"context of tool {tool!r}: file {path[:200]!r}: {error}") from error
    size = sum(map(len, files.values()))
    if size > config.max_input_bytes:
        raise InvalidRequestError(
            f"context of tool {tool!r}: files of {size} bytes; at most {config.max_input_bytes} are taken "
            f"(tools.{tool}.max_input_bytes)"
        )
    return files


def _check_path(path: str, others: Iterable[str]) -> None:
    """Raise ValueError for one that cannot be, or could lead out of the workspace, where the sandbox checks again."""
    if len(path.encode()) > _LONGEST_PATH:
        raise ValueError(f"the path has more than {_LONGEST_PATH} bytes")
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("the path must be relative, without NUL, '.', '..' and empty parts")
    if above := {str(folder) for folder in PurePosixPath(path).parents}.intersection(others):
        raise ValueError(f"{above.pop()!r} is a file as well")


def _listed(files: Any) -> list[tuple[str, int]]:
    """What the sandbox says it has, as far as it makes sense: it may say anything."""
    if not isinstance(files, list):
        return []
    return [
        (entry[0], entry[1])
        for entry in files
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], int)
    ]


def _kind_of(data: bytes) -> tuple[str, str | None]:
    """An image's media type, or the text; neither for anything else."""
    for magic, media_type in _MAGIC:
        if data.startswith(magic):
            return media_type, None
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp", None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "", None
    return "", None if "\0" in text else text
