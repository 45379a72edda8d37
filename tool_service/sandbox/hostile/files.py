# ruff: noqa: E501 - programs are data
"""D: files, in the sandbox and on their way in and out."""

from __future__ import annotations

from tool_service.sandbox.base import Tier
from tool_service.sandbox.hostile.case import DOCKER, ERROR, PROCESS, Case, Fetch, Put, bash, case, py
from tool_service.sandbox.hostile.programs import TRY

CASES: tuple[Case, ...] = (
    case(
        "D3-hard-link",
        "hard links to files of the system",
        py(
            TRY
            + "import os\nfor p in ('/usr/bin/env', '/etc/hostname', '/proc/self/exe'): attempt(p, lambda: os.link(p, 'linked'))",
            hides="DONE",
        ),
    ),
    case(
        "D7-hard-to-remove",
        "closed folders, odd names, 200 levels",
        py(
            "import os\nos.makedirs('locked/in'); open('locked/in/f', 'w').close(); os.chmod('locked/in', 0); os.chmod('locked', 0)\nopen('a\\nb', 'w').close(); open(b'\\xff', 'w').close()\nfor i in range(200): os.mkdir('d'); os.chdir('d')\nprint('made')",
            shows="made",
        ),
    ),
    case(
        "D8-mknod",
        "a device node",
        py("import os, stat; os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(254, 0))", ERROR, shows="not permitted"),
    ),
    case(
        "D9-setuid",
        "a setuid program of its own",
        py(
            "import os, shutil, subprocess\nshutil.copy('/usr/bin/id', 'own'); os.chmod('own', 0o6755)\nprint(subprocess.run(['./own', '-u'], capture_output=True, text=True).stdout == f'{os.getuid()}\\n')",
            shows="True",
        ),
    ),
    case(
        "D9-file-capabilities",
        "a file with capabilities",
        py(
            TRY
            + "import os\nopen('f', 'w').close()\nattempt('set', lambda: os.setxattr('f', 'security.capability', bytes.fromhex('0000000200200000') + bytes(12)))",
            hides="DONE",
        ),
    ),
    case(
        "D10-read-only",
        "writes to the system's and the interpreter's files",
        py(
            "import os\nfor p in ('/usr/x', '/bin/bash', '/etc/passwd', os.__file__, '/x'):\n  try: open(p, 'a'); print('WROTE', p)\n  except OSError as e: print(e.errno)",
            hides="WROTE",
        ),
        also=("D14",),
    ),
    case(
        "D10-kernel-settings",
        "writes to /proc/sys, sysrq, cgroups, its own OOM score",
        py(
            TRY
            + "for p in ('/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sys/net/ipv4/ip_forward', '/proc/sysrq-trigger', '/sys/kernel/uevent_helper', '/sys/fs/cgroup/cgroup.procs', '/proc/self/oom_score_adj', '/proc/self/uid_map', '/proc/self/timerslack_ns'):\n  attempt(p, lambda: open(p, 'w').write('0'))",
            hides="DONE",
        ),
    ),
    case(
        "D12-shared-folders",
        "leaves files in /var/tmp, /run, /home and others",
        py(
            TRY
            + "for p in ('/var/tmp', '/var/lib', '/run', '/home', '/root', '/opt', '/srv', '/mnt', '/'): attempt(p, lambda: open(p + '/left-behind', 'w'))",
            hides="DONE",
        ),
        also=("D10",),
    ),
    case(
        "D15-proc-root",
        "the first process's root, folders, descriptors, environment, memory",
        py(
            "import os\nfor p in ('/proc/1/root', '/proc/1/cwd', '/proc/1/fd/3', '/proc/1/environ', '/proc/1/mem', '/proc/1/maps'):\n  try: open(p, 'rb').read(1); print('OPEN', p)\n  except OSError as e: print(p, e.errno)\n  try: print('LIST', os.listdir(p))\n  except OSError as e: pass",
            hides=("OPEN", "LIST"),
        ),
        also=("D16",),
    ),
    case(
        "D15-host-files",
        "looks for /etc/shadow, /home, /sys and others' processes",
        py(
            "import os\nprint(os.path.exists('/etc/shadow'), os.path.exists('/etc/hostname'), os.path.exists('/sys'), os.path.exists('/home'), len([p for p in os.listdir('/proc') if p.isdigit()]))",
            shows="False False False False 2",
        ),
        tier=Tier.ISOLATED,
        backends=(PROCESS,),
    ),
    case("D15-shadow", "reads /etc/shadow", py("open('/etc/shadow').read()", ERROR)),
    case(
        "D15-machine-files",
        "reads the machine's files",
        py(
            TRY
            + "import os\nfor p in ('/etc/hostname', '/etc/machine-id', '/etc/shadow', '/etc/ssh', '/home', '/var/log', '/var/lib', '/var/run', '/run', '/boot', '/sys', '/proc/kcore', '/proc/kallsyms', '/proc/cmdline', '/proc/modules', '/proc/1/environ', '/proc/1/maps', '/.dockerenv'):\n  attempt(p, lambda: os.listdir(p) if os.path.isdir(p) else open(p, 'rb').read(1))",
            hides="DONE",
        ),
        backends=(PROCESS,),
    ),
    case(
        "D15-by-detours",
        "reads them through links, descriptors and ..",
        py(
            TRY
            + "import os\nos.symlink('/etc/hostname', 'link'); os.symlink('/', 'top')\nroot = os.open('/', os.O_PATH)\nattempt('link', lambda: open('link').read())\nattempt('folder', lambda: open('top/etc/hostname').read())\nattempt('root', lambda: open('/proc/self/root/etc/hostname').read())\nattempt('up', lambda: open('/proc/self/cwd/' + '../' * 20 + 'etc/hostname').read())\nattempt('at', lambda: os.open('etc/hostname', os.O_RDONLY, dir_fd=root))\nattempt('magic', lambda: open(f'/proc/self/fd/{root}/etc/hostname').read())\nattempt('exec', lambda: os.execv('/etc/hostname', ['x']))\nattempt('move', lambda: os.rename('/etc/hostname', 'h'))\nattempt('cut', lambda: os.truncate('/etc/hostname', 0))",
            hides="DONE",
        ),
        backends=(PROCESS,),
    ),
    case(
        "D15-beyond-the-image",
        "reads the machine's files from a container",
        py(
            TRY
            + "import os\nfor p in ('/etc/shadow', '/root', '/proc/kcore', '/proc/keys', '/proc/timer_list', '/proc/1/environ', '/proc/1/maps', '/proc/1/root/etc', '/proc/1/fd', '/sys/kernel', '/sys/devices', '/sys/class/net', '/sys/firmware', '/dev/mem', '/dev/sda', '/dev/vda', '/var/lib/docker', '/var/run/docker.sock', '/proc/self/cwd/../../../../root'):\n  attempt(p, lambda: (os.listdir(p) if os.path.isdir(p) else open(p, 'rb').read(1)) or int('nothing'))",
            hides="DONE",
        ),
        backends=(DOCKER,),
    ),
    case(
        "D20-names-that-collide",
        "file names that collide by case or normal form",
        py("import os\nfor n in ('A', 'a', '\\u00e9', 'e\\u0301'): open(n, 'w').close()\nlen(os.listdir())", shows="4"),
    ),
    case(
        "D1-links-out",
        "links that lead out, then fetches and writes by them",
        py(
            "import os; os.symlink('/etc/passwd', 'l'); os.symlink('/etc', 'd'); os.symlink('l', 'll'); os.symlink('/', 'top')"
        ),
        *(Fetch(path) for path in ("l", "ll", "d/passwd", "top/etc/passwd")),
        *(Put(path, refused=True) for path in ("d/written", "top/workspace/written")),
    ),
    case(
        "D2-links-swapped",
        "a folder that turns into a link out of the workspace and back, all the time",
        py(
            "import os, threading\nos.mkdir('r'); open('r/passwd', 'w').write('inside')\ndef swap():\n  while 1:\n    os.rename('r', 'p'); os.rename('p', 'r'); os.symlink('/etc', 'p'); os.remove('p')\nthreading.Thread(target=swap, daemon=True).start()"
        ),
        *(Fetch("p/passwd", holds=b"inside", or_refused=True),) * 20,
    ),
    case(
        "D4-names-that-are-none",
        "file names with .., from the root, with NUL, far too long",
        *(Put(path, refused=True) for path in ("../x", "/etc/x", "a/../../x", "a\0b", "x" * 5000, "", "..")),
        *(Fetch(path) for path in ("../x", "/etc/passwd", "a/../../etc/passwd", "a\0b", "x" * 5000, "", "..")),
        Put("a/b/c", b"kept"),
        Fetch("a/b/c", holds=b"kept"),
    ),
    case(
        "D6-no-files",
        "a folder, a loop of links and a pipe in the place of a file",
        py(
            "import os\nos.mkdir('folder'); os.symlink('b', 'a'); os.symlink('a', 'b'); os.mkfifo('pipe')\nfor i in range(300): os.mkdir('d'); os.chdir('d')"
        ),
        *(Fetch(path) for path in ("folder", "a", "pipe", "/".join("d" * 300))),
    ),
    case(
        "D18-archives",
        "an archive that leads out of its folder, with devices and links in it",
        py(
            "import io, tarfile\ndef member(name, kind=tarfile.REGTYPE, link=''):\n  i = tarfile.TarInfo(name); i.type = kind; i.linkname = link; i.devmajor = 1; i.devminor = 1; i.size = 1 if kind == tarfile.REGTYPE else 0\n  return i\nb = io.BytesIO(); t = tarfile.open(fileobj=b, mode='w')\nfor i in (member('../../slip'), member('/slip'), member('/etc/slip'), member('up', tarfile.SYMTYPE, '/etc'), member('up/slip'), member('node', tarfile.CHRTYPE)): t.addfile(i, io.BytesIO(b'x'))\nt.close(); b.seek(0)\nfor i in tarfile.open(fileobj=b):\n  if i.name == 'up': os = __import__('os'); os.symlink('/etc', 'up'); continue\n  try: tarfile.open(fileobj=io.BytesIO(b.getvalue())).extract(i, '.', numeric_owner=True, **({'filter': 'fully_trusted'} if hasattr(tarfile, 'fully_trusted_filter') else {})); print('WROTE', i.name)\n  except OSError as error: print(i.name, type(error).__name__)",
            hides="WROTE",
        ),
    ),
    case(
        "D19-files-that-change",
        "a file that grows while it is fetched, and a sparse one",
        py(
            "import threading, time\nopen('sparse', 'wb').truncate(4 << 20)\ndef grow():\n  f = open('grows', 'wb', 0)\n  for i in range(10**6): f.write(bytes(1000)); f.seek(i % 4000 * 1000)\nthreading.Thread(target=grow, daemon=True).start(); time.sleep(.1)"
        ),
        Fetch("sparse"),
        *(Fetch("grows", max_bytes=2 << 20, bounded=True),) * 5,
    ),
    case(
        "D21-scratch-of-the-tool",
        "looks for files of the tool's own to overwrite",
        py(
            "import os\nfound = [n for p in ('.', os.environ.get('TMPDIR', '/tmp')) for n in os.listdir(p)]\nfound",
            shows="[]",
        ),
        bash("ls -A . ${TMPDIR:-/tmp} | grep -v : | tr -d '\\n'; echo none", shows="none"),
        py("1 / 0", ERROR, shows="ZeroDivisionError"),
    ),
    case(
        "D13-leases",
        "leases and watches on files of the machine",
        py(
            TRY
            + "import fcntl, os, sys\nfor p in (os.__file__, sys.executable, '/usr/bin/env'):\n  with open(p) as f: attempt(p, lambda: fcntl.fcntl(f, 1024, fcntl.F_RDLCK))\nattempt('watch', lambda: fcntl.fcntl(os.open('/usr', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE))",
            hides="DONE",
        ),
    ),
    case(
        "D14-modes-and-times-of-the-machine",
        "modes, times, owners and attributes of the machine's files",
        py(
            TRY
            + "import os, sys\nfor p in ('@FILE@', sys.executable, os.__file__, '/usr/bin/env', '/proc/self/exe', '/etc', '/'):\n  os.symlink(p, 'to'); top = os.open('/', os.O_PATH)\n  for path, at in ((p, None), ('to', None), ('/proc/self/root' + p, None), (p[1:] or '.', top)):\n    attempt(path, lambda: os.chmod(path, 0o777, dir_fd=at)); attempt(path, lambda: os.utime(path, (1, 1), dir_fd=at)); attempt(path, lambda: os.chown(path, -1, os.getgid(), dir_fd=at))\n  attempt(p, lambda: os.setxattr(p, 'user.x', b'y')); os.remove('to')\n  try: fd = os.open(p, os.O_RDONLY)\n  except OSError: continue\n  attempt(p, lambda: os.fchmod(fd, 0o777)); attempt(p, lambda: os.utime(fd)); attempt(p, lambda: os.setxattr(fd, 'user.x', b'y'))",
            hides="DONE",
        ),
    ),
    case(
        "D14-modes-and-times-of-its-own",
        "modes and times of its own files, which must work",
        py(
            "import os, subprocess, shutil\nopen('f', 'w').write('#!/bin/sh\\necho ran')\nos.chmod('f', 0o755); os.utime('f', (5, 6)); os.symlink('f', 'l'); os.utime('l', (7, 8), follow_symlinks=False)\nfd = os.open('f', os.O_RDONLY); os.fchmod(fd, 0o700); os.utime(fd, ns=(1, 2)); print(oct(os.stat('f').st_mode), os.stat('f').st_mtime_ns, os.lstat('l').st_mtime)\nos.makedirs('d/e'); here = os.open('d', os.O_RDONLY); os.chmod('e', 0o711, dir_fd=here); os.utime('e', dir_fd=here); shutil.copy2('f', 'd/e/g'); print(oct(os.stat('d/e').st_mode), oct(os.stat('d/e/g').st_mode))\nos.chmod(os.environ['TMPDIR'], 0o700)\nfor bad in ('missing', 'x' * 5000):\n  try: os.chmod(bad, 0)\n  except OSError as e: print(e.errno)\nprint(subprocess.run('touch -d 2001-01-01 n; touch -a n; chmod u+x n; stat -c %Y n; ./f', shell=True, capture_output=True, text=True).stdout)",
            shows=("0o100700 2 8.0", "0o40711 0o100700\n2\n36\n", "978307200\nran"),
        ),
    ),
    case(
        "D6-very-deep",
        "folders in folders, 10,000 deep where there is room, then taken into outputs and left to be removed",
        py(
            "import os, time\nend = time.monotonic() + 5; n = 0\ntry:\n  while n < 10**4 and time.monotonic() < end: os.mkdir('d'); os.chdir('d'); n += 1\nexcept OSError as error: print(error)\nprint('deep', n > 300); os.chdir(os.environ['HOME']); os.makedirs('outputs'); os.rename('d', 'outputs/d')",
            shows="deep True",
        ),
        *(Fetch("/".join(("outputs", *"d" * depth))) for depth in (1, 100, 500)),
        Put("/".join(("outputs", *"d" * 500)), refused=True),
        bash("cd outputs/d/d && pwd", shows="outputs/d/d"),
        py("1", shows="1"),
    ),
    case(
        "D4-names-of-every-kind",
        "names of 255 bytes, that look like options, patterns, commands and escapes",
        py(
            "import os; os.makedirs('outputs')\nfor name in ('a' * 255, '\\u20ac' * 85, '-rf', '*', '$(x)', '\\x1b[31m', ' ', '\\u202e', 'a\\\\b', '\\n\\r\\t'): open('outputs/' + name, 'w').write('x')"
        ),
        *(
            Fetch(f"outputs/{name}", holds=b"x")
            for name in ("a" * 255, "\u20ac" * 85, "-rf", "*", "$(x)", " ", "\u202e", "\n\r\t")
        ),
        *(
            Put(name, refused=True)
            for name in ("outputs/\ud800", "\udc80", "a" * 256, "outputs/-rf/x", "a//b", "./a", "a/")
        ),
    ),
    case(
        "D1-links-in-circles",
        "chains of links, links through themselves, links that come and go while they are followed",
        py(
            "import os, threading\nfor i in range(60): os.symlink(f's{i + 1}', f's{i}')\nos.symlink('.', 'here'); os.symlink('here/' * 40 + 'x', 'deep'); open('a', 'w').write('x')\ndef swap():\n  while 1:\n    try: os.rename('a', 'c'); os.symlink('/etc/passwd', 'a'); os.unlink('a'); os.mkfifo('a'); os.unlink('a'); os.mkdir('a'); os.rmdir('a'); os.rename('c', 'a')\n    except OSError: pass\nthreading.Thread(target=swap, daemon=True).start()"
        ),
        *(Fetch(path) for path in ("s0", "deep", "here/here/nothing")),
        *(Fetch("a", holds=b"x", or_refused=True),) * 20,
        Put("here/here/y", b"1"),
        Fetch("y", holds=b"1"),
    ),
    case(
        "D6-no-files-to-write-to",
        "pipes with and without a reader, folders, closed files in the place of a file that is put",
        py(
            "import os\nos.mkfifo('p'); os.mkfifo('q'); fd = os.open('q', os.O_RDWR); os.mkdir('m', 0); open('r', 'w').close(); os.chmod('r', 0)"
        ),
        *(Put(path, refused=True) for path in ("p", "q", "m", "m/x", "r")),
        *(Fetch(path) for path in ("p", "q", "m", "m/x", "r")),
        py("os.chmod('.', 0o500)"),
        Put("x", refused=True),
        py("os.chmod('.', 0o700)"),
        Put("x", b"1"),
        Fetch("x", holds=b"1"),
    ),
    case(
        "D3-farms",
        "as many hard links to one file as there are, and attributes until there is no room",
        py(
            "import os\nopen('f', 'wb').write(bytes(1000)); n = 0\ntry:\n  while n < 10**5: os.link('f', f'l{n}'); n += 1\nexcept OSError as error: print(error.errno)\nprint(n < 10**5)",
            shows="True",
        ),
        py(
            "n = 0\ntry:\n  while n < 10**6: os.setxattr('f', f'user.{n}', bytes(4000)); n += 1\nexcept OSError as error: print('in band', error.errno)",
            shows="in band",
        ),
        Fetch("l5", holds=bytes(1000), or_refused=True),
    ),
    case(
        "D14-devices-of-the-machine",
        "modes, times and names of /dev/null and the others, which must still work",
        py(
            TRY
            + "import os\nfor p in ('/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom'):\n  for act in (lambda: os.chmod(p, 0), lambda: os.unlink(p), lambda: os.rename(p, '/dev/x'), lambda: os.utime(p), lambda: os.setxattr(p, 'user.x', b'y')): attempt(p, act)\nopen('/dev/null', 'w').write('x'); open('/dev/urandom', 'wb').write(b'x'); print(len(open('/dev/urandom', 'rb').read(9)), open('/dev/zero', 'rb').read(2))",
            shows="9 b'\\x00\\x00'",
            hides="DONE",
        ),
        tier=Tier.ISOLATED,
        backends=(PROCESS,),
    ),
)
