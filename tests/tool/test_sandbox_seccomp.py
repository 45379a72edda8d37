"""The system call filter: that the compiled program says what the table says, and that programs meet it."""

import errno
import struct
from collections.abc import AsyncIterator

import pytest
from interpreters import readable_interpreter

from tool_service.sandbox import ProcessBackend, ProcessConfig, Sandbox, SandboxLimits, Turn, TurnResult, TurnStatus
from tool_service.sandbox.inside import linux, seccomp, syscalls

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_NEWUSER, THREAD_FLAGS, FORK_FLAGS = 0x10000000, 0x3D0F00, 0x01200011

machines = pytest.mark.parametrize("machine", ARCHITECTURES)
tiers = pytest.mark.parametrize("isolated", [True, False])


class Kernel:
    """Runs a classic BPF program as the kernel would, and counts its steps."""

    def __init__(self, program: bytes) -> None:
        self.operations: list[tuple[int, int, int, int]] = list(struct.iter_unpack("=HBBI", program))
        self.steps = 0
        self.read_arguments = False

    def decide(self, architecture: int, number: int, *arguments: int) -> int:
        data = struct.pack(
            "=iIQ6Q", number - (number >> 31 << 32), architecture, 0, *arguments, *[0] * (6 - len(arguments))
        )
        value, place, self.steps, self.read_arguments = 0, 0, 0, False
        while True:
            code, true, false, k = self.operations[place]
            place += 1
            self.steps += 1
            if code == 0x20:
                (value,) = struct.unpack_from("=I", data, k)
                self.read_arguments |= k >= 16
            elif code == 0x54:
                value &= k
            elif code == 0x05:
                place += k
            elif code in (0x15, 0x35):
                place += true if (value == k if code == 0x15 else value >= k) else false
            else:
                assert code == 0x06
                return k


def expected(verdict: syscalls.Verdict, arguments: tuple[int, ...]) -> int:
    if isinstance(verdict, int):
        return ERRNO | verdict
    for check in verdict:
        if (arguments[check.argument] & check.mask in check.values) is check.refused:
            return ERRNO | check.error
    return ALLOW


@machines
@tiers
def test_each_call_is_decided_as_the_table_says(machine: str, isolated: bool) -> None:
    kernel = Kernel(seccomp.build(machine, isolated))
    verdicts = syscalls.verdicts(isolated)
    names = {numbers[machine]: name for name, numbers in syscalls.NUMBERS.items() if machine in numbers}
    for number in range(600):
        verdict = verdicts[names[number]] if number in names else errno.ENOSYS
        checks = verdict if isinstance(verdict, tuple) else ()
        for value in {
            0,
            1,
            2,
            3,
            0xFFFFFFFF,
            *(v for check in checks for v in (*check.values, *(v + 1 for v in check.values))),
        }:
            arguments = (value,) * 6
            assert kernel.decide(ARCHITECTURES[machine], number, *arguments) == expected(verdict, arguments), names[
                number
            ]


@machines
@tiers
def test_what_is_always_allowed_is_found_without_a_look_at_arguments(machine: str, isolated: bool) -> None:
    """So the kernel remembers it and never runs the program for it again."""
    program = seccomp.build(machine, isolated)
    kernel = Kernel(program)
    assert len(program) // 8 < 400
    for name, verdict in syscalls.verdicts(isolated).items():
        if verdict == () and machine in syscalls.NUMBERS[name]:
            assert kernel.decide(ARCHITECTURES[machine], syscalls.NUMBERS[name][machine]) == ALLOW
            assert not kernel.read_arguments, name
            assert kernel.steps < 16, name


@machines
def test_numbers_of_other_calling_conventions_get_nowhere(machine: str) -> None:
    kernel = Kernel(seccomp.build(machine, isolated=True))
    assert kernel.decide(I386, 20) == KILL
    for number in (0x40000000, 0x40000000 | 1, 0x40000000 | 520, 0xFFFFFFFF):
        assert kernel.decide(ARCHITECTURES[machine], number) == ERRNO | errno.EPERM


