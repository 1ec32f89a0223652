import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.scan import recompute, scan
from parallel.inventory import wan_model
from parallel.job import Job
from parallel.mesh import infer_sizes
from parallel.traffic import Flow, Network, traffic
from tests.parallel.test_costs import CFG, GRID, IMAGE, LTX2, LTX23, _job, model_of
from tests.parallel.traced import Traced, call, fake_inputs, fake_params, fused_norms, run_of, step

NAMES = {"all_to_all": "all_to_all_single", "all_reduce": "all_reduce"}
GATHERS = ("all_gather_into_tensor", "reduce_scatter_tensor")


LAYOUTS = {
    "tp": (CFG, {"tp": 4}, False),
    "sp, image": (IMAGE, {"sp": 4}, True),
    "sp and tp, image": (IMAGE, {"sp": 2, "tp": 2}, False),
    "tp, image": (IMAGE, {"tp": 2}, True),
    "ltx2, sp": (LTX2, {"sp": 2}, True),
    "ltx2.3, sp and tp": (LTX23, {"sp": 2, "tp": 2}, False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_inside_layers_are_counted_to_the_byte(name, monkeypatch):
    cfg, axes, again = LAYOUTS[name]
    job, model = _job(cfg, batch=2, recompute=int(again), **axes), model_of(cfg)
    with fused_norms(monkeypatch), torch._subclasses.FakeTensorMode(), Traced() as trace:
        params, inputs = fake_params(model, job), fake_inputs(cfg, job, GRID)
        run = run_of(job, recompute(scan) if again else scan)
        step(trace, lambda: call(params, cfg, inputs, run))
    found = {kind: [trace.calls[n], trace.sent[n]] for kind, n in NAMES.items() if trace.calls[n]}
    gathers = [trace.calls[n] for n in GATHERS]
    if "sp" in axes:  # the output is merged once, forward and backward, which is not counted
        gathers = [n - 1 for n in gathers]
    # Weights have flows of their own.
    flows = [f for f in traffic(model, job) if "inside layers" in f.what or "attention" in f.what]
    assert {f.kind: [f.calls, f.payload] for f in flows if f.kind in NAMES} == found
    assert sum(f.calls for f in flows if f.kind == "all_gather") == sum(gathers)


def test_microbatches_repeat_what_layers_send():
    sizes = infer_sizes(4, {"sp": 2, "tp": 2})
    flows = lambda **changes: {  # noqa: E731
        f.what: f for f in traffic(wan_model("tiny", CFG), Job(sizes, {"video": 256, "text": 32}, **changes))
    }
    one, three = flows(), flows(microbatches=3)
    for what in ("all-to-all of attention", "all-reduce inside layers"):
        assert three[what].payload == 3 * one[what].payload and not one[what].hidden
    assert three["all-gather of weights"].payload == 3 * one["all-gather of weights"].payload
    assert three["reduce-scatter of gradients"] == one["reduce-scatter of gradients"], "only after the last"


def _flow(kind, size, axes=("dp_shard", "sp"), payload=8_000_000):
    return Flow("", axes, size, kind, 1, payload, True)


def test_times_by_hand():
    network = Network(per_node=4, inside=1e6, between=1e5, hop_inside=0, hop_between=0)
    alone = infer_sizes(4, {"dp_shard": 4})
    assert network.seconds(_flow("all_gather", 4), alone) == 6.0, "three quarters come from the node"
    assert network.seconds(_flow("all_reduce", 4), alone) == 12.0
    assert network.seconds(_flow("all_to_all", 4), alone) == 6.0
    two = infer_sizes(8, {"dp_shard": 8})
    # Half of it comes from the other node, over four links.
    assert network.seconds(_flow("all_gather", 8), two) == 10.0
    # Each rank hands half of its buffer to the other node, over its own link.
    assert network.seconds(_flow("all_to_all", 8), two) == 40.0
    # Replicas of a node's worth of shards are on different nodes.
    copies = infer_sizes(8, {"dp_replicate": 2, "dp_shard": 4})
    assert network.seconds(_flow("all_reduce", 2, ("dp_replicate",), 8_000_000 // 4), copies) == 20.0
    tp = infer_sizes(8, {"dp_shard": 4, "tp": 2})
    # Of a group's four ranks two share a node, since every second rank is another group's.
    assert network.seconds(_flow("all_gather", 4), tp) == 20.0
    slow = dataclasses.replace(network, hop_inside=1.0, hop_between=100.0)
    # A ring over two nodes of four: seven hops, two of them between nodes; there and back for an all-reduce.
    assert slow.seconds(_flow("all_gather", 8), two) == 10.0 + 2 * 100.0 + 5 * 1.0
    assert slow.seconds(_flow("all_reduce", 8), two) == 2 * (10.0 + 205.0)
    assert slow.seconds(_flow("all_gather", 4), alone) == 6.0 + 3.0
    assert slow.seconds(_flow("all_to_all", 8), two) == 40.0 + 100.0


@given(st.integers(0, 5), st.integers(0, 4), st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]))
def test_times_are_between_those_of_either_link(shards, inner, kind):
    sizes = infer_sizes(2 ** (shards + inner), {"dp_shard": 2**shards, "tp": 2**inner})
    flow, network = _flow(kind, 2**shards), Network(hop_inside=0, hop_between=0)
    seconds = network.seconds(flow, sizes)
    assert 0 <= seconds <= flow.sent / network.between * 1.0001
    if 2 ** (shards + inner) <= network.per_node:
        assert seconds == pytest.approx(flow.sent / network.inside)
    faster = dataclasses.replace(network, inside=2 * network.inside, between=2 * network.between)
    assert network.seconds(flow, sizes) == pytest.approx(2 * faster.seconds(flow, sizes))
