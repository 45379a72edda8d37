"""The processes of one trainer service under torchrun: rank 0 is the service, the others do its commands with it.

Invariants:

- One order. Rank 0 tells a command, and then every rank runs the same function with the same arguments; rank 0 tells
  one at a time. So all ranks meet in the same collectives in the same order. What differs is their share of the work:
  shards of the tensors, and micro-batches as `deal` gives them.
- Errors are common, or the end. A TurnwireError is raised by every rank alike (it follows from the arguments, or
  `from_first` shares it), and fails the run. After anything else nobody knows where the others are: the service ends.
- Waiting for a command has no limit. Within one, a rank that keeps the others waiting past the group's timeout ends the
  service; so does one that dies, at once.
- One process has no process group: `ALONE` hands through what it is given.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from turnwire.errors import ConfigError, InternalError, Problem, TurnwireError

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_FOREVER = timedelta(days=3650)
_GOODBYE = timedelta(seconds=10)
_BUILD = "build"


class RanksError(InternalError):
    """The ranks of a service no longer work together."""


class Ranks:
    """The processes of the service, as one of them sees them. `broken`: they no longer work together."""

    def __init__(self, rank: int = 0, size: int = 1, control: dist.ProcessGroup | None = None) -> None:
        """`control`: the group over which rank 0 tells what to do; waiting in it has no limit."""
        self.rank, self.size, self.broken = rank, size, False
        self._control = control
        self._telling = threading.Lock()

    # -- within a command, on every rank

    def deal(self, pieces: Sequence[T]) -> list[tuple[T, bool]]:
        """This rank's share of the pieces, with True. All ranks get equally many: where they do not divide, some get
        the last one again, with False.
        """
        rounds = -(-len(pieces) // self.size)
        return [
            (pieces[min(n, len(pieces) - 1)], n < len(pieces)) for n in range(self.rank, rounds * self.size, self.size)
        ]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. For small things."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def add_up(self, matrix: Tensor) -> None:
        """Replace a matrix on the CPU by the sum of those of all ranks."""
        if self.size > 1:
            dist.all_reduce(matrix)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, the only one that calls it. If it raises a TurnwireError, all ranks do."""
        if self.size == 1:
            return make()
        if self.rank:
            value, message = self._share(None)
            if message is not None:
                raise InternalError(message)
            return cast("T", value)
        try:
            value = make()
        except TurnwireError as error:
            self._share((None, str(error)))
            raise
        self._share((value, None))
        return value

    # -- commands

    @contextlib.contextmanager
    def command(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        """On rank 0: have the others do a command while the body does it here. On others, in it: nothing.

        Raises RanksError where it did not come to an end on all ranks.
        """
        if self.size == 1 or self.rank:
            yield
            return
        with self._telling:
            if self.broken:
                raise _no_longer(name, "an earlier command failed")
            try:
                self._share((name, tuple(arguments)))
                yield
            except TurnwireError:
                raise
            except Exception as error:  # what it is does not matter: the others may be anywhere
                self.broken = True
                os.kill(os.getpid(), signal.SIGTERM)  # the service ends as it always does
                raise _no_longer(name, f"{type(error).__name__}: {error}") from error

    def follow(self, build: Callable[..., Any]) -> None:
        """On ranks above 0: do what rank 0 tells, until it ends the service. `build` makes what commands are about.

        Raises RanksError when rank 0 is gone, and what goes wrong here alone.
        """
        for number in (signal.SIGTERM, signal.SIGINT):  # torchrun sends them to all: rank 0 says when we end
            signal.signal(number, signal.SIG_IGN)
        subject: Any = None
        while True:
            try:
                name, arguments = self._share(None)
            except RuntimeError as error:
                raise RanksError(f"rank {self.rank} ends, because rank 0 is gone: {error}") from error
            if not name:
                with contextlib.suppress(RuntimeError):  # rank 0 may be gone by now
                    self._part()
                return
            try:
                if name == _BUILD:
                    subject = None  # the former run's memory is free before the new one takes its own
                    subject = build(*arguments)
                else:
                    operator.attrgetter(name)(subject)(*arguments)
            except TurnwireError as error:
                logger.info("rank %d: %s failed, as on all ranks: %s", self.rank, name, error)

    def end(self) -> None:
        """On rank 0, when all is done: the other ranks end."""
        if self.size == 1 or self.broken:
            return
        with self._telling:
            try:
                self._share(("", ()))
                self._part()
            except RuntimeError as error:
                self.broken = True
                logger.error("not every rank has ended by itself: %s", error)  # noqa: TRY400 - torchrun tells of them

    def _part(self) -> None:
        dist.monitored_barrier(self._control, _GOODBYE)
        dist.destroy_process_group()

    def _share(self, value: Any) -> Any:
        """Rank 0's value, for which the others may wait as long as it takes; once it is there, all must keep up."""
        values = [value]
        dist.broadcast(torch.zeros(1), src=0, group=self._control)
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]


def _no_longer(command: str, reason: str) -> RanksError:
    return RanksError(
        f"the ranks of the trainer service no longer work together (at `{command}`: {reason}), and the service ends"
    )


ALONE = Ranks()
"""One process, without torchrun."""


class _OnRanks(Protocol):
    @property
    def ranks(self) -> Ranks: ...


S = TypeVar("S", bound=_OnRanks)


def together(
    name: str, *, send: bool = True
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Decorates a method that all ranks run when rank 0 calls it, each on its own shard.

    `name` is how the others find it from what `build` gave them, as `policy.score`. `send`: with the same arguments;
    else with None in their places, for what is too large to send.
    """

    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def call(self: S, *arguments: P.args, **named: P.kwargs) -> T:
            with self.ranks.command(name, arguments if send else [None] * len(arguments)):
                return method(self, *arguments, **named)

        return cast("Callable[Concatenate[S, P], T]", call)

    return decorate


def building(ranks: Ranks, *arguments: Any) -> contextlib.AbstractContextManager[None]:
    """The command that makes what the others are about."""
    return ranks.command(_BUILD, arguments)


def _meet(backend: str, timeout: timedelta) -> None:
    """Make the default process group. torchrun's own store outlives the processes: after `--max-restarts` has started
    them again the addresses of the former ones are still in it, where torch would look for those of the new ones.
    """
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def join(timeout_seconds: float) -> Ranks:
    """Meet the other processes that torchrun started. Raises ConfigError where this is not what torchrun starts, or
    where GPUs are shared.
    """
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        text = f"is {os.environ['WORLD_SIZE']} without {', '.join(missing)}: start several processes with torchrun"
        raise ConfigError([Problem("WORLD_SIZE", f"{text}, and unset it for one")])
    gpus, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if local < gpus:
        torch.cuda.set_device(local)
    _meet("cpu:gloo,cuda:nccl" if gpus else "gloo", timedelta(seconds=timeout_seconds))
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_FOREVER))
    owns = ranks.gather(local < gpus)
    if any(owns) and not all(owns):
        without = ", ".join(str(rank) for rank, own in enumerate(owns) if not own)
        text = f"ranks {without} have no GPU of their own: start as many processes on a node as it has GPUs"
        raise ConfigError([Problem("--nproc-per-node", f"{text}; with CUDA_VISIBLE_DEVICES= all of them use CPUs")])
    logger.info("rank %d of %d is there", ranks.rank, ranks.size)
    return ranks
