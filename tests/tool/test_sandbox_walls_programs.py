# ruff: noqa: E501 - programs are data
"""Ordinary programs work behind the walls: what an allow-list and Landlock must not break."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from interpreters import readable_interpreter

from tool_service.sandbox import ProcessBackend, ProcessConfig, SandboxLimits, Tier, Turn, TurnStatus
from tool_service.sandbox.base import MIB

PACKAGES = Path(msgspec.__file__).parents[1]
BOTH, ISOLATED = ("isolated", "restricted"), ("isolated",)

STANDARD_LIBRARY = {
    "asyncio": (BOTH, "import asyncio\nasync def main():\n  p = await asyncio.create_subprocess_exec('echo', 'x', stdout=-1)\n  print((await p.communicate())[0], await asyncio.to_thread(lambda: 6 * 7))\nasyncio.run(main())"),
    "subprocess": (BOTH, "import subprocess\nprint(subprocess.run('cat | tr a b', shell=True, input=b'aaa', capture_output=True, timeout=9).stdout)"),
    "multiprocessing": (ISOLATED, "import multiprocessing as m\nq = m.Queue()\np = m.Process(target=q.put, args=(1,)); p.start(); print(q.get()); p.join()\nwith m.Pool(2) as pool: print(pool.map(abs, [-1]))\nfrom multiprocessing import shared_memory\ns = shared_memory.SharedMemory(create=True, size=100); s.buf[0] = 7; print(s.buf[0]); s.close(); s.unlink()\nwith m.Manager() as manager: print(manager.list([1]))"),
    "processes": (BOTH, "import multiprocessing as m\na, b = m.Pipe()\np = m.get_context('fork').Process(target=b.send, args=('sent',)); p.start(); print(a.recv()); p.join()"),
    "executors": (ISOLATED, "import concurrent.futures as f\nwith f.ProcessPoolExecutor(2) as e: print(list(e.map(abs, [-3])))"),
    "threading": (BOTH, "import threading, queue\nq = queue.Queue()\nfor i in range(8): threading.Thread(target=q.put, args=(i,)).start()\nprint(sorted(q.get() for i in range(8)))"),
    "sqlite3": (BOTH, "import sqlite3\nc = sqlite3.connect('a.db'); c.execute('pragma journal_mode=wal'); c.execute('create table t(x)'); c.execute('insert into t values (5)'); c.commit(); print(c.execute('select * from t').fetchall())"),
    "files": (BOTH, "import os, shutil, tempfile, pathlib\nd = tempfile.mkdtemp(); p = pathlib.Path(d, 'a'); p.write_text('x'); shutil.copy2(p, 'b'); shutil.copytree(d, 'c'); shutil.move('b', d + '/e'); os.chmod('c/a', 0o755); os.utime('c/a', (1, 1)); os.link('c/a', 'f'); os.symlink('f', 'g'); print(sorted(os.listdir(d)), os.stat('g').st_mtime); shutil.make_archive('z', 'zip', d); shutil.make_archive('y', 'gztar', d); shutil.unpack_archive('y.tar.gz', 'out'); shutil.rmtree('c'); os.sync()"),
    "waiting": (BOTH, "import select, os, selectors, signal, time\nr, w = os.pipe(); e = select.epoll(); e.register(r, 1); os.write(w, b'x'); print(e.poll(1)); os.eventfd(0); signal.setitimer(signal.ITIMER_REAL, .05); signal.signal(14, lambda *a: None); time.sleep(.1); signal.sigtimedwait([10], 0)"),
    "memory": (BOTH, "import mmap, resource, random, os\nm = mmap.mmap(-1, 1 << 20); m[5] = 1; f = open('m', 'wb+'); f.truncate(4096); n = mmap.mmap(f.fileno(), 4096); n[0] = 9; n.flush(); print(open('m', 'rb').read(1), resource.getrusage(0).ru_maxrss > 0, len(os.urandom(9)), len(os.sched_getaffinity(0)) > 0)"),
    "sockets": (ISOLATED, "import socket, threading, urllib.request, http.server\nH = http.server.SimpleHTTPRequestHandler; H.log_message = lambda *a: None; s = http.server.HTTPServer(('localhost', 0), H); threading.Thread(target=s.serve_forever, daemon=True).start(); print(urllib.request.urlopen(f'http://localhost:{s.server_port}/').status)\nu = socket.socket(socket.AF_UNIX); u.bind('sock'); u.listen(); v = socket.socket(socket.AF_UNIX); v.connect('sock')"),
    "information": (BOTH, "import platform, os, time, locale, mimetypes, getpass, pwd, uuid, zoneinfo, ssl, ctypes.util\nplatform.platform(); os.cpu_count(); mimetypes.guess_type('a.png'); uuid.uuid4(); ssl.create_default_context(); time.localtime(); print(getpass.getuser(), os.getloadavg()[0] >= 0, ctypes.util.find_library('c'))"),
}  # fmt: skip

PROGRAMS = {
    "python3": (BOTH, "python3 -c 'import sys, site; print(sys.version)' && echo 'print(6*7)' > a.py && python3 a.py && python3 -m venv --without-pip v && v/bin/python -c 'print(1)'"),
    "bash": (BOTH, "f() { local x=$1; echo \"f $x\"; }; f 1; cat <<< here; cat <(echo sub); echo {1..3} | tee a | wc -w; for i in 1 2; do (sleep 0.01; echo $i) & done; wait; [ -t 0 ] || echo no-tty; printf '%s\\n' b a | sort > s; test -x /bin/sh; date +%Y > /dev/null; find . -name s -newer a; kill -0 $$"),
    "git": (BOTH, "git init -q r && cd r && git config user.email a@b && git config user.name n && echo x > f && git add f && git commit -qm one && git checkout -qb two && git log --oneline | wc -l && git diff && cd .. && git clone -q r r2 && git -C r2 log -1 --format=%s"),
    "gcc": (BOTH, "printf '#include <stdio.h>\\n#include <pthread.h>\\nvoid*f(void*a){puts(\"thread\");return 0;}int main(){pthread_t t;pthread_create(&t,0,f,0);pthread_join(t,0);return 0;}' > a.c && gcc -O2 -pthread a.c -o a && ./a"),
    "node": (BOTH, "node -e \"const fs=require('fs'),{execSync}=require('child_process');fs.writeFileSync('n','x');console.log(fs.readFileSync('n','utf8'),execSync('echo child').toString().trim(),[1,2].map(x=>x*2));new Promise(r=>setTimeout(r,5)).then(()=>console.log('later'))\""),
    "tar": (BOTH, "mkdir d && echo x > d/f && chmod 750 d && tar czf d.tgz d && rm -r d && tar xzf d.tgz && cat d/f && cp -a d e && mv e g && touch -d 2001-01-01 g/f && ls -l g | wc -l && gzip -c d.tgz | gunzip | cmp - d.tgz && stat -c %a d"),
}  # fmt: skip

PACKAGE_PROGRAMS = {
    "numpy": (BOTH, "import numpy as np\na = np.random.rand(300, 300); print(np.linalg.norm(np.linalg.inv(a) @ a - np.eye(300)) < 1e-6); np.save('a', a); print(np.load('a.npy', mmap_mode='r').shape)"),
    "pandas": (BOTH, "import pandas as pd\nd = pd.DataFrame({'a': [1, 2, 3], 'b': list('xyx')}); d.to_csv('d.csv'); print(pd.read_csv('d.csv').groupby('b').a.sum())"),
    "matplotlib": (BOTH, "import matplotlib; matplotlib.use('Agg')\nimport matplotlib.pyplot as plt, os\nplt.plot([1, 2, 3]); plt.title('t'); plt.savefig('p.png'); print(os.path.getsize('p.png') > 1000)"),
}  # fmt: skip


@pytest.fixture(params=[pytest.param("isolated", marks=pytest.mark.needs("isolated-sandbox")), "restricted"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[ProcessBackend]:
    interpreter = readable_interpreter() if request.param == "restricted" else ""
    config = ProcessConfig(
        tier=request.param, minimum_tier=request.param, interpreter=interpreter, read_only_paths=(str(PACKAGES),)
    )
    made = ProcessBackend(config)
    await made.start()
    yield made
    await made.close()


async def check(backend: ProcessBackend, tiers: tuple[str, ...], code: str) -> None:
    if backend.tier.name.lower() not in tiers:
        pytest.skip("not promised in this tier; docs/security.md says why")
    sandbox = await backend.create(SandboxLimits(memory_bytes=1024 * MIB, workspace_bytes=256 * MIB))
    result = await sandbox.run(Turn("python", {"code": code}, 60.0))
    assert (result.status, result.stderr) == (TurnStatus.OK, b""), result
    assert result.stdout
    await sandbox.kill()


@pytest.mark.parametrize("name", STANDARD_LIBRARY)
async def test_the_standard_library_works(backend: ProcessBackend, name: str) -> None:
    await check(backend, *STANDARD_LIBRARY[name])


@pytest.mark.parametrize("name", PROGRAMS)
async def test_common_programs_work(backend: ProcessBackend, name: str) -> None:
    if shutil.which(name, path="/usr/local/bin:/usr/bin:/bin") is None:  # what sandboxes see
        pytest.skip(f"{name} is not installed")
    tiers, script = PROGRAMS[name]
    await check(
        backend, tiers, f"import subprocess\nsubprocess.run(['bash', '-c', 'set -e;' + {script!r}], check=True)"
    )


@pytest.mark.parametrize("name", PACKAGE_PROGRAMS)
async def test_scientific_packages_work(backend: ProcessBackend, name: str) -> None:
    pytest.importorskip(name)
    if backend.tier is Tier.RESTRICTED and any(not part.stat().st_mode & 1 for part in (PACKAGES, *PACKAGES.parents)):
        pytest.skip("the environment is in a folder closed to other users")
    tiers, code = PACKAGE_PROGRAMS[name]
    await check(backend, tiers, f"import sys; sys.path.append({str(PACKAGES)!r})\n{code}")
