"""The start and the common end of several processes. They fork from a server; no test uses the pool's group."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.errors import UserError
from parallel.launch import Place, agreed, check_policy, device_of, gathered, place_from, processes, start, together
from parallel.mesh import single
from parallel.parent import LATER_S, parent_watched
from tests.parallel.launched import errors, statuses
from tests.parallel.pool import mesh_of

ROOT = Path(__file__).parents[2]
ENV = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


# --- the environment --------------------------------------------------------------------------------------------------


def test_the_place_is_what_torchrun_says():
    assert place_from({}) == place_from({"MASTER_ADDR": "x"}) == Place(0, 1, 0)
    assert place_from(ENV) == Place(1, 2, 1)
    assert place_from(ENV | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == Place(5, 8, 1)
    assert place_from({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == Place(0, 1, 0)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"RANK": None, "MASTER_ADDR": None}, ["RANK is missing", "MASTER_ADDR is missing"]),
        ({"LOCAL_RANK": None, "MASTER_PORT": None}, ["LOCAL_RANK is missing", "MASTER_PORT is missing"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE is missing"]),
        ({"RANK": "2"}, ["RANK is 2, expected less than WORLD_SIZE, which is 2"]),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK is 1, expected less than LOCAL_WORLD_SIZE"]),
        ({"RANK": "x", "MASTER_PORT": "-3"}, ["RANK is 'x', expected a whole number", "MASTER_PORT is '-3'"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0, expected at least 1"]),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_with_every_fault(change, said):
    env = {k: v for k, v in (ENV | change).items() if v is not None}
    with pytest.raises(UserError) as caught:
        place_from(env)
    assert all(words in str(caught.value) for words in [*said, "torchrun"])


def test_each_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    place = Place(5, 8, 1)
    assert device_of(None, Place()) == device_of("cpu", place) == torch.device("cpu")
    with pytest.raises(UserError, match="'cuda' is not available here"):
        device_of("cuda", place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for asked in (None, "cuda"):
        assert device_of(asked, place) == torch.device("cuda:1"), "not the rank, which is 5"
    assert device_of("cuda:1", Place()) == torch.device("cuda:1")
    with pytest.raises(UserError, match="'cuda:1' with 8 processes: each takes the GPU of its LOCAL_RANK"):
        device_of("cuda:1", place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match="LOCAL_RANK is 3, but this process sees 2 GPUs .CUDA_VISIBLE_DEVICES is 4,5."):
        device_of("cuda", Place(3, 4, 3))


def test_symmetric_memory_needs_its_policy_before_the_start(monkeypatch):
    check_policy(False, {"NCCL_CTA_POLICY": "1"})
    check_policy(True, {})
    check_policy(True, {"NCCL_CTA_POLICY": "2"})
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: pytest.fail("started"))
    monkeypatch.setenv("NCCL_CTA_POLICY", "1")
    with pytest.raises(UserError, match="fsdp_symmetric_memory needs NCCL_CTA_POLICY=2 before .* it is '1'"):
        start(Place(0, 2, 0), "cpu", symmetric_memory=True)


def test_a_process_alone_has_no_group_and_keeps_its_exceptions():
    with processes("cpu") as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu")) and not dist.is_initialized()
    with pytest.raises(KeyError), processes("cpu"):
        raise KeyError("x")


# --- several processes ------------------------------------------------------------------------------------------------


def _sum(patience):
    with processes("cpu") as world:
        x = torch.tensor([world.rank + 1.0])
        dist.all_reduce(x)
        print(world.rank, world.size, world.device, dist.get_backend(), x.item())
        time.sleep(patience * world.rank)
    print("left", dist.is_initialized())


def test_processes_have_a_group_and_leave_it_together(launched):
    done = launched(_sum, 1.0, size=3).wait()
    assert statuses(done) == [0, 0, 0] and errors(done) == []
    for rank, (_, out, _) in enumerate(done):
        assert out.splitlines() == [f"{rank} 3 cpu gloo 6.0", "left False"]


def _fail(kind):
    with processes("cpu", timeout_s=300) as world:
        x = torch.ones(1)
        if world.rank == 1:
            if kind == "own":
                dist.all_reduce(x, async_op=True)  # an ordinary exit would wait for it
                raise ValueError("this rank's own fault")
            if kind == "user":
                raise UserError("a setting of this rank")
            if kind == "interrupt":
                raise KeyboardInterrupt
            if kind == "stop":
                sys.exit(143)
            if kind == "exit":
                os._exit(7)
            if kind == "kill" and os.fork() == 0:  # a worker that lives on keeps the parent's connections open
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            sys.exit(143)
        dist.all_reduce(x)
        dist.all_reduce(x)


@pytest.mark.parametrize("size", [2, 4])
def test_one_ranks_exception_ends_all_and_is_shown_once(launched, size):
    done = launched(_fail, "own", size=size).wait()
    assert statuses(done) == [1] * size
    (shown,) = errors(done)
    assert done[1][2] == shown and "rank 1 of" in shown and shown.rstrip().endswith("ValueError: this rank's own fault")
    assert shown.count("Traceback") == 1 and "in _fail" in shown


def test_what_a_user_can_mend_is_one_line(launched):
    done = launched(_fail, "user", size=3).wait()
    assert statuses(done) == [2, 2, 2] and errors(done) == ["error: a setting of this rank\n"]
    done = launched(_fail, "interrupt").wait()
    assert statuses(done) == [130, 130] and errors(done) == ["interrupted\n"]


def test_an_exit_that_all_agree_on_is_no_failure(launched):
    done = launched(_fail, "stop", size=3).wait()
    assert statuses(done) == [143, 143, 143] and errors(done) == []


@pytest.mark.parametrize("kind", ["kill", "exit"])
def test_a_process_that_ends_without_a_word_is_named(launched, kind):
    begun = time.monotonic()
    done = launched(_fail, kind, size=4).wait()
    assert statuses(done) == [1, -signal.SIGKILL if kind == "kill" else 7, 1, 1]
    (shown,) = errors(done)
    assert re.fullmatch(r"error: rank 1 .process \d+ on .*. ended without a word: killed .*\n", shown)
    assert time.monotonic() - begun < 30


def _first_dies(hang):
    with processes("cpu", timeout_s=300) as world:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while hang:
            time.sleep(0.1)
        dist.barrier()


@pytest.mark.parametrize("hang", [False, True])
def test_the_death_of_the_first_process_is_noticed_too(launched, monkeypatch, hang):
    """It holds the store here, so the others cannot agree on who says it."""
    done = launched(_first_dies, hang).wait()
    assert statuses(done)[0] == -signal.SIGKILL and statuses(done)[1] == 1
    assert "rank 0 (process" in done[1][2] and "ended without a word" in done[1][2]


def _alike(place_only):
    with together() as place:
        if place_only:
            raise UserError("the recipe is wrong on every rank")
        start(place, "cpu")
        raise RuntimeError("the same on every rank")


@pytest.mark.parametrize("place_only", [True, False])
def test_what_all_ranks_fail_by_is_shown_by_one(launched, place_only):
    done = launched(_alike, place_only, size=3).wait()
    assert statuses(done) == [2 if place_only else 1] * 3 and len(errors(done)) == 1


def _late(folder):
    with processes("cpu", timeout_s=2.0, traces=folder) as world:
        x = torch.ones(3)
        dist.all_reduce(x)
        if world.rank == 1:
            _sleeps_here()
        dist.all_reduce(x)


def _sleeps_here():
    time.sleep(60)


def test_a_collective_that_takes_too_long_says_where_every_rank_is(launched, tmp_path):
    done = launched(_late, tmp_path / "records", size=3).wait()
    assert statuses(done) == [1, 1, 1]
    (shown,) = errors(done)
    first, *places = shown.splitlines()
    assert first == "error: a collective took longer than 2 s"
    waits, sleeps, record, tool = places
    assert waits.startswith("  ranks 0, 2: waiting for gloo:all_reduce of [[3]] in group") and "number 2" in waits
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "time.sleep(60)" in text)
    assert sleeps == f"  rank 1: in no collective, but at {__file__}:{line}"
    assert record.endswith(f"{tmp_path}/records/collectives_rank_*") and "torchfrtrace" in tool
    assert sorted(p.name for p in (tmp_path / "records").iterdir()) == [f"collectives_rank_{r}" for r in range(3)]


def _slow():
    with processes("cpu", timeout_s=1.0) as world:
        for _ in range(3):
            time.sleep(0.6 * world.rank)
            dist.barrier()
        time.sleep(2.0 * world.rank)  # no collective, so no limit


def test_slow_is_not_late(launched):
    assert statuses(launched(_slow).wait()) == [0, 0]


SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from parallel.launch import processes
signal.signal(signal.SIGTERM, lambda *_: None)  # as a run that stops after its step
with processes("cpu", timeout_s=600) as world:
    for step in range(10**6):
        if step == 5 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
"""


