"""The benchmark of meshes runs on a CPU, from its command line."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import network, parallel
from core.errors import UserError
from tests.parallel.launched import Launched, errors, statuses
from tests.parallel.pool import mesh_of

TOY = ["--toy", "--device", "cpu", "--warmup", "1", "--steps", "2"]


def _bench(*args):
    sys.exit(parallel.main([*TOY, *args]))


@pytest.mark.parametrize("axes", [["--tp", "2"], ["--sp", "2", "--microbatches", "2", "--recompute", "1"]])
def test_two_processes(tmp_path, axes):
    runs = Launched(tmp_path, _bench, *axes)
    try:
        done = runs.wait()
    finally:
        runs.kill()
    assert statuses(done) == [0, 0], errors(done)
    out = done[0][1]
    assert "all-reduce on the bus" in out and "step time, slowest rank" in out and done[1][1] == ""
    # The rank's bytes of weights are those of the plan.
    (line,) = [line for line in out.splitlines() if "weights per rank" in line]
    cells = [cell.strip() for cell in line.split("│")]
    assert cells[3] == cells[6] and float(cells[7]) == 1.0


def test_one_process_stands_beside_the_plain_step(capsys, tmp_path, monkeypatch):
    saved = {}
    monkeypatch.setattr(parallel.report, "save", lambda name, rows, device: saved.update({name: rows}))
    assert parallel.main(TOY) == 0
    out = capsys.readouterr().out
    losses = [line.split("loss ")[1] for line in out.splitlines() if "loss " in line]
    assert len(losses) == 3 and len(set(losses)) == 1, "equal steps"
    assert "step time, FSDP2 at world size 1" in out and saved == {}, "a toy is not saved"


def test_what_does_not_fit_is_refused(capsys):
    assert parallel.main([*TOY, "--tp", "2"]) == 2
    assert "1 processes are not divisible by 2" in capsys.readouterr().err


# --- the network ------------------------------------------------------------------------------------------------------


def _health(wrong):
    """The rate, or what the gate says when every all-reduce is off by a factor."""
    mesh, reduce = mesh_of(dp_shard=4), network.dist.all_reduce
    network.dist.all_reduce = lambda t, *a, **kw: (reduce(t, *a, **kw), t.mul_(wrong))
    try:
        return network.health(mesh, 2**16, 1, 2)
    except UserError as error:
        return str(error)
    finally:
        network.dist.all_reduce = reduce


def test_the_health_gate(pool):
    rates = pool.run(_health, 1)
    assert len(set(rates)) == 1 and rates[0] > 0, "that of the slowest rank, on all"
    assert pool.run(_health, 2) == ["health: an all-reduce of 1..4 gave 20, the sum is 10"] * 4


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


@given(SPANS, SPANS)
def test_exposed_communication_is_counted_tick_by_tick(communication, work):
    ticks = lambda spans: {t for first, last in spans for t in range(first, last)}  # noqa: E731
    assert network.covered(communication) == len(ticks(communication))
    assert network.exposed(communication, work) == len(ticks(communication) - ticks(work))


def test_kernels_are_told_from_marked_ranges():
    assert network.kind_of("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "communication"
    assert network.kind_of("void at::native::vectorized_elementwise_kernel<4>") == "work"
    assert network.kind_of("nccl:_all_gather_base") is network.kind_of("FSDP::all_gather") is None
    assert network.kind_of("forward", annotation=True) is None


def test_imports_find_the_package_beside_the_script():
    assert Path(sys.modules["parallel"].__file__).parent.name == "parallel"
