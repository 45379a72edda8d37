# ruff: noqa: E501 - programs are data
"""B: programs that are run in a worker's place, descriptors, forged answers."""

from __future__ import annotations

from tool_service.sandbox.hostile.case import (
    ERROR,
    LOST,
    OK,
    TIMEOUT,
    Case,
    case,
    py,
)

CASES: tuple[Case, ...] = (
    case(
        "B13-exec",
        "replaces the interpreter by a shell",
        py("import os; os.execv('/bin/sh', ['sh', '-c', 'echo shell; exit 5'])", LOST, shows="shell"),
        py("1", shows="1"),
    ),
    case(
        "B13-exec-loop",
        "replaces the interpreter by a shell that loops",
        py("import os; os.execv('/bin/sh', ['sh', '-c', 'while :; do :; done'])", TIMEOUT, timeout=0.5),
    ),
    case(
        "B14-close-all",
        "closes every descriptor",
        py("import os; os.closerange(0, 256)", LOST),
        py("1", shows="1"),
        spoils=True,
    ),
    case(
        "B14-close-output",
        "closes stdout and stderr",
        py("import os; os.close(1); os.close(2); print('x')", OK, ERROR),
        py("2", OK, ERROR),
        spoils=True,
    ),
    case(
        "B15-garbage-on-every-fd",
        "writes into every descriptor",
        py("import os\nfor fd in range(256):\n  try: os.write(fd, b'A' * 64)\n  except OSError: pass", LOST),
        py("1", shows="1"),
    ),
    case(
        "B15-forged-answer",
        "forges the worker's answer, and is quicker or slower than that",
        *(
            step
            for rest in ("", "time.sleep(.1)", "os._exit(0)", "os.kill(os.getpid(), 9)")
            for step in (
                py(f"import os, struct, time\nos.write(21, struct.pack('=IIBi', 0, 1, 0, -1)); {rest}", LOST),
                py("1", shows="1", restarted=True),
            )
        ),
    ),
    case(
        "B15-stolen-number",
        "forges the worker's answer with the number of the turn, which it has found in its process",
        py(
            "import os, struct, sys, time\nf = sys._getframe()\nwhile 'number' not in f.f_locals: f = f.f_back\nos.write(21, struct.pack('=IIBi', 0, f.f_locals['number'], 0, -1)); time.sleep(.3)"
        ),
        py("2", LOST, OK),
        py("3", shows="3"),
    ),
    case(
        "B15-forged-codes",
        "forges an answer with a signal, and one with an exit code, that there is not",
        *(
            py(
                f"import os, struct, sys, time\nf = sys._getframe()\nwhile 'number' not in f.f_locals: f = f.f_back\nos.write(21, struct.pack('=IIBi', 0, f.f_locals['number'], {tag}, {code})); time.sleep(5)",
                LOST,
            )
            for tag, code in ((5, 9999), (5, 0), (1, 256))
        ),
        py("1", shows="1"),
    ),
    case(
        "B15-other-pipes",
        "puts pipes of its own in the place of the worker's",
        py("import os; r, w = os.pipe(); os.dup2(r, 20)", LOST),
        py("import os; r, w = os.pipe(); os.dup2(r, 20); os.dup2(w, 21)", LOST),
        py("1", shows="1", restarted=True),
    ),
    case(
        "B15-forged-huge",
        "forges an answer of 2 GiB",
        py("import os, struct, time\nos.write(21, struct.pack('=IIBi', 2**31, 1, 0, -1)); time.sleep(5)", LOST),
        py("1", shows="1"),
    ),
    case(
        "B15-forged-value",
        "forges an answer that is not JSON",
        py("import os, struct, time\nos.write(21, struct.pack('=IIBi', 3, 1, 0, -1) + b'{]x'); time.sleep(5)", LOST),
    ),
    case(
        "B15-deep-value",
        "forges an answer nested 60,000 deep",
        py(
            "import os, struct, time\nb = b'[' * 60000\nos.write(21, struct.pack('=IIBi', len(b), 1, 0, -1) + b); time.sleep(5)",
            LOST,
        ),
    ),
    case(
        "B15-descriptors",
        "counts the descriptors that it was given",
        py("import os; print(sorted({*map(int, os.listdir('/proc/self/fd'))} - {3}))", shows="[0, 1, 2, 20, 21]"),
    ),
    case(
        "B13-programs-that-are-none",
        "interpreters that name each other, programs that are noise, a script that runs itself for ever",
        py(
            "import os, random, subprocess\nfor name, text in (('a', '#!./b\\n'), ('b', '#!./a\\n')): open(name, 'w').write(text); os.chmod(name, 0o755)\ntry: subprocess.run(['./a'])\nexcept OSError as error: print('loop', error.errno)\nhead = open('/bin/true', 'rb').read(4096)\nfor seed in range(60):\n  data = bytearray(head); rng = random.Random(seed)\n  for _ in range(20): data[rng.randrange(24, 400)] = rng.randrange(256)\n  open('j', 'wb').write(data); os.chmod('j', 0o755)\n  try: subprocess.run(['./j'], timeout=1)\n  except (OSError, subprocess.TimeoutExpired): pass\n  os.unlink('j')",
            shows="loop 40",
        ),
        py(
            "open('x', 'w').write('#!/bin/sh\\nexec ./x'); os.chmod('x', 0o755); os.execv('./x', ['x'])",
            TIMEOUT,
            timeout=0.5,
        ),
        py("import os; os.execv('/bin/sh', ['sh', '-c', 'while :; do /bin/true & done'])", TIMEOUT, LOST, timeout=0.5),
        py("1", shows="1", restarted=True),
    ),
)