def torchrun(folder, script, count):
    """Arguments of `subprocess` for a script on `count` processes."""
    (folder / "run.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {"args": [*command, str(folder / "run.py")], "env": env, "text": True, "cwd": folder}


def test_sigkill_under_torchrun(tmp_path):
    begun = time.monotonic()
    done = subprocess.run(**torchrun(tmp_path, SCRIPT, 3), capture_output=True, timeout=90)
    assert done.returncode != 0 and time.monotonic() - begun < 45, "torchrun itself would kill after 30 s"
    assert len(re.findall(r"error: rank 1 .process \d+ on .*. ended without a word", done.stderr)) == 1
    assert "GLHF" not in done.stderr, "what gloo says of it is not shown"


# --- torchrun itself is killed ----------------------------------------------------------------------------------------


def _orphan(out, first, leaves):
    """A process whose parent, which is told its number, is killed by it; writes what it is told."""
    if (child := os.fork()) != 0:
        os._exit(0 if os.waitpid(child, 0) else 1)
    said = []
    with parent_watched(said.append, first=first, every_s=0.02):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.0 if leaves else LATER_S / 2)
        early = len(said)
        time.sleep(0.0 if leaves else LATER_S)
    out.with_suffix(".part").write_text(f"{early} {said}")
    os.replace(out.with_suffix(".part"), out)
    os._exit(0)


