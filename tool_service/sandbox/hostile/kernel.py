# ruff: noqa: E501 - programs are data
"""E: privileges, and what the kernel must refuse."""

from __future__ import annotations

from tool_service.sandbox.base import Tier
from tool_service.sandbox.hostile.case import ERROR, OK, PROCESS, SIGNALED, TIMEOUT, Case, case, py
from tool_service.sandbox.hostile.programs import CALLS, MACHINE_CODE, SYSCALL, TRY
from tool_service.sandbox.inside import linux

_OF_X86 = (
    case(
        "E6-int80",
        "a 32-bit system call",
        py(MACHINE_CODE + r"run(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')", SIGNALED, signal=31),
        py("1", shows="1"),
    ),
    case(
        "E6-x32",
        "an x32 system call number",
        py(
            MACHINE_CODE + r"print('MADE' if run(b'\xb8\x27\x00\x00\x40\x0f\x05\xc3') > 0 else 'refused')",
            OK,
            SIGNALED,
            hides="MADE",
        ),
    ),
)

CASES: tuple[Case, ...] = (
    case(
        "E1-unshare",
        "new namespaces",
        py(
            SYSCALL + "print(libc.unshare(0x10000000), libc.unshare(0x20000), os.strerror(ctypes.get_errno()))",
            shows="-1 -1 Operation not permitted",
        ),
    ),
    case(
        "E1-by-command",
        "unshare, mount, nsenter and chroot by command",
        py(
            "import subprocess\nprint([subprocess.run('PATH=$PATH:/usr/sbin; ' + c, shell=True, capture_output=True).returncode != 0 for c in ('unshare -r true', 'unshare -Urm true', 'mount --bind /usr /tmp', 'nsenter -t 1 -a true', 'chroot / true')])",
            shows="[True, True, True, True, True]",
        ),
    ),
    case(
        "E2-mount",
        "mount, umount and the calls of the new mount interface",
        py(
            SYSCALL
            + "print(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/proc', 2), call(428, -100, b'/', 0), call(430, b'tmpfs', 0), call(442, -100, b'/', 0, 0, 0))",
            shows="-1 -1 (-1, 'Operation not permitted') (-1, 'Operation not permitted') (-1, 'Operation not permitted')",
        ),
    ),
    case(
        "E3-setns",
        "another namespace",
        py(
            SYSCALL + "print(libc.setns(os.open('/proc/self/ns/net', 0), 0), os.strerror(ctypes.get_errno()))",
            shows="-1 Operation not permitted",
        ),
    ),
    case("E4-chroot", "chroot", py("import os; os.chroot('/tmp')", ERROR, shows="not permitted")),
    case(
        "E4-clone-new",
        "new namespaces by clone and clone3",
        py(
            SYSCALL
            + "print(call(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0), call(435, 0, 0))",
            shows="(-1, 'Operation not permitted') (-1, 'Function not implemented')",
        ),
    ),
    case(
        "E4-file-handles",
        "files by handle, and the machine's quotas",
        py(
            CALLS
            + "print(call(303, 264, -100, b'/usr', 0, 0, 0), call(304, 265, -100, 0, 0), call(300, 262, 0, 0), call(179, 60, 0, 0, 0, 0))",
            shows="EPERM EPERM EPERM EPERM",
        ),
    ),
    *(_OF_X86 if linux.MACHINE == "x86_64" else ()),
    case(
        "E7-unknown",
        "system calls that are unknown or new",
        py(
            SYSCALL + "print(call(999), call(470))",
            shows="(-1, 'Function not implemented') (-1, 'Function not implemented')",
        ),
    ),
    case(
        "E7-late-calls",
        "io_uring, pidfd_getfd and other late system calls",
        py(SYSCALL + "print([call(n, 0, 0, 0, 0)[0] for n in (425, 426, 447, 438)])", shows="[-1, -1, -1, -1]"),
    ),
    case(
        "E7-doors-of-the-kernel",
        "bpf, perf, userfaultfd, io_uring, kexec, modules, syslog, reboot",
        py(
            CALLS
            + "print(call(321, 280, 0, 0, 0), call(298, 241, 0, 0, -1, -1, 0), call(323, 282, 0), call(425, 425, 1, 0), call(246, 104, 0, 0, 0, 0), call(175, 105, 0, 0, b''), call(103, 116, 2, 0, 0), call(169, 142, 0, 0, 0))",
            shows="EPERM EPERM EPERM EPERM EPERM EPERM EPERM EPERM",
        ),
    ),
    case(
        "E8-sockets",
        "netlink, packet, vsock, alg, kcm, bluetooth, tipc sockets",
        py(
            "import socket\nfor f in (16, 17, 38, 40, 41, 31, 30):\n  for t in (1, 2, 3, 5):\n    try: socket.socket(f, t); print('MADE', f, t)\n    except OSError: pass\nprint('done')",
            shows="done",
            hides="MADE",
        ),
    ),
    case("E8-raw", "a raw socket", py("import socket\nfor t in (3,):\n  socket.socket(2, t, 1)", ERROR)),
    case(
        "E8-protocols",
        "raw, SCTP, UDP-Lite, DCCP and ICMP sockets",
        py(
            "import socket\nfor a in ((2, 3, 1), (2, 1, 132), (2, 5, 132), (2, 2, 136), (2, 2, 1), (2, 6, 33), (10, 3, 58), (2, 10, 3)):\n  try: socket.socket(*a); print('MADE', a)\n  except OSError: pass\nprint('done')",
            shows="done",
            hides="MADE",
        ),
    ),
    case(
        "E10-abstract-sockets",
        "sockets of the display, dbus, docker and containerd",
        py(
            TRY
            + "import socket\ndef reach(name): socket.socket(socket.AF_UNIX).connect(name)\nfor n in ('\\0/tmp/.X11-unix/X0', '\\0/tmp/dbus', '/run/dbus/system_bus_socket', '/var/run/docker.sock', '/run/containerd/containerd.sock'): attempt(n, lambda: reach(n))",
            hides="DONE",
        ),
        also=("E9",),
    ),
    case("E13-setuid", "setuid(0)", py("import os; os.setuid(0)", ERROR)),
    case(
        "E13-setuid-programs",
        "su, mount, ping, passwd and newgrp",
        py(
            "import os, subprocess\nfor c in (['su', '-c', 'id -u'], ['mount'], ['ping', '-c1', '127.0.0.1'], ['passwd', '-S'], ['newgrp']):\n  try: r = subprocess.run(c, capture_output=True, timeout=3, stdin=subprocess.DEVNULL); print(c[0], r.stdout == b'0\\n')\n  except (OSError, subprocess.TimeoutExpired): pass\nprint(open('/proc/self/status').read().count('NoNewPrivs:\\t1'))",
            OK,
            TIMEOUT,
            shows="1",
            hides="True",
        ),
    ),
    case(
        "E14-process-settings",
        "secure bits, memory map, speculation, personality",
        py(
            CALLS
            + "print(call(157, 167, 28, 1), call(157, 167, 35, 1), call(157, 167, 53, 0, 0), call(157, 167, 67, 1), call(135, 92, 0x0040000), call(135, 92, 0x0400000))",
            shows="EPERM EPERM EPERM EPERM EPERM EPERM",
        ),
    ),
    case(
        "E15-devices",
        "device nodes of the machine",
        py(
            "import os\nprint([d for d in ('mem', 'kmsg', 'fuse', 'kvm', 'vda', 'tty') if os.path.exists('/dev/' + d)])",
            shows="[]",
        ),
        tier=Tier.ISOLATED,
        backends=(PROCESS,),
    ),
    case(
        "E16-clock",
        "sets the clock and the host name",
        py("import time; time.clock_settime(0, 1)", ERROR, shows="not permitted"),
        py("import socket; socket.sethostname('x')", ERROR),
    ),
    case(
        "E16-machine",
        "settimeofday, adjtimex, domain name, accounting, swap",
        py(
            CALLS
            + "print(call(164, 170, 0, 0), call(305, 266, 0, 0), call(159, 171, 0), call(171, 162, b'x', 1), call(163, 89, b'f'), call(167, 224, b'f', 0))",
            shows="EPERM EPERM EPERM EPERM EPERM EPERM",
        ),
    ),
    case(
        "E20-no-capabilities",
        "looks for capabilities and uid 0",
        py(
            "import os\nprint({l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm', 'CapAmb', 'CapInh'))}, os.getuid() != 0)",
            shows="{'0000000000000000'} True",
        ),
    ),
    case(
        "E12-its-own-binary",
        "writes to the binary that runs it, and leaves by a folder left open",
        py(
            TRY
            + "import os, sys\nfor p in ('/proc/self/exe', '/proc/1/exe', sys.executable or '/usr/bin/python3'): attempt(p, lambda: open(p, 'r+b'))\nfor fd in os.listdir('/proc/self/fd'):\n  try:\n    if os.readlink(f'/proc/self/fd/{fd}').startswith(('/proc/self/fd', f'/proc/{os.getpid()}/fd')): continue\n    os.chdir(f'/proc/self/fd/{fd}'); print('DONE', fd)\n  except OSError: pass",
            hides="DONE",
        ),
    ),
    case(
        "E18-sockets-of-others",
        "connects to a socket of this machine by its abstract name, to be handed a descriptor",
        py(
            TRY
            + "import socket\nattempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect('\\0@ABSTRACT@'))\nattempt('datagram', lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '\\0@ABSTRACT@'))",
            hides="DONE",
        ),
        also=("E10",),
    ),
    case(
        "E19-mounts",
        "reads the paths of its mounts",
        py("try: print(open('/proc/self/mountinfo').read())\nexcept OSError as error: print(error)", hides="@FOLDER@"),
    ),
    case(
        "E7-late-doors",
        "memfd_secret, process_madvise, kcmp, fanotify, new mount calls, calls of 2024 and later",
        py(
            CALLS
            + "print({call(n, n, 0, 0, 0, 0, 0, 0) for n in (425, 428, 430, 438, 440, 442, 443, 447, 448)})\nprint({call(n, n, 0, 0, 0, 0, 0, 0) for n in (435, 450, 451, *range(454, 462), *range(463, 472), 999, 0x3fffffff)})",
            shows="{'EPERM'}\n{'ENOSYS'}\n",
        ),
    ),
    case(
        "E8-families-without-a-name",
        "MPTCP, XDP, SMC, QRTR, RDS, NFC and phonet sockets, and options that need rights",
        py(
            TRY
            + "import socket\nfor a in ((2, 1, 262), (44, 3, 0), (43, 1, 0), (42, 2, 0), (21, 5, 0), (39, 5, 0), (35, 2, 0), (9, 5, 0), (3, 5, 0)): attempt(a, lambda: socket.socket(*a))\npair = socket.socketpair()[0]\nfor option in (32, 33, 36, 50): attempt(option, lambda: pair.setsockopt(1, option, 1 << 20))",
            hides="DONE",
        ),
    ),
    case(
        "E14-others-settings",
        "limits, priorities and schedules of its supervisor and of all of its user",
        py(
            TRY
            + "import os, resource\nfor pid in (1, os.getppid()):\n  for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS): attempt(kind, lambda: resource.prlimit(pid, kind, (3, 3)))\n  attempt('policy', lambda: os.sched_setscheduler(pid, 5, os.sched_param(0)))\n  attempt('priority', lambda: os.setpriority(0, pid, 19))\nattempt('group', lambda: os.setpriority(1, 0, 19)); attempt('user', lambda: os.setpriority(2, 0, 19)); attempt('raise', lambda: resource.setrlimit(resource.RLIMIT_NPROC, (10**5, 10**5)))",
            hides="DONE",
        ),
        py("import time; time.sleep(.2); print('lives')", shows="lives"),
    ),
    case(
        "E14-own-files-of-proc",
        "its OOM score, dump filter, referenced bits, login user, groups and memory, by /proc",
        py(
            TRY
            + "import os\nfor name in ('oom_score_adj', 'oom_adj', 'coredump_filter', 'clear_refs', 'loginuid', 'setgroups', 'attr/current', 'autogroup', 'mem', 'task/%d/comm' % os.getpid()): attempt(name, lambda: os.write(os.open('/proc/self/' + name, os.O_WRONLY), b'0'))",
            hides="DONE",
        ),
    ),
    case(
        "E14-a-filter-of-its-own",
        "a seccomp filter that lets everything pass, on top of the one that is there",
        py(
            CALLS
            + "import struct\np = ctypes.create_string_buffer(struct.pack('=HBBI', 6, 0, 0, 0x7FFF0000)); libc.prctl(38, 1, 0, 0, 0)\nprint(libc.prctl(22, 2, ctypes.create_string_buffer(struct.pack('=H6xQ', 1, ctypes.addressof(p)))))\nprint(call(321, 280, 0, 0, 0), call(165, 40, 0, 0, 0, 0, 0), call(435, 435, 0, 0))",
            shows="0\nEPERM EPERM ENOSYS\n",
        ),
    ),
    case(
        "E7-wrong-pointers",
        "changes modes and times of files at addresses and descriptors that are none",
        py(
            CALLS
            + "long = ctypes.c_ulong; open('f', 'w').close()\nfor name, times in ((long(1 << 63), 0), (long(2 ** 64 - 1), 0), (long(8), 0), (b'f', long(2 ** 64 - 8)), (b'f', long(8))): print(call(280, 88, -100, name, times, 0))\nprint(call(268, 53, -100, long(1 << 63), 0), call(268, 53, 77, b'f', 0), call(91, 52, 77, 0))",
            shows="EFAULT\n" * 5 + "EFAULT EBADF EBADF",
        ),
        py("1", shows="1"),
    ),
    case(
        "E4-the-folder-above",
        "closes the folder that its workspace is in",
        py(
            TRY
            + "import os, time\nfor path in (os.path.dirname(os.getcwd()), os.path.dirname(os.environ['TMPDIR'])): attempt('close', lambda: os.chmod(path, 0))\nend = time.monotonic() + .3\nwhile time.monotonic() < end: pass",
            hides="DONE",
        ),
        py("open('f', 'w').write('x')", shows="1"),
    ),
    case(
        "E7-uncounted-memory",
        "sets of rules of Landlock, and events of inotify: memory of the kernel's that no limit counts",
        py(
            CALLS
            + "import struct\nprint(call(444, 444, struct.pack('QQQ', 0, 3, 0), ctypes.c_size_t(24), 0), call(294, 26, 0))",
            shows="EPERM EPERM",
        ),
    ),
    case(
        "E2-large-pages",
        "huge pages, locked memory, and a mapping that grows down",
        py(
            CALLS
            + "libc.mmap.restype = ctypes.c_void_p; none = ctypes.c_void_p(-1).value\nprint(libc.mmap(None, ctypes.c_size_t(1 << 21), 3, 0x40022, -1, ctypes.c_long(0)) == none, libc.mlockall(3))",
            shows="True -1",
        ),
        py("1", shows="1"),
    ),
)
