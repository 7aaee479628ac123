"""Several ranks of a policy for a test: forked processes, so that nothing is imported again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

_LIMIT_S = 60.0


def on_ranks(size: int, folder: Path, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` returns on each rank; it is given the mesh. Raises AssertionError with a rank's traceback."""
    store = folder / f"store-{os.urandom(4).hex()}"
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(size)]
    ranks = [fork.Process(target=_rank, args=(r, size, store, work, pipes[r][1])) for r in range(size)]
    for rank in ranks:
        rank.start()
    try:
        results = [receiver.recv() if receiver.poll(_LIMIT_S) else (False, "no answer") for receiver, _ in pipes]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    failures = [told for good, told in results if not good]
    assert not failures, "\n".join(failures)
    return [told for _, told in results]


def _rank(rank: int, size: int, store: Path, work: Callable[[Any], Any], sender: Any) -> None:
    try:
        shared = dist.FileStore(str(store), size)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=timedelta(seconds=_LIMIT_S))
        answer = True, work(init_device_mesh("cpu", (size,)))
    except BaseException:  # noqa: BLE001 - the test tells it
        answer = False, f"rank {rank}: {traceback.format_exc()}"
    sender.send(answer)
    if answer[0]:
        with contextlib.suppress(RuntimeError):  # of a rank that has gone
            dist.barrier()  # the others may still wait for a word of this one
    os._exit(0)  # without what pytest would do at the end of a process
