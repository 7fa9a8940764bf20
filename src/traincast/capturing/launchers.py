"""What starts the processes of a script's ranks: this process is one of them, and runs what that one would run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch.multiprocessing

from traincast.capturing.errors import find_user_line
from traincast.capturing.patches import Patches
from traincast.utils.errors import TraincastError

_RANK_NAMES = ("rank", "local_rank")


def install_launchers(patches: Patches, local_rank: int) -> None:
    """Answers `spawn`, pools and processes of ranks until the patches are undone."""
    patches.set_everywhere(torch.multiprocessing, "spawn", _make_spawn(local_rank))
    context, default = multiprocessing.context.BaseContext, multiprocessing.get_context()

    @patches.wrap(context, "Pool")
    def make_pool(pool: Any, self: Any, processes: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if processes is not None and processes > 1 and processes == _count_local_ranks():
            return _RankPool(local_rank, processes)
        return pool(self, processes, *args, **kwargs)

    patches.set_everywhere(multiprocessing, "Pool", lambda *args, **kwargs: default.Pool(*args, **kwargs))
    kinds: set[Any] = {type(multiprocessing.get_context(name)) for name in multiprocessing.get_all_start_methods()}
    for kind in kinds:
        patches.set_attribute(kind, "Process", _make_process(kind.__dict__.get("Process", kind.Process), local_rank))


def _count_local_ranks() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def _make_spawn(local_rank: int) -> Callable[..., None]:
    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> None:
        if nprocs != (node := _count_local_ranks()):
            raise TraincastError(
                f"{find_user_line()}: spawn starts {nprocs} processes, but the capture has {node} GPUs on a node; "
                "start torch.cuda.device_count() of them, or capture that many"
            )
        fn(local_rank, *args)

    return spawn


class _RankPool:
    """A `multiprocessing.Pool` with a process per rank: of the calls it is given, this rank runs its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks, self._calls = rank, ranks, 0

    def __enter__(self) -> _RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def map(self, func: Callable[[Any], Any], iterable: Iterable[Any], *rest: Any) -> list[Any]:
        """Runs this rank's call; other ranks are taken to give what it gives."""
        return self.starmap(func, ((item,) for item in iterable))

    def starmap(self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], *rest: Any) -> list[Any]:
        """As `map`, with several arguments."""
        calls = list(iterable)
        return [func(*calls[self._rank % len(calls)])] * len(calls) if calls else []

    def apply_async(
        self, func: Callable[..., Any], args: Any = (), kwds: Any = None, callback: Any = None,
        error_callback: Any = None,
    ) -> SimpleNamespace:  # fmt: skip
        """Runs the call whose turn is this rank's."""
        self._calls += 1
        return _make_done(func(*args, **(kwds or {})) if self._calls == self._rank + 1 else None)

    def map_async(self, func: Callable[[Any], Any], iterable: Iterable[Any], *rest: Any) -> SimpleNamespace:
        """As `map`."""
        return _make_done(self.map(func, iterable))

    def close(self) -> None:
        """Nothing to end."""

    join = terminate = close


def _make_done(value: Any) -> SimpleNamespace:
    """The result of a call that has run, as pools give it."""
    known = {"get": value, "wait": None, "ready": True, "successful": True}
    return SimpleNamespace(**{name: lambda timeout=None, given=given: given for name, given in known.items()})


def _make_process(original: Any, local_rank: int) -> Any:
    """A process that is told its rank runs here if that is this one's, and else not at all."""

    def make(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("kwargs") or {}
        told = next((given[name] for name in _RANK_NAMES if type(given.get(name)) is int), None)
        if told is None or _count_local_ranks() == 1:
            return original(*args, **kwargs)
        return _RankProcess(kwargs.get("target"), kwargs.get("args") or (), given, runs=told == local_rank)

    return staticmethod(make)


class _RankProcess:
    """A `multiprocessing.Process` of one rank."""

    exitcode, daemon, pid = 0, False, 0

    def __init__(self, target: Any, args: Any, kwargs: Any, *, runs: bool) -> None:
        self._target, self._args, self._kwargs, self._runs = target, args, kwargs, runs

    def start(self) -> None:
        """Runs what the process would."""
        if self._runs and self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        """It has run."""

    close = terminate = kill = join

    def is_alive(self) -> bool:
        """It has run."""
        return False
