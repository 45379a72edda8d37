"""The file system that sandboxes see, and the steps by which a process gives up everything else.

The zygote builds the root once, in its own mount namespace, and pivots into it; each sandbox copies that small mount
table and adds a /proc and a workspace of its own. Nothing of the host is in it but the folders named here, read-only:
/usr, the linker's paths, the running interpreter, and what the configuration adds.
"""

import os
import socket
import sys
from collections.abc import Sequence

from . import landlock, linux, network

WORKSPACE = "/workspace"
TEMPORARY = "/tmp"  # noqa: S108 - of the sandbox
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the sandbox
OWN_FOLDERS = (WORKSPACE, TEMPORARY, SHARED_MEMORY, "/dev", "/proc")
"""Where nothing of the host can be shown."""
HOSTNAME = "sandbox"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC_SHOWN = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts")
_ETC_WRITTEN = {
    "passwd": "root:x:0:0::/:/usr/sbin/nologin\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICES = tuple(f"/dev/{name}" for name in _DEVICES)
WALLS = landlock.Walls(("/",), (WORKSPACE, TEMPORARY, SHARED_MEMORY), ("/dev",), alone=False)
"""Of a sandbox with a root and namespaces of its own."""
_ETC_HARMLESS = (
    *("ld.so.preload", "localtime", "timezone", "nsswitch.conf", "host.conf", "gai.conf", "protocols", "services"),
    *("mime.types", "magic", "inputrc", "ssl/openssl.cnf", "ssl/certs", "debian_version", "os-release"),
    *("bash.bashrc", "profile", "gitconfig", "perl", "python3", *(f"python3.{minor}" for minor in range(9, 20))),
)
"""What libraries read where it is there, and fail over if they see it and may not."""
_PROC_HARMLESS = ("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "filesystems")
_DEV_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


def interpreter_paths() -> list[str]:
    """What this interpreter needs outside of the system's folders: its prefixes, binary and shared libraries."""
    paths = [sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                paths.append(fields[5])
    shown: list[str] = []
    for path in paths:
        if path != "/" and not _is_below(path, (*_SYSTEM, *shown)) and os.path.exists(path):
            shown.append(path)
    return shown


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def readable_paths(extra_paths: Sequence[str]) -> tuple[str, ...]:
    """What a sandbox without a root of its own may read and execute of the machine's files; of /proc the machine's
    figures, since Landlock cannot tell the processes of a sandbox from others."""
    named = (*(f"/etc/{name}" for name in _ETC_HARMLESS), *(f"/proc/{name}" for name in _PROC_HARMLESS))
    shown: list[str] = []
    for path in map(os.path.realpath, (*_SYSTEM, *_ETC_SHOWN, *named, *interpreter_paths(), *extra_paths)):
        if os.path.exists(path) and not _is_below(path, shown):
            shown.append(path)
    return tuple(shown)


def _bind_read_only(source: str, root: str) -> None:
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        with open(target, "xb"):
            pass
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
    linux.mount_setattr(target, linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)


def build_root(extra_paths: Sequence[str]) -> None:
    """Make the root in this process's mount namespace, which must be its own, and pivot into it."""
    os.umask(0o022)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    root = TEMPORARY  # hidden from here on by the new root; the host's own /tmp is untouched, in another namespace
    linux.mount("turnwire", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    for path in _SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _bind_read_only(path, root)
    os.mkdir(root + "/etc", 0o755)
    for name, text in _ETC_WRITTEN.items():
        with open(f"{root}/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
    for path in (*_ETC_SHOWN, *interpreter_paths(), *extra_paths):
        if os.path.exists(path) and not os.path.exists(root + path):
            _bind_read_only(path, root)
    os.makedirs(root + SHARED_MEMORY, 0o755)
    for name in _DEVICES:
        with open(f"{root}/dev/{name}", "xb"):
            pass
        linux.mount(f"/dev/{name}", f"{root}/dev/{name}", None, linux.MS_BIND)
        # Read-only as a file: whoever may write to a device may set its times, and these are the host's.
        linux.mount_setattr(
            f"{root}/dev/{name}", linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NOEXEC
        )
    for name, target in _DEV_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    for folder in ("/proc", TEMPORARY, WORKSPACE, "/old"):
        os.mkdir(root + folder, 0o755)
    linux.mount("proc", root + "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    os.chdir(root)
    linux.pivot_root(".", "old")
    os.chdir("/")
    linux.umount_lazily("/old")
    os.rmdir("/old")
    # The root itself alone becomes read-only: a recursive change would reach the device nodes.
    linux.mount(
        "none", "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    )


def enter_namespaces() -> None:
    """All namespaces but pid (the caller was forked into one) and user (see `become`)."""
    linux.unshare(
        linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    )
    socket.sethostname(HOSTNAME)
    linux.loopback_up()
    network.restrict()


def mount_private(uid: int, gid: int, workspace_bytes: int, workspace_inodes: int) -> None:
    """A /proc of this pid namespace that shows processes only, and one capped tmpfs behind the writable folders."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", "/proc", "proc", flags, "subset=pid")
    owner = f"uid={uid},gid={gid}"
    caps = f"size={workspace_bytes},nr_inodes={workspace_inodes + 4},mode=755"  # 4: the folders made here
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("workspace", WORKSPACE, "tmpfs", flags, f"{caps},{owner}")
    for name, target in (("tmp", TEMPORARY), ("shm", SHARED_MEMORY), ("work", WORKSPACE)):
        folder = f"{WORKSPACE}/{name}"
        os.mkdir(folder, 0o700)
        os.chown(folder, uid, gid)
        linux.mount(folder, target, None, linux.MS_BIND)  # the last one hides the top folder
    os.chdir(WORKSPACE)


def become(uid: int, gid: int, own_uid: bool, user_namespace: bool) -> None:
    """Give up every right. `own_uid`: change to a uid of this sandbox's own (needs root). `user_namespace`: enter one
    that maps nothing but the present uid, so that process counts are this sandbox's own."""
    if own_uid:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if user_namespace:
        linux.unshare(linux.CLONE_NEWUSER)
        map_identity(uid, gid)
    linux.drop_capabilities()
    linux.no_new_privileges()
    linux.set_dumpable(False)
    linux.die_with_parent()


def map_identity(uid: int, gid: int) -> None:
    """Map one uid and gid to themselves in the user namespace just entered."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
