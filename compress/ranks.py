"""A run in several processes, as `torchrun` and `accelerate launch` start them: the first does it, the others help.

A helper knows nothing of the run. It asks the launcher's store (MASTER_ADDR, MASTER_PORT) now and then for the next
piece of work, and when the run has come to one, for hours not, finds it in a file: a function that loads what is
needed and returns what is then called in all processes at once. So everything is read, hashed, written, judged and
printed by one process, and none runs out of time while it waits. A process group exists only during such work, so that
nothing else takes itself for one of several.

Left out: machines that do not share the folder of the output, and pruning in several processes.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from compress.errors import CompressError, ProcessLost
from compress.progress import silence

__all__ = ["among_ranks", "environment_alone", "helped", "launched", "processes", "processes_here"]

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
POLL = 0.2  # seconds between two looks into the store
PATIENCE = timedelta(hours=6)  # within a piece of work, where one process may be writing a large state
PARTING = 10.0  # seconds for the others to notice an end before the process goes that may hold the store
ENDING = 60.0  # seconds for the first process to end in order before one that has failed goes, and takes all with it
FAILED = "failed"

Work = Callable[[], Callable[[], object]]  # loads, and returns what all do at once


def launched() -> bool:
    """Whether a launcher has started this process, with others or alone; what a cluster sets is not all of it."""
    return all(name in os.environ for name in VARIABLES)


def processes() -> int:
    """How many there are, this one included."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def processes_here() -> int:
    """How many of them are on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else 1


def environment_alone() -> dict[str, str]:
    """This process's environment for a process that is nobody's rank."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


def among_ranks(run: Callable[[], int]) -> int:
    """The exit code of a run, in the first process; any other helps until it ends, however it does, and returns 0."""
    if not launched():
        return run()
    store = _store()
    if _rank():
        return _help(store)
    try:
        return run()
    finally:
        _hand_out(store, "")
        until = time.monotonic() + PARTING
        while store.add("left", 0) < _others() and time.monotonic() < until:
            time.sleep(POLL)


@contextmanager
def helped(work: Work, folder: Path, device: torch.device) -> Iterator[None]:
    """All processes at once: the body here, `work` in the others; just the body where there are no others.

    Args:
        work: can be pickled; all that it returns are called when all are ready, and may use the process group.
        folder: where it is left for the others.
        device: of this process; another process's is that of its own number.

    Raises:
        CompressError: another process failed.
        ProcessLost: another process failed for a reason of its own, or is gone.
    """
    if not launched():
        yield
        return
    store = _store()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "work.pt"
    torch.save((work, device.type), file)
    turn = _hand_out(store, str(file))
    while store.add(f"ready {turn}", 0) < _others():
        _raise_failure(store)
        time.sleep(POLL)
    with _together(store, turn):
        yield


def _rank() -> int:
    return int(os.environ["RANK"])


def _others() -> int:
    return processes() - 1


@cache
def _store() -> Store:
    store, _, _ = next(rendezvous("env://"))
    return PrefixStore("compress", store)


def _hand_out(store: Store, file: str) -> int:
    """Tell the others where the next piece of work lies, "" when there is none; the number of this turn."""
    turn = store.add("turns", 1)
    store.set(f"turn {turn}", file)
    return turn


def _receive(store: Store, turn: int) -> str:
    """What is handed out in a turn, whenever that is."""
    _is_handed_out(store, turn, float("inf"))
    return store.get(f"turn {turn}").decode()


def _is_handed_out(store: Store, turn: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (found := store.check([f"turn {turn}"])) and time.monotonic() < until:
        time.sleep(POLL)
    return found


def _help(store: Store) -> int:
    """Take part in one piece of work after the other; the first process tells what goes wrong, and is waited for."""
    silence()
    turn = 1
    try:
        while file := _receive(store, turn):
            try:
                _take_part(store, turn, file)
            except Exception as error:
                if _is_handed_out(store, turn + 1, ENDING) and isinstance(error, CompressError):
                    return 0
                raise
            turn += 1
        return 0
    finally:
        with suppress(RuntimeError):  # the store may be gone
            store.add("left", 1)


def _take_part(store: Store, turn: int, file: str) -> None:
    with _reported(store):
        work, device = torch.load(file, weights_only=False, mmap=True)
        if device != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        act = work()
    store.add(f"ready {turn}", 1)
    with _together(store, turn):
        act()


@contextmanager
def _together(store: Store, turn: int) -> Iterator[None]:
    """A process group: what fails within is told before it is gone, and so is what fails while it is made."""
    with _reported(store), _group(store, turn), _reported(store):
        yield


@contextmanager
def _group(store: Store, turn: int) -> Iterator[None]:
    own = PrefixStore(f"group {turn}", store)
    dist.init_process_group(store=own, rank=_rank(), world_size=processes(), timeout=PATIENCE)
    try:
        yield
    finally:
        if dist.is_initialized():  # accelerate may have ended it with the training
            dist.destroy_process_group()


@contextmanager
def _reported(store: Store) -> Iterator[None]:
    """Leave to the others what goes wrong here.

    Raises:
        CompressError: in place of a broken connection, what has gone wrong in another process.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError):
            _raise_failure(store)
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():  # whose errors have no class
            raise ProcessLost("a process of this run is gone: run the same command, it goes on from there") from error
        known = isinstance(error, CompressError)
        told = error if known else ProcessLost(f"process {_rank()} of this run failed: {error!r}")
        store.set(FAILED, pickle.dumps(told).hex())
        raise


def _raise_failure(store: Store) -> None:
    if store.check([FAILED]):
        raise pickle.loads(bytes.fromhex(store.get(FAILED).decode()))
