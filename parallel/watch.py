"""What ends all processes of a run when one of them fails, and says why once.

Every process keeps a connection to the first one, served by a thread. The system closes it when the process ends, so
a killed one is noticed at once, and one that is merely slow never is. Who fails, or notices it first, notes that in
the store (`compare_set`); the first note counts, and the first process hands it to all. A process that is then still
in a collective, which may never end, is ended after GRACE_S seconds.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from core import compat
from core.errors import UserError, exit_status

GRACE_S = 8.0  # that a process has to end by itself after another one failed
NEWS_S = 5.0  # that a process waits for news of another's failure before it takes its own for the first
SETTLE_S = 1.5  # that the first process lets others end before it
ANSWER_S = 3.0  # that the others have to say where they are
CONNECT_S, JOIN_S = 60.0, 600.0
RECORDS = "collectives_rank_"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run ends: the rank that failed, the rank `by` which shows it, everyone's exit status.

    `text` is what is shown where no exception tells it. `late`: a collective took too long.
    """

    rank: int
    by: int
    status: int
    text: str | None = None
    late: bool = False


@dataclasses.dataclass
class Peer:
    """The other end of a connection: who it is, whether it is done with its work, and what it sent of a line."""

    rank: int
    name: str = ""
    done: bool = False
    received: bytes = b""


