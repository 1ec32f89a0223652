"""Processes as torchrun would start them, forked from a server that has imported PyTorch, for tests of this folder."""

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

import torch


def _run(fn, args, rank, size, port, folder):
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    torch.set_num_threads(1)
    given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in given.items()})
    fn(*args)


class Launched:
    """`size` processes that run `fn(*args)`; `wait()` gives `[(exit status, stdout, stderr), ...]` by rank."""

    def __init__(self, folder: Path, fn, *args, size: int = 2):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "train.run"])
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ranks = [context.Process(target=_run, args=(fn, args, r, size, port, folder)) for r in range(size)]
        for process in self.ranks:
            process.start()

    def wait(self, limit: float = 60.0) -> list[tuple[int | None, str, str]]:
        end = time.monotonic() + limit
        for process in self.ranks:
            process.join(max(0.0, end - time.monotonic()))
        read = lambda r, name: (self.folder / f"{r}.{name}").read_text()  # noqa: E731
        return [(p.exitcode, read(r, "out"), read(r, "err")) for r, p in enumerate(self.ranks)]

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()


def statuses(done):
    return [status for status, _, _ in done]


def errors(done):
    """What all ranks wrote to stderr, without the empty ones."""
    return [err for _, _, err in done if err.strip()]
