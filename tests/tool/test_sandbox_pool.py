"""The warm pool, on real sandboxes; creation failures alone come from a stand-in."""

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest
from waiting import PATIENCE, eventually

from tool_service.sandbox import (
    PoolExhausted,
    ProcessBackend,
    Sandbox,
    SandboxLimits,
    SandboxUnavailable,
    Turn,
    WarmPool,
)

pytestmark = pytest.mark.needs("isolated-sandbox")

LIMITS = SandboxLimits()


@pytest.fixture
async def backend() -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend()
    await made.start()
    yield made
    await made.close()


async def settled(pool: WarmPool, ready: int) -> None:
    await eventually(lambda: pool.stats().ready == ready and pool.stats().creating == 0)


async def test_takes_are_fresh_and_the_pool_returns_to_its_size(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=2, limits=LIMITS, max_total=4)
    await pool.start()
    assert pool.stats().ready == 2
    taken = [await pool.take() for _ in range(4)]
    assert len({sandbox.id for sandbox in taken}) == 4
    for sandbox in taken:
        assert (await sandbox.run(Turn("python", {"code": "'x' in globals()"}))).stdout == b"False\n"
        await sandbox.run(Turn("python", {"code": "x = 1"}))
        await pool.discard(sandbox)
        await pool.discard(sandbox)
        assert not sandbox.alive
    await settled(pool, 2)
    assert backend.stats().running == 2
    await pool.close()
    assert backend.stats().running == 0
    with pytest.raises(PoolExhausted):
        await pool.take()


async def test_waiting_is_bounded_in_number(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=1, max_waiting=2, wait_seconds=PATIENCE)
    await pool.start()
    held = await pool.take()
    first, second = [asyncio.create_task(pool.take()) for _ in range(2)]
    await eventually(lambda: pool.stats().waiting == 2)
    with pytest.raises(PoolExhausted) as full:
        await pool.take()
    assert full.value.retry_seconds > 0
    await pool.discard(held)
    assert (await first).alive
    assert not second.done()
    assert (pool.stats().waiting, backend.stats().running) == (1, 1)
    await pool.close()
    with pytest.raises(PoolExhausted):
        await second


async def test_waiting_is_bounded_in_time(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=1, wait_seconds=0.1)
    await pool.start()
    await pool.take()
    with pytest.raises(PoolExhausted, match=r"no sandbox within 0\.1 s"):
        await pool.take()
    assert pool.stats().waiting == 0
    await pool.close()


async def test_a_hundred_takers_are_served_by_a_few(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=2, limits=LIMITS, max_total=4)
    await pool.start()
    most = 0

    async def one(number: int) -> bytes:
        nonlocal most
        sandbox = await pool.take()
        try:
            most = max(most, backend.stats().running)
            return (await sandbox.run(Turn("python", {"code": f"x = {number}\nx"}))).stdout
        finally:
            await pool.discard(sandbox)

    answers = await asyncio.gather(*(one(number) for number in range(100)))
    assert answers == [f"{number}\n".encode() for number in range(100)]
    assert most <= 4
    await pool.close()
    assert backend.stats().running == 0


async def test_a_taker_that_gives_up_costs_nothing(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=0, limits=LIMITS, max_total=2)
    for pause in (0.0, 0.001, 0.005, 0.01, 0.02, 0.05):
        task = asyncio.create_task(pool.take())
        await asyncio.sleep(pause)
        task.cancel()
        for sandbox in (s for s in await asyncio.gather(task, return_exceptions=True) if isinstance(s, Sandbox)):
            await pool.discard(sandbox)
    await eventually(lambda: (pool.stats().in_use, pool.stats().waiting) == (0, 0))
    assert (await pool.take()).alive
    await pool.close()
    assert backend.stats().running == 0


async def test_a_taker_that_gives_up_at_the_moment_it_is_served_gives_the_sandbox_back(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=0, limits=LIMITS, max_total=1)
    sandbox = await pool.take()
    task = asyncio.create_task(pool.take())
    await asyncio.sleep(0)
    pool._hand_out(sandbox)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await pool.take()).id != sandbox.id
    assert not sandbox.alive
    await pool.close()


async def test_what_died_while_ready_is_replaced_before_anybody_asks(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=2, limits=LIMITS, max_total=3)
    await pool.start()
    for sandbox in list(pool._ready):
        await sandbox.kill()
    assert pool.stats().ready == 0
    pool.renew()
    await settled(pool, 2)
    await pool.close()


async def test_a_pool_that_keeps_none_ready_finds_out_when_sandboxes_can_be_made_again() -> None:
    backend = FailingBackend(SandboxUnavailable("no luck"))
    await backend.start()
    pool = WarmPool(backend, size=0, limits=LIMITS, max_total=1, wait_seconds=0.05)
    with pytest.raises(PoolExhausted, match="no luck"):
        await pool.take()
    backend.fails = False
    await eventually(lambda: pool.renew() or pool.stats().ready)
    assert pool.stats().last_error == ""
    await pool.close()
    await backend.close()