class Watch:
    """The connections of one process, and the thread that serves them."""

    def __init__(self, store, rank: int, size: int, address: str):
        """Connects to the first process, which listens at `address`.

        Args:
            store: of torch.distributed; the thread works on a clone.

        Raises:
            UserError: no connection.
        """
        self.store, self.rank, self.size = store.clone(), rank, size
        self.lock = threading.Lock()
        self.failure: Failure | None = None
        self.leaving = self.said_so = False
        self.joined, self.failed, self.told, self.finished = (threading.Event() for _ in range(4))
        self.limit_s: float | None = None  # of a collective; None: there is no group yet
        self.traces = Path()
        self.first_seen: dict[int, float] = {}
        self.selector = selectors.DefaultSelector()
        self.waker, woken = socket.socketpair()
        self.selector.register(woken, selectors.EVENT_READ, "wake")
        if rank == 0:
            self._listen()
        else:
            self._connect(address)
        # A forked child, such as a worker that reads data, would keep the connection of a dead parent open.
        os.register_at_fork(after_in_child=self._close)
        self.thread = threading.Thread(target=self._serve, name="watch", daemon=True)
        self.thread.start()

    # --- for the main thread ------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Waits until every process is connected. Raises UserError naming those that do not come."""
        if not self.joined.wait(JOIN_S):
            there = {0, *(peer.rank for _, peer in self._peers())}
            missing = _runs([r for r in range(self.size) if r not in there]) if self.rank == 0 else "some"
            raise UserError(f"not all of {self.size} processes started within {JOIN_S:g} s; missing ranks: {missing}")

    def limit(self, seconds: float, traces: Path) -> None:
        """From now on collectives that take longer fail the run, and leave their records in the folder `traces`."""
        self.limit_s, self.traces = seconds, traces
        self._wake()

    def leave(self) -> None:
        """Waits until every process is done with its work. Ends this one if another fails until then."""
        self.leaving = True
        self._wake()
        while not self.finished.wait(0.05):
            if self.failure is not None:
                self._end_quietly(self.failure)
        self.thread.join()
        self._close()

    def end(self, error: BaseException) -> None:
        """Ends the process for an exception: shows it if it is the first failure of all, and tells the others."""
        if not isinstance(error, UserError | KeyboardInterrupt):
            self.failed.wait(NEWS_S)  # a broken connection may be what another's end looks like from here
        own = Failure(self.rank, self.rank, status_of(error))
        failure = self.note(own)
        if failure == own:
            show(error, f"rank {self.rank} of {self.size}")
        self._end_quietly(failure)

    def _end_quietly(self, failure: Failure) -> None:
        self.told.wait(GRACE_S)
        end_process(failure.status)

    # --- failures -----------------------------------------------------------------------------------------------------

    def note(self, failure: Failure) -> Failure:
        """Notes a failure in the store and returns the one that came first, which counts."""
        with self.lock:
            if self.failure is None:
                with contextlib.suppress(RuntimeError):  # the store may have gone with the process that held it
                    text = self.store.compare_set("failure", "", json.dumps(dataclasses.asdict(failure)))
                    failure = Failure(**json.loads(text))
        return self._learn(failure)

    def _learn(self, failure: Failure) -> Failure:
        with self.lock:
            if self.failure is None:
                self.failure = failure
        self.failed.set()
        self._wake()
        return self.failure

    def _wake(self) -> None:
        self.waker.send(b"x")

    def _enforce(self, failure: Failure) -> None:
        """Hands a failure on, shows what no exception shows, and ends the process if it does not end by itself."""
        if self.rank == 0 or failure.by == self.rank:
            self._tell(dataclasses.asdict(failure))
        text = self._account() if failure.late else failure.text
        if failure.by == self.rank and text is not None:
            print(f"error: {text}", file=sys.stderr, flush=True)
        self._linger()
        self.told.set()
        time.sleep(ANSWER_S + 1 if failure.late else GRACE_S)  # of a late one, who shows it asks all others
        end_process(failure.status)

    def _linger(self) -> None:
        """The first process, which may hold the store, lets those go first that end by themselves."""
        end = time.monotonic() + SETTLE_S
        while self.rank == 0 and self._peers() and (left := end - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if isinstance(key.data, Peer) and not _received(key.fileobj):
                    self.selector.unregister(key.fileobj)
                elif key.data == "wake":
                    key.fileobj.recv(4096)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self.finished.is_set() and self.failure is None:
                for key, _ in self.selector.select(self._pause()):
                    self._read(key.fileobj, key.data)
                self._take_leave()
                self._find_late()
        except Exception:  # the run goes on, but not without a word
            traceback.print_exc()
            print(f"rank {self.rank}: failures of other processes are no longer noticed", file=sys.stderr)
        if self.failure is not None:
            self._enforce(self.failure)

    def _pause(self) -> float | None:
        """Seconds between looks at collectives."""
        return None if self.limit_s is None else min(30.0, max(0.1, self.limit_s / 10))

    def _listen(self) -> None:
        listener, self.token = _listener(), secrets.token_hex(16)
        self.selector.register(listener, selectors.EVENT_READ, "listen")
        about = {"port": listener.getsockname()[1], "token": self.token, "name": own_name(0)}
        self.store.set("watch", json.dumps(about))

    def _connect(self, address: str) -> None:
        about = json.loads(self.store.get("watch"))
        try:
            sock = socket.create_connection((address, about["port"]), timeout=CONNECT_S)
        except OSError as error:
            where = f"{address} (MASTER_ADDR), port {about['port']}"
            raise UserError(f"rank {self.rank}: no connection to rank 0 at {where}: {error}") from None
        sock.settimeout(None)
        _keep_alive(sock)
        _send(sock, {"token": about["token"], "rank": self.rank, "name": own_name(self.rank)})
        self.selector.register(sock, selectors.EVENT_READ, Peer(0, about["name"]))

    def _peers(self) -> list[tuple[socket.socket, Peer]]:
        return [(key.fileobj, key.data) for key in self.selector.get_map().values() if isinstance(key.data, Peer)]

    def _close(self) -> None:
        for sock in [self.waker, *(key.fileobj for key in list(self.selector.get_map().values()))]:
            sock.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for sock, _ in self._peers():
            _send(sock, message)

    def _read(self, sock: socket.socket, source: Peer | str) -> None:
        if source == "wake":
            sock.recv(4096)
        elif source == "listen":
            new, _ = sock.accept()
            _keep_alive(new)
            self.selector.register(new, selectors.EVENT_READ, Peer(-1))
        elif data := _received(sock):
            *lines, source.received = (source.received + data).split(b"\n")
            for line in lines:
                self._hear(sock, source, json.loads(line))
        else:
            self.selector.unregister(sock)
            if source.rank >= 0 and not source.done:
                self.note(Failure(source.rank, self.rank, 1, f"{source.name} {GONE}"))

    def _hear(self, sock: socket.socket, peer: Peer, message: dict[str, Any]) -> None:
        if peer.rank < 0 and message.get("token") == self.token:
            peer.rank, peer.name = message["rank"], message["name"]
            if sum(p.rank >= 0 for _, p in self._peers()) == self.size - 1:
                self._tell({"joined": self.size})
                self.joined.set()
        elif peer.rank < 0:
            self.selector.unregister(sock)  # a stranger
        elif "joined" in message:
            self.joined.set()
        elif "done" in message:
            peer.done = True
        else:
            self._learn(Failure(**message))

    def _take_leave(self) -> None:
        """Ends the watch when all are done: the first process knows, and tells the others."""
        if not self.leaving or self.failure is not None:
            return
        peers = self._peers()
        complete = sum(peer.done for _, peer in peers) == self.size - 1 if self.rank == 0 else False
        if complete or (self.rank > 0 and not self.said_so):
            self.said_so = True
            self._tell({"done": self.rank})
        if complete or (self.rank > 0 and any(peer.done for _, peer in peers)):
            self.finished.set()

    # --- collectives that take too long -------------------------------------------------------------------------------

    def _find_late(self) -> None:
        if self.limit_s is None or self.failure is not None:
            return
        now = time.monotonic()
        self.first_seen = {c.record: self.first_seen.get(c.record, now) for c in compat.pending_collectives()}
        if any(now - since > self.limit_s for since in self.first_seen.values()):
            self.note(Failure(self.rank, self.rank, 1, late=True))

    def _account(self) -> str:
        """Says where this process is and writes its record of collectives; who shows the failure asks the others."""
        written = compat.dump_collectives(self.traces / f"{RECORDS}{self.rank}")
        with contextlib.suppress(RuntimeError):  # the store went with the process that held it
            self.store.set(f"place {self.rank}", place())
        if self.failure.by != self.rank:
            return ""
        end, places = time.monotonic() + ANSWER_S, {}
        for rank in range(self.size):
            places.setdefault(self._place_of(rank, end), []).append(rank)
        lines = [f"a collective took longer than {self.limit_s:g} s"]
        lines += [f"  rank{'s' * (len(ranks) > 1)} {_runs(ranks)}: {text}" for text, ranks in places.items()]
        if written:
            # Gloo's record does not name its groups, without which the tool fails (PyTorch 2.13).
            lines.append(f"  what came before, of every rank: {self.traces}/{RECORDS}*")
            lines.append(f"  (those of NCCL are for torchfrtrace --prefix {RECORDS} {self.traces})")
        return "\n".join(lines)

    def _place_of(self, rank: int, end: float) -> str:
        with contextlib.suppress(RuntimeError):
            while not self.store.check([f"place {rank}"]):
                if time.monotonic() > end:
                    return "no answer"
                time.sleep(0.05)
            return self.store.get(f"place {rank}").decode()
        return "no answer"


GONE = "ended without a word: killed (as the system does when memory runs out), crashed, or its machine is gone"


# --- sockets ----------------------------------------------------------------------------------------------------------


def _listener() -> socket.socket:
    """A socket at a free port, for IPv6 too where there is any."""
    with contextlib.suppress(OSError):
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _keep_alive(sock: socket.socket) -> None:
    """Has the system notice within a minute that the other machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Sends one line of JSON. That a connection is gone is noticed where it is read."""
    with contextlib.suppress(OSError):
        sock.sendall(json.dumps(message).encode() + b"\n")


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


# --- words ------------------------------------------------------------------------------------------------------------


def own_name(rank: int) -> str:
    """This process in words."""
    return f"rank {rank} (process {os.getpid()} on {socket.gethostname()})"


def place() -> str:
    """Where this process is: the oldest collective that it waits for, else the line its main thread is at."""
    if waiting := compat.pending_collectives():
        return f"waiting for {waiting[0].text}"
    frame = sys._current_frames().get(threading.main_thread().ident)
    inner = frame
    while frame is not None and "site-packages" in frame.f_code.co_filename:
        frame = frame.f_back
    frame = inner if frame is None else frame
    return "in no collective" + ("" if frame is None else f", but at {frame.f_code.co_filename}:{frame.f_lineno}")


def _runs(ranks: list[int]) -> str:
    """`[0, 1, 2, 5] -> "0-2, 5"`."""
    out: list[list[int]] = []
    for rank in ranks:
        if out and out[-1][-1] == rank - 1:
            out[-1].append(rank)
        else:
            out.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in out)


def status_of(error: BaseException) -> int:
    """The exit status for an exception, as `core.errors.exit_status` has it; 1 for one with a traceback."""
    if isinstance(error, UserError | OSError):
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def show(error: BaseException, who: str) -> None:
    """An exception on stderr: what is a user's to fix in a line, else with its traceback."""

    def again():
        raise error

    if isinstance(error, UserError | OSError | KeyboardInterrupt):
        exit_status(again)
    else:
        print(f"{who} failed:", file=sys.stderr)
        traceback.print_exception(error)


def end_process(status: int) -> None:
    """Ends the process at once: collectives that hang would keep an ordinary exit from ending."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
