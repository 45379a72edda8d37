# ruff: noqa: E501 - programs are data
"""F and G: the network; secrets, cheating and clocks."""

from __future__ import annotations

from tool_service.sandbox.base import Tier
from tool_service.sandbox.hostile.case import ERROR, MEMORY, OK, PROCESS, TIMEOUT, Case, bash, case, py, tests
from tool_service.sandbox.hostile.programs import TRY

CASES: tuple[Case, ...] = (
    case(
        "F1-metadata",
        "the cloud's metadata address",
        py(
            "import socket\ns = socket.socket(); s.settimeout(1); s.connect(('169.254.169.254', 80))",
            ERROR,
            hides="timed out",
        ),
    ),
    case(
        "F2-loopback-of-the-machine",
        "common ports of the machine's loopback",
        py(
            "import socket\nfor p in (22, 53, 80, 111, 2375, 5432, 6379, 8080, 8265, 50051):\n  s = socket.socket(); s.settimeout(.2)\n  if s.connect_ex(('127.0.0.1', p)) == 0: print('REACHED', p)",
            OK,
            ERROR,
            hides="REACHED",
        ),
    ),
    case("F4-dns", "a DNS lookup", py("import socket; socket.getaddrinfo('example.com', 80)", ERROR, timeout=3)),
    case(
        "F6-own-loopback",
        "a connection over its own loopback",
        py(
            "import socket\na = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname()); c, _ = a.accept(); b.send(b'mine'); print(c.recv(9))",
            shows="mine",
        ),
        tier=Tier.ISOLATED,
    ),
    case(
        "F6-private-listener",
        "listens on ports and abstract names of its own",
        py(
            "import socket\nprint(len([socket.create_server(('127.0.0.1', p)) for p in (8080, 50051)]), socket.socket(socket.AF_UNIX).bind('\\0turnwire'))",
            shows="2 None",
        ),
        tier=Tier.ISOLATED,
    ),
    case(
        "F8-quick-failures",
        "a download, which must fail at once",
        py(
            "import subprocess, time, urllib.request, os\nt = time.monotonic()\ntry: urllib.request.urlopen('http://example.com')\nexcept OSError as e: print('refused')\nprint([k for k in os.environ if 'proxy' in k.lower()], time.monotonic() - t < 2)",
            shows="refused\n[] True",
        ),
    ),
    case(
        "F8-installers",
        "pip, npm and git, which must not wait between their tries",
        py(
            "import subprocess\nfor c in ('python3 -m pip install requests', 'npm install left-pad', 'git clone https://github.com/a/b'):\n  r = subprocess.run(c, shell=True, capture_output=True)\n  print(c, 'DONE' if r.returncode == 0 else '', r.stderr.count(b'Retrying'))",
            hides="DONE",
            shows="requests  0\n",
        ),
    ),
    case(
        "F6-names",
        "servers under the names of its own loopback",
        py(
            "import asyncio, socket\nasync def try_it(name):\n  server = await asyncio.start_server(lambda r, w: w.close(), name, 0)\n  for listener in server.sockets: await asyncio.open_connection(*listener.getsockname()[:2]); print('connected')\nfor name in ('localhost', socket.gethostname()): asyncio.run(try_it(name))",
            shows="connected\nconnected\n",
        ),
        tier=Tier.ISOLATED,
        backends=(PROCESS,),  # in a container the image decides
    ),
    case(
        "F6-connections-that-nobody-accepts",
        "sends to itself what nobody reads, over connections that need no descriptor",
        *(
            py(
                f"import socket\nkept = []\nfor number in range(50):\n  kept.append(socket.socket({family})); kept[-1].bind({address}); kept[-1].listen(4096)\n  try:\n    for _ in range(100):\n      client = socket.socket({family}); client.settimeout(.2); client.connect(kept[-1].getsockname()); client.setblocking(False)\n      for option in (7, 8): client.setsockopt(socket.SOL_SOCKET, option, 1 << 22)\n      try:\n        while 1: client.send(bytes(1 << 16))\n      except BlockingIOError: client.close()\n  except OSError: pass",
                MEMORY,
            )
            for family, address in (("socket.AF_UNIX", "f'\\0{number}'"), ("socket.AF_INET", "('127.0.0.1', 0)"))
        ),
        tier=Tier.ISOLATED,
        also=("A27",),
    ),
    case(
        "G1-environment",
        "reads its environment",
        py("import os; print(sorted(os.environ), open('/proc/self/environ').read())", shows="HOME"),
    ),
    case(
        "G1-variables",
        "variables beyond those that are allowed",
        py(
            "import os\nset(os.environ) <= {'PATH', 'HOME', 'TMPDIR', 'LANG', 'USER', 'TZ', 'XDG_CACHE_HOME', 'XDG_CONFIG_HOME', 'PIP_RETRIES', 'npm_config_fetch_retries'}",
            shows="True",
        ),
    ),
    case(
        "G2-own-memory",
        "searches its own memory for a secret of the service's",
        py(
            "import re\nfound = []\nwith open('/proc/self/mem', 'rb', 0) as m:\n  for l in open('/proc/self/maps'):\n    if ' rw' in l and 'vvar' not in l and 'vsyscall' not in l:\n      a, b = (int(x, 16) for x in l.split()[0].split('-'))\n      for at in range(a, b, 1 << 20):\n        try: m.seek(at); found += re.findall(rb'canary[-]secret[-][0-9a-f]{4}', m.read(min(1 << 20, b - at)))\n        except (OSError, ValueError): break\nprint(found)",
            OK,
            ERROR,
            hides="b'canary",
        ),
    ),
    case(
        "F2-this-service",
        "connects to a port of the service that runs it",
        py(
            TRY
            + "import socket\nfor a in ('127.0.0.1', 'localhost', '0.0.0.0', '::1'): attempt(a, lambda: socket.create_connection((a, @PORT@), .5))",
            OK,
            ERROR,
            hides="DONE",
            timeout=8,
        ),
    ),
    case(
        "F3-neighbours",
        "the bridge's gateway, containers beside it, the cluster's API",
        py(
            TRY
            + "import socket\nfor a in ('172.17.0.1', '172.17.0.2', '10.96.0.1', '10.0.0.1', 'kubernetes.default.svc', 'host.docker.internal'):\n  for p in (22, 80, 443, 2375, 6443): attempt(a, lambda: socket.create_connection((a, p), .2))",
            OK,
            ERROR,
            hides="DONE",
            timeout=8,
        ),
    ),
    case(
        "F7-socket-in-a-folder",
        "connects to a socket of this machine by its path",
        py(
            TRY + "import socket\nattempt('connect', lambda: socket.socket(socket.AF_UNIX).connect('@SOCKET@'))",
            OK,
            ERROR,
            hides="DONE",
        ),
    ),
    case(
        "G1-a-secret-file",
        "reads a file of the service's user",
        py(TRY + "attempt('read', lambda: open('@FILE@').read())", hides="DONE"),
        bash("cat @FILE@ ~/.netrc ~/.aws/credentials ~/.ssh/id_* /root/.bash_history /run/secrets/* 2>/dev/null; true"),
    ),
    case(
        "G3-hidden-tests",
        "a candidate that looks for the tests in files and in the memory of what runs it",
        tests(
            "import glob, os, re\ndef f(x):\n  for p in [*glob.glob('/workspace/**', recursive=True), *glob.glob('/tmp/**', recursive=True), *(f'/proc/{i}/{n}' for i in (os.getppid(), 'self', 1) for n in ('cmdline', 'environ', 'mem'))]:\n    try: m = re.search(rb'f.(\\d+). == (\\d+)', open(p, 'rb').read(1 << 20))\n    except OSError: continue\n    if m: return int(m[2])\n  return 0",
            "from solution import f\ndef test_it(): assert f(7) == 4711\n",
            0,
            1,
        ),
    ),
    case(
        "G4-candidates-that-cheat",
        "leaves before the tests, or answers what equals everything",
        tests("import sys\nsys.exit(0)", "from solution import f\ndef test_it(): assert f(1) == 2\n", 0, 1),
        tests("import os\ndef f(x): os._exit(0)", "from solution import f\ndef test_it(): assert f(1) == 2\n", 0, 1),
        tests(
            "class Any:\n  def __eq__(self, other): return True\ndef f(x): return Any()",
            "from solution import f\ndef test_it(): assert f(1) == 2\n",
            0,
            1,
        ),
        tests("def f(x): return x + 1", "from solution import f\ndef test_it(): assert f(1) == 2\n", 1, 1),
    ),
    case(
        "G6-tests-that-vanish",
        "a candidate that removes every file and patches the test runner",
        tests(
            "import os, unittest\nfor folder in ('.', '/workspace', '/tmp'):\n  for name in os.listdir(folder):\n    try: os.remove(f'{folder}/{name}')\n    except OSError: pass\nunittest.TestCase.run = lambda *a: None\ndef f(x): return 0",
            "from solution import f\ndef test_it(): assert f(1) == 2\n",
            0,
            1,
        ),
    ),
    case(
        "G7-clocks",
        "replaces the clocks of its interpreter, and loops",
        py(
            "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\nwhile 1: pass",
            TIMEOUT,
            timeout=0.5,
        ),
    ),
)