async def test_what_died_while_ready_is_not_handed_out(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=2, limits=LIMITS, max_total=3)
    await pool.start()
    for sandbox in list(pool._ready):
        await sandbox.kill()
    taken = await pool.take()
    assert taken.alive
    await settled(pool, 2)
    await pool.close()


class FailingBackend(ProcessBackend):
    """A stand-in: a real backend whose creations fail while the test says so, which cannot be had on demand."""

    fails = True

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def create(self, limits: SandboxLimits) -> Sandbox:
        if self.fails and self._mode == "isolated" and self.tier.value:
            raise self.error
        return await super().create(limits)


@pytest.mark.parametrize("error", [SandboxUnavailable("no luck"), MemoryError("no luck")])
async def test_failed_creations_are_retried_and_told(error: Exception) -> None:
    backend = FailingBackend(error)
    await backend.start()
    pool = WarmPool(backend, size=0, limits=LIMITS, max_total=1, wait_seconds=0.2, parallel_creations=1)
    with pytest.raises(PoolExhausted, match="no luck"):
        await pool.take()
    assert pool.stats().failures >= 1
    backend.fails = False
    pool._wait_seconds = PATIENCE
    assert (await pool.take()).alive
    assert pool.stats().last_error == ""
    await pool.close()
    await backend.close()


def test_nonsense_sizes_are_refused() -> None:
    for size, total in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="max_total"):
            WarmPool(ProcessBackend(), size=size, limits=LIMITS, max_total=total)


DIRT = """
import os, subprocess, threading, time
x = 1
os.makedirs('a/' * 300)
open('a/f', 'w').write('mine'); os.chmod('a', 0)
for place in ('/tmp', '/dev/shm'): open(place + '/f', 'w').write('mine')
os.symlink('/etc', '/tmp/l'); os.mkfifo('p'); os.setxattr('/workspace', 'user.mark', b'mine')
os.chmod('/workspace', 0)
subprocess.Popen(['sleep', '600'])
threading.Thread(target=time.sleep, args=(600,)).start()
"""
LOOK = """
import os, threading
print('x' in globals(), threading.active_count(), os.listxattr('/workspace'), oct(os.stat('/workspace').st_mode))
print(*map(os.listdir, ('/workspace', '/tmp', '/dev/shm')), len([p for p in os.listdir('/proc') if p.isdigit()]))
"""
CLEAN = b"False 1 [] 0o40700\n[] [] [] 2\n"


async def test_a_sandbox_shows_nothing_of_who_gave_one_back(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=1, recycle=True)
    await pool.start()
    ids = set()
    for _ in range(3):
        sandbox = await pool.take()
        ids.add(sandbox.id)
        result = await sandbox.run(Turn("python", {"code": LOOK}))
        assert (result.stdout, result.restarted) == (CLEAN, False)
        await sandbox.run(Turn("python", {"code": DIRT}))
        await pool.discard(sandbox)
    assert len(ids) == 3, "their memories would tell"
    await pool.close()
    assert backend.stats().running == 0


async def test_what_cannot_be_vouched_for_is_not_used_again(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=1, recycle=True)
    await pool.start()
    sandbox = await pool.take()
    await sandbox.put_file("f", b"mine")

    async def refuse() -> str:
        return "a test says so"

    sandbox.reset = refuse  # type: ignore[method-assign]
    await pool.discard(sandbox)
    assert not sandbox.alive
    assert (await pool.take()).id != sandbox.id
    await pool.close()


async def as_new() -> str:
    return ""


async def test_what_recycling_gathers_beyond_the_size_is_ended_when_nobody_needs_it(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=4, recycle=True)
    await pool.start()
    for sandbox in [await pool.take() for _ in range(4)]:
        sandbox.reset = as_new  # type: ignore[method-assign]
        await pool.discard(sandbox)
    assert pool.stats().ready == 4
    pool._trim()
    taken = await pool.take()
    pool._trim()
    assert pool.stats().ready == 1, "one was needed since it was last looked at, and so is another kept"
    await pool.discard(taken)
    await pool.close()
    assert backend.stats().running == 0


async def test_a_sandbox_that_no_longer_answers_is_not_handed_out(backend: ProcessBackend) -> None:
    pool = WarmPool(backend, size=1, limits=LIMITS, max_total=2)
    await pool.start()
    (mute,) = pool._ready
    (worker,) = [process for process in psutil.Process().children(recursive=True) if not process.children()]
    psutil.Process(worker.ppid()).suspend()  # its supervisor
    taken = await pool.take()
    assert taken.id != mute.id
    assert (await taken.run(Turn("python", {"code": "1"}))).stdout == b"1\n"
    await pool.close()
    assert backend.stats().running == 0