@machines
@pytest.mark.parametrize(
    ("name", "arguments", "isolated", "answer"),
    [
        ("clone", (FORK_FLAGS,), True, 0),
        ("clone", (THREAD_FLAGS,), True, 0),
        ("clone", (CLONE_NEWUSER | FORK_FLAGS,), True, errno.EPERM),
        ("clone3", (0, 0), True, errno.ENOSYS),
        ("socket", (2, 1 | 0o2000000 | 0o4000, 6), True, 0),
        ("socket", (10, 2, 17), True, 0),
        ("socket", (2, 3, 1), True, errno.EPERM),
        ("socket", (2, 1, 132), True, errno.EPROTONOSUPPORT),
        ("socket", (2 | 1 << 40, 1, 0), True, 0),
        ("socket", (16, 3, 0), True, errno.EAFNOSUPPORT),
        ("socket", (40, 1, 0), True, errno.EAFNOSUPPORT),
        ("socket", (1, 1, 0), False, errno.EAFNOSUPPORT),
        ("socketpair", (1, 1, 0), False, 0),
        ("ioctl", (0, 0x5413), True, 0),
        ("ioctl", (0, 0x5412), True, errno.ENOTTY),
        ("ioctl", (0, 0x5412 | 1 << 32), True, errno.ENOTTY),
        ("prctl", (28,), True, errno.EPERM),
        ("prctl", (35,), True, errno.EPERM),
        ("prlimit64", (0, 7), True, 0),
        ("prlimit64", (1, 7), True, errno.EPERM),
        ("mknodat", (0, 0, 0o020600), True, errno.EPERM),
        ("mknodat", (0, 0, 0o010600), True, 0),
        ("personality", (0xFFFFFFFF,), True, 0),
        ("personality", (0x0040000,), True, errno.EPERM),
        ("sched_setscheduler", (0, 1), True, errno.EPERM),
        ("mq_open", (), True, errno.EPERM),
        ("shmget", (), True, errno.EPERM),
        ("inotify_init1", (), True, errno.EPERM),
        ("landlock_create_ruleset", (), True, errno.EPERM),
        ("setsockopt", (0, 1, 2), True, 0),
        ("setsockopt", (0, 1, 9), True, 0),
        ("setsockopt", (0, 1, 7), True, None),
        ("setsockopt", (0, 1, 8 | 1 << 32), True, None),
        ("sync", (), True, None),
    ],
)
def test_decisions_that_matter(
    machine: str, name: str, arguments: tuple[int, ...], isolated: bool, answer: int | None
) -> None:
    kernel = Kernel(seccomp.build(machine, isolated))
    decision = kernel.decide(ARCHITECTURES[machine], syscalls.NUMBERS[name][machine], *arguments)
    assert decision == (ERRNO if answer is None else ERRNO | answer if answer else ALLOW)


@pytest.fixture(params=[pytest.param("isolated", marks=pytest.mark.needs("isolated-sandbox")), "restricted"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    interpreter = readable_interpreter() if request.param == "restricted" else ""
    backend = ProcessBackend(ProcessConfig(tier=request.param, minimum_tier=request.param, interpreter=interpreter))
    await backend.start()
    yield await backend.create(SandboxLimits())
    await backend.close()


async def python(sandbox: Sandbox, code: str) -> TurnResult:
    return await sandbox.run(Turn("python", {"code": code}, 20.0))


MACHINE_CODE = """
import ctypes, mmap
def run(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""


@pytest.mark.skipif(linux.MACHINE != "x86_64", reason="x86 machine code")
async def test_a_32_bit_call_from_64_bit_code_kills_the_program(sandbox: Sandbox) -> None:
    getpid_by_int80 = r"run(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')"
    result = await python(sandbox, MACHINE_CODE + getpid_by_int80)
    assert (result.status, result.signal) == (TurnStatus.SIGNALED, 31)
    assert (await python(sandbox, "6 * 7")).stdout == b"42\n"


@pytest.mark.skipif(linux.MACHINE != "x86_64", reason="x86 machine code")
async def test_the_x32_numbers_of_calls_are_refused(sandbox: Sandbox) -> None:
    getpid = r"run(b'\xb8\x27\x00\x00\x00\x0f\x05\xc3')"
    getpid_by_x32 = r"run(b'\xb8\x27\x00\x00\x40\x0f\x05\xc3')"
    result = await python(sandbox, f"{MACHINE_CODE}import os\nprint({getpid} == os.getpid(), {getpid_by_x32})")
    assert result.stdout == b"True -1\n", result


async def test_a_program_cannot_reach_into_its_supervisor(sandbox: Sandbox) -> None:
    result = await python(
        sandbox,
        "import os, resource\n"
        "supervisor = os.getppid()\n"
        "attempts = [lambda: resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (0, 0)),\n"
        "  lambda: os.setpriority(os.PRIO_PROCESS, supervisor, 19),\n"
        "  lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),\n"
        "  lambda: os.sched_setscheduler(supervisor, os.SCHED_IDLE, os.sched_param(0)),\n"
        "  lambda: open(f'/proc/{supervisor}/oom_score_adj', 'w'),\n"
        "  lambda: open(f'/proc/{supervisor}/mem', 'rb')]\n"
        "for attempt in attempts:\n"
        "    try: print('DONE', attempt())\n"
        "    except PermissionError: pass\n",
    )
    assert (result.status, result.stdout) == (TurnStatus.OK, b""), result
    assert (await python(sandbox, "6 * 7")).stdout == b"42\n"
