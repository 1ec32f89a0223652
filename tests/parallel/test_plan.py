import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.errors import UserError
from core.specs import ParamSpec
from parallel import plan, rules, tables
from parallel.inventory import PRESETS, Model
from parallel.job import Job
from parallel.mesh import infer_sizes
from parallel.rules import Rules
from parallel.traffic import make_plan
from tests.parallel.pool import mesh_of
from tests.parallel.test_rules import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


class Nothing(TorchDispatchMode):
    """Refuses to make a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"a plan ran {func}")


def _run(capsys, *args):
    """Status, output and errors of the command."""
    try:
        status = plan.main([str(a) for a in args])
    except SystemExit as stop:
        status = stop.code
    out = capsys.readouterr()
    return status, out.out, out.err


# --- the layout -------------------------------------------------------------------------------------------------------


def _bytes(sizes):
    mesh = mesh_of(**sizes)
    tree = {k: torch.zeros(s.shape, dtype=s.dtype) for k, s in MODEL.items()}
    return {k: t.to_local().nbytes for k, t in rules.place(tree, MODEL, mesh).items()}


@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "sp": 2}])
def test_the_table_has_the_bytes_that_ranks_hold(pool, sizes):
    held = pool.run(_bytes, sizes)
    rows = tables.layout_rows(MODEL, infer_sizes(4, sizes))
    assert sum(row.leaves for row in rows) == len(MODEL)
    by_key = {row.key: row for row in rows}
    for key in MODEL:
        assert by_key[rules.starred(key)].bytes == max(of_rank[key] for of_rank in held), key
    text = tables.layout_table(rows).splitlines()
    assert len(text) == len(rows) + 2 and text[0].split()[:4] == ["leaf", "leaves", "shape", "dtype"]
    most = sum(max(of_rank[key] for of_rank in held) for key in MODEL)
    assert int(text[-1].split()[-1].replace(",", "")) == most


def test_a_layout_of_any_specs_and_rules():
    spec = ParamSpec((4, 8, 6), dtype=torch.bfloat16, axes=("experts", "mlp", None))
    experts = {f"layers.{i}.up": spec for i in (0, 1)}
    sizes = infer_sizes(8, {"dp_shard": 2, "tp": 2, "ep": 2})
    (row,) = tables.layout_rows(experts, sizes, Rules({"experts": "ep", "mlp": "tp"}))
    assert row.key == "layers.*.up" and row.leaves == 2 and row.bytes == 4 * 8 * 6 * 2 // 8
    assert row.placements == {"shard": "dim 0 of part", "tp": "dim 1", "ep": "dim 0"}
    with pytest.raises(UserError, match=r"layers.\*.up: dimension 0 of .* \(experts\) is not divisible by ep 3"):
        tables.layout_rows(experts, infer_sizes(3, {"ep": 3}), Rules({"experts": "ep"}))


def test_a_plan_of_leaves_alone():
    """A model of which only the specs are known: weights and their traffic, no activations and no arithmetic."""
    got = make_plan(Model("leaves", MODEL, ("blocks",)), Job(infer_sizes(4, {"dp_shard": 4}), {}))
    assert {f.kind for f in got.flows} == {"all_gather", "reduce_scatter"}
    assert not [k for k in got.memory.begin if "activations" in k]


def test_nothing_is_allocated(capsys):
    with Nothing():
        assert _run(capsys, "--preset", "ltx-2-19b", "--gpus", 512, "--tp", 4)[0] == 0
        assert _run(capsys, "--preset", "wan2.1-i2v-14b", "--dp-shard", 8, "--layout")[0] == 0


# --- figures of others ------------------------------------------------------------------------------------------------

# Peak allocations that another trainer of LTX-2's video model reported: FP32 masters, BF16 gathers that stay after the
# forward, groups of two layers, no recomputation, 81x480x832; GPUs, samples per GPU, GiB.
MEASURED = [(4, 1, 100.832), (4, 2, 140.865), (8, 3, 160.862)]


@pytest.mark.parametrize("gpus, batch, gib", MEASURED)
def test_the_peak_is_within_five_percent_of_what_others_measured(gpus, batch, gib):
    args = ["--preset", "ltx-2-19b-video", "--gpus", gpus, "--batch", batch, "--recompute", 0, "--keep-gathered"]
    args += ["--reduce", "bf16", "--group", 2]
    (got,) = plan.plans_of(plan._parser().parse_args([str(a) for a in args]))
    assert got.memory.peak / 2**30 == pytest.approx(gib, rel=0.05)


# --- the command ------------------------------------------------------------------------------------------------------


def test_options_do_what_they_say(capsys):
    base = ["--preset", "wan2.1-t2v-1.3b", "--gpus", 8, "--json"]
    of = lambda *more: json.loads(_run(capsys, *base, *more)[1])  # noqa: E731
    plain = of()
    assert plain["mesh"]["dp_shard"] == 8 and plain["samples"] == 8
    flow = lambda p, kind: next(f for f in p["traffic"] if f["kind"] == kind)  # noqa: E731
    kept = of("--keep-gathered")
    assert kept["memory"]["begin"]["gathered weights"] > 10 * plain["memory"]["begin"]["gathered weights"]
    assert flow(kept, "all_gather")["payload"] < 0.6 * flow(plain, "all_gather")["payload"]
    twice = of("--microbatches", 2)
    assert twice["memory"]["begin"]["whole gradients of earlier microbatches"] == 4 * plain["parameters"]
    shards = of("--microbatches", 2, "--accumulate", "sharded")
    assert shards["memory"]["peak"] < twice["memory"]["peak"]
    assert flow(shards, "reduce_scatter")["payload"] == 2 * flow(twice, "reduce_scatter")["payload"]
    assert flow(of("--reduce", "bf16"), "reduce_scatter")["payload"] < 0.55 * flow(plain, "reduce_scatter")["payload"]
    groups = of("--group", 2)
    assert flow(groups, "all_gather")["calls"] < flow(plain, "all_gather")["calls"]
    offload = of("--cpu-offload")
    assert offload["memory"]["held"] == {} and sum(offload["memory"]["host"].values()) > 0
    ema = of("--ema")
    assert ema["memory"]["held"]["average of the weights"] == ema["memory"]["held"]["weights"]
    assert of("--recompute", 0)["memory"]["peak"] > plain["memory"]["peak"]
    assert of("--between", 25)["step_seconds"] == plain["step_seconds"], "eight GPUs are one node"
    assert of("--tokens", "text=256", "--grid", 5, 30, 52)["compute_seconds"] < plain["compute_seconds"] / 4


@pytest.mark.parametrize(
    "args, said",
    [
        (["--preset", "wan2.1-t2v-14"], "did you mean 'wan2.1-t2v-14b'"),
        (["--preset", "wan2.1-t2v-14b", "--gpus", 8, "--tp", 3], "8 processes are not divisible by 3"),
        (["--preset", "wan2.1-t2v-14b", "--tp", 16], "self 40 is not divisible by tp 16; heads are never cut"),
        (["--preset", "wan2.1-t2v-14b", "--tp", 4, "--sp", 4], "40 heads over tp 4 are 10 a rank, which sp 4"),
        (["--preset", "wan2.1-t2v-14b", "--dp-shard", -1], "--gpus"),
        (["--preset", "wan2.1-t2v-14b", "--dp-shard", 0], "dp_shard is 0"),
        (["--preset", "wan2.1-t2v-14b", "--tokens", "txt=5"], "did you mean 'text'"),
        (["--preset", "wan2.1-t2v-14b", "--tokens", "text"], "expected STREAM=N"),
        (["--preset", "wan2.1-t2v-14b", "--batch", 0, "--group", 0], "batch must be at least 1"),
        (["--preset", "wan2.1-t2v-14b", "--batch", 0, "--group", 0], "modules_per_group must be at least 1"),
        (["--preset", "wan2.1-t2v-14b", "--device", "H20O"], "--device H20O"),
        (["--preset", "wan2.1-t2v-14b", "--inside", 0], "--inside must be above 0"),
        (["--preset", "wan2.1-t2v-14b", "--between", "nan"], "--between must be above 0 and finite, got nan"),
        (["--preset", "wan2.1-t2v-14b", "--efficiency", 1.5], "--efficiency is a share of the peak"),
        (["--preset", "wan2.1-t2v-14b", "--hops", -1, 5], "--hops must be at least 0 us, got -1.0"),
        (["--preset", "wan2.1-t2v-14b", "--gpus", 0], "--gpus must be at least 1, got 0"),
        (["--preset", "wan2.1-t2v-14b", "--gpus", 8, "--compare", "sp=2,sp=4"], "sp is named twice"),
        (["--preset", "wan2.1-t2v-14b", "--gpus", 8, "--layout", "--compare", "tp=8"], "leave out --compare"),
        (["--preset", "wan2.1-t2v-14b", "--layout", "--json"], "leave out --json"),
        (["--preset", "wan2.1-t2v-14b", "--gpus", 8, "--compare", "dp_shrd=8"], "did you mean 'dp_shard'"),
        (["--preset", "wan2.1-t2v-14b", "--gpus", 8, "--compare", "dp_shard=x"], "expected dp_shard=N"),
        (["--preset", "wan2.1-t2v-14b", "--gpus", 8, "--sp", 2, "--compare", "tp=8"], "leave out --sp"),
        (["--preset", "wan2.1-t2v-14b", "--shards", 8], "unrecognized arguments"),
        ([], "--preset"),
    ],
)  # fmt: skip
def test_bad_flags_are_refused_with_what_is_right(capsys, args, said):
    status, out, err = _run(capsys, *args)
    assert status == 2 and out == "" and said in err and "Traceback" not in err


def test_help_names_every_option(capsys):
    status, out, _ = _run(capsys, "--help")
    assert status == 0
    for action in plan._parser()._actions:
        assert action.help and action.option_strings[-1] in out
    assert all(name in re.sub(r"\s+", "", out) for name in PRESETS)


def test_a_mesh_that_does_not_fit_is_marked(capsys):
    _, out, _ = _run(capsys, "--preset", "wan2.1-t2v-14b", "--gpus", 1)
    assert "does not fit" in out
    _, out, _ = _run(capsys, "--preset", "wan2.1-t2v-14b", "--gpus", 8, "--compare", "dp_shard=8", "dp_replicate=8")
    lines = out.splitlines()
    assert " !" not in lines[1] and " !" in lines[2] and lines[2].startswith("dp_replicate 8")


def commands(page: str) -> list[tuple[str, str]]:
    """`(command, output)` of every `console` block."""
    blocks = re.findall(r"```console\n\$ (.*?[^\\])\n(.*?)```", page, flags=re.DOTALL)
    return [(re.sub(r"\\\n\s*", "", command), output) for command, output in blocks]


def test_the_page_on_scaling_says_what_the_command_says(capsys):
    found = commands(PAGE.read_text())
    assert len(found) >= 6
    for command, output in found:
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "parallel.plan"], command
        assert _run(capsys, *words[3:])[1] == output, command
