"""Four gloo processes that run functions of test modules, started once and used by all tests of this folder."""

import contextlib
import datetime
import functools
import multiprocessing as mp
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from core.errors import UserError
from parallel.mesh import Mesh, build_mesh

SIZE = 4
TIMEOUT = datetime.timedelta(seconds=40)


@functools.cache
def mesh_of(ranks: tuple[int, ...] | None = None, **sizes: int) -> Mesh | None:
    """The mesh of these sizes over `ranks` (all four by default), made once per process. Collective over all four."""
    return build_mesh(sizes, "cpu", ranks=ranks)


def _serve(rank: int, size: int, store: str, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
    while (task := pipe.recv()) is not None:
        fn, args = task
        try:
            pipe.send((True, fn(*args)))
        except BaseException as error:  # noqa: B036 - DCP raises BaseException; the parent judges
            kind = type(error) if isinstance(error, UserError) else None
            pipe.send((False, (kind, str(error), traceback.format_exc())))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


class Pool:
    """`run(fn, *args)` calls a module-level function on every process and returns the results by rank."""

    def __init__(self, size: int = SIZE):
        self.size, self.workers, self.pipes = size, [], []

    def start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "train.run"])
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, self.size, str(store), theirs), daemon=True)
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(ours)

    def run(self, fn, *args, timeout: float = 90.0) -> list:
        """Results of `fn(*args)` by rank. A UserError that all processes raise alike is raised; any other failure is an
        AssertionError with the traceback of the first process, and the pool starts anew."""
        if not self.workers:
            self.start()
        for pipe in self.pipes:
            pipe.send((fn, args))
        answers, end = {}, time.monotonic() + timeout
        while len(answers) < self.size and time.monotonic() < end:
            for rank, pipe in enumerate(self.pipes):
                if rank not in answers and pipe.poll(0.005):
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        answers[rank] = (False, (None, "died", f"process {rank} died"))
            if any(not ok for ok, _ in answers.values()):
                end = min(end, time.monotonic() + 3)  # the others may wait for the failed one
        if len(answers) == self.size and all(ok for ok, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.size)]
        failed = {rank: why for rank, (ok, why) in sorted(answers.items()) if not ok}
        if len(failed) == self.size and len({(kind, text) for kind, text, _ in failed.values()}) == 1:
            kind, text, _ = failed[0]
            if kind is not None:
                raise kind(text)
        self.stop(kill=True)
        if not failed:
            raise AssertionError(f"no answer in {timeout} s from ranks {sorted(set(range(self.size)) - set(answers))}")
        rank, (_, _, trace) = next(iter(failed.items()))
        raise AssertionError(f"rank {rank} of {sorted(failed)} failed:\n{trace}")

    def stop(self, *, kill: bool = False) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for worker in self.workers:
            if kill:
                worker.kill()
            worker.join(timeout=5)
            if worker.is_alive():
                worker.kill()
        if self.workers:
            self.folder.cleanup()
        self.workers, self.pipes = [], []
