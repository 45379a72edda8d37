"""Files in and out of a workspace, by the supervisor: it sees what the sandbox sees, and still follows no link out."""

import os
import stat

from . import linux

_PATH_BYTES = 1024


class Refused(Exception):  # noqa: N818 - says what is the case
    """Why a file was not written or read, for the caller."""


class Folder:
    """The workspace. `file_bytes` caps one file."""

    def __init__(self, path: str, file_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file_bytes = file_bytes

    def put(self, path: str, data: bytes) -> None:
        """Write `data`, making folders. A link that stays inside is followed, one that leads out is refused."""
        if len(data) > self._file_bytes:
            raise Refused(f"{len(data)} bytes is more than the {self._file_bytes} that a file may have")
        folders, name = os.path.split(_checked(path))
        try:
            self._make_folders(folders)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
            fd = linux.open_beneath(self._fd, os.path.join(folders, name), flags, 0o644)
            with open(fd, "wb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise Refused("not a regular file")
                file.truncate(0)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            raise Refused(_text(error)) from error

    def _make_folders(self, folders: str) -> None:
        done = ""
        for part in folders.split("/") if folders else ():
            parent = linux.open_beneath(self._fd, done or ".", os.O_PATH | os.O_DIRECTORY)
            try:
                os.mkdir(part, 0o755, dir_fd=parent)
            except FileExistsError:
                pass
            finally:
                os.close(parent)
            done = os.path.join(done, part)

    def get(self, path: str, max_bytes: int) -> bytes:
        """The content of a regular file of at most `max_bytes`, judged by what is read and not by what stat says."""
        try:
            fd = linux.open_beneath(self._fd, _checked(path), os.O_RDONLY | os.O_NONBLOCK)
            with open(fd, "rb", buffering=0) as file:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise Refused("not a regular file")
                if info.st_size > max_bytes:
                    raise Refused(f"{info.st_size} bytes is more than {max_bytes}")
                data = bytearray()
                while len(data) <= max_bytes:
                    part = file.read(min(1 << 20, max_bytes + 1 - len(data)))
                    if not part:
                        return bytes(data)
                    data += part
        except OSError as error:
            raise Refused(_text(error)) from error
        raise Refused(f"it has more than {max_bytes} bytes")


def _checked(path: str) -> str:
    """The path if it is relative, plain and short."""
    parts = path.split("/")
    try:
        length = len(path.encode())
    except UnicodeError as error:
        raise Refused("the path is not valid text") from error
    if not path or "\0" in path or length > _PATH_BYTES or any(part in ("", ".", "..") for part in parts):
        raise Refused(
            "a path must be relative, below the workspace, without '.', '..' or empty parts, at most 1024 bytes"
        )
    return path


def _text(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