@pytest.mark.parametrize("first, leaves, early, all_", [(True, False, 1, 1), (False, False, 0, 1), (False, True, 0, 0)])
def test_the_death_of_a_parent_is_told_once(launched, tmp_path, first, leaves, early, all_):
    """The others of a machine hear of it later, and not at all where they are done by then."""
    out = tmp_path / "said"
    (parent,) = launched(_orphan, out, first, leaves, size=1).ranks
    end = time.monotonic() + 30
    while not out.exists() and time.monotonic() < end:
        time.sleep(0.05)
    text = f"'torchrun (process {parent.pid}), which started this run, is gone'" if all_ else ""
    assert out.read_text() == f"{early} [{text}]"


ENDLESS = """
import os, signal, sys, time, torch, torch.distributed as dist
from parallel.launch import processes
heard = []
if sys.argv[1:] == ["saves"]:  # as a run that stops after its step
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
with processes("cpu", timeout_s=600) as world:
    for step in range(9000):  # a minute and a half, if nothing stops it
        stop = torch.tensor([len(heard)])
        if world.size > 1:
            dist.all_reduce(stop)
        if stop:
            os.write(1, f"rank {world.rank} saved\\n".encode())  # whole lines: the processes share the pipe
            break
        if step == 5:
            os.write(1, f"rank {world.rank} works\\n".encode())
        time.sleep(0.01)
"""


@pytest.mark.parametrize("count, saves", [(1, True), (2, True), (2, False)])
def test_sigkill_of_torchrun_stops_its_processes(tmp_path, count, saves):
    """As SIGTERM would: those that see to it save; others end, all with the same word."""
    how = torchrun(tmp_path, ENDLESS, count)
    how["args"] += ["saves"] if saves else []
    process = subprocess.Popen(**how, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said = sorted(process.stdout.readline() for _ in range(count))
        process.kill()
        killed = time.monotonic()
        out, err = process.communicate(timeout=60)  # both end with the last process that has them
    finally:
        process.kill()
    assert said == [f"rank {r} works\n" for r in range(count)] and time.monotonic() - killed < 30
    assert sorted(out.splitlines()) == ([f"rank {r} saved" for r in range(count)] if saves else [])
    gone = re.findall(rf"^.*torchrun .process {process.pid}., which started this run, is gone.*$", err, re.M)
    assert len(gone) == 1 and gone[0].startswith("torchrun" if saves else "error: torchrun")
    assert "ended without a word" not in err and "Traceback" not in err


# --- choices ----------------------------------------------------------------------------------------------------------


def _choices(order):
    """Each rank finds another candidate fastest."""
    mesh, asked = mesh_of(ranks=order, dp_shard=2, tp=len(order) // 2), []
    if mesh is None:
        return None

    def fastest():
        asked.append(mesh.rank)
        times = {"a": [1.0, 3.0, 2.0, 5.0], "b": [2.0, 1.0, 3.0, 4.0], "c": [3.0, 2.0, 1.0, 1.0]}
        return min(times, key=lambda name: times[name][mesh.rank])

    return agreed(fastest, mesh), asked, gathered({"rank": mesh.rank, "text": "é" * mesh.rank}, mesh)


def test_differing_timings_give_equal_choices(pool):
    out = pool.run(_choices, (0, 1, 2, 3))
    assert [choice for choice, _, _ in out] == ["a"] * 4 and [asked for _, asked, _ in out] == [[0], [], [], []]
    assert all(all_ == [{"rank": r, "text": "é" * r} for r in range(4)] for _, _, all_ in out)


def test_the_first_of_the_mesh_chooses_not_the_first_of_all(pool):
    out = pool.run(_choices, (3, 1))
    assert [None if o is None else o[0] for o in out] == [None, "c", None, "c"]
    assert [r["rank"] for r in out[3][2]] == [3, 1] and out[1][1] == []
    assert agreed(lambda: 5, single()) == 5 and gathered(5, single()) == [5]


def _refuses():
    def refuse():
        raise UserError("no kernel fits")

    agreed(refuse, mesh_of(dp_shard=4))


def test_a_choice_that_cannot_be_made_is_refused_on_all(pool):
    with pytest.raises(UserError, match="no kernel fits"):
        pool.run(_refuses)
