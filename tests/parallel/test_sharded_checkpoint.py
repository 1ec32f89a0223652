"""Sharded checkpoints: any layout reads any other's bit for bit, and a failed or killed save leaves the older ones."""

import contextlib
import dataclasses
import errno
import functools
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from core import keys, save
from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.rules import pack
from core.specs import ParamSpec, init, specs_of
from core.transforms import apply
from infer.folder import Defaults
from nn import wan
from nn.wan_formats import open_transformer, to_json
from parallel import checkpoint, rules
from parallel.checkpoint import Writer
from parallel.collectives import all_sum, as_group
from parallel.mesh import Mesh, single
from parallel.norms import local
from parallel.units import local_slices, shard
from tests.parallel.pool import Pool, mesh_of
from train import state as states
from train.export import export
from train.optim import adamw_init
from train.state import TrainState

ATTENTION = {f"blocks.{i}.attn1.{p}.weight": ParamSpec((8, 12), axes=("heads", None)) for i in range(2) for p in
             ("to_q", "to_k", "to_v")}  # fmt: skip
SPECS = {
    **ATTENTION,
    "blocks.0.attn1.to_q.bias": ParamSpec((8,), axes=("heads",)),
    "blocks.0.attn1.to_k.bias": ParamSpec((8,), axes=("heads",)),
    "blocks.0.attn1.to_v.bias": ParamSpec((8,), axes=("heads",)),
    "blocks.0.attn1.to_out.weight": ParamSpec((12, 8), axes=(None, "heads")),
    "blocks.0.table": ParamSpec((1, 6, 5)),
    "odd": ParamSpec((3, 5)),
    "half": ParamSpec((10, 2), torch.bfloat16),
}
LAYOUTS = {
    "fsdp": ({"dp_shard": 4}, None),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, None),
    "tp": ({"dp_shard": 2, "tp": 2}, None),
    "sp": ({"dp_shard": 2, "sp": 2}, None),
    "copies": ({"dp_replicate": 4}, None),
    "pair": ({"tp": 2}, (1, 2)),
}
RECORD = {
    "config": {"num_layers": 2}, "sampling": {}, "vae": None, "text_encoder": None,
    "data": {"samples": 3, "train_batch_size": 1}, "threads": 1,
}  # fmt: skip


def draw(name: str, seed: int, spec: ParamSpec) -> torch.Tensor:
    return keys.normal(keys.fold_in(keys.fold_in(keys.key(seed), name), 0), spec.shape, spec.dtype)


def whole(seed: int, step: int = 4) -> TrainState:
    """The state of a process alone; all that is not the seed's is equal."""
    params = {k: draw(k, seed, s).requires_grad_() for k, s in SPECS.items()}
    optimizer = {k: draw(k, seed, ParamSpec(tuple(v.shape))) for k, v in adamw_init(params).items()}
    ema = {k: draw("ema" + k, seed, dataclasses.replace(s, dtype=torch.float32)) for k, s in SPECS.items()}
    return TrainState(params, optimizer, ema, step, 3 * step, keys.key(0))


def placed(state: TrainState, mesh: Mesh) -> TrainState:
    """The same state on a mesh; moments lie where their leaves do, the step is whole everywhere."""
    if mesh.device_mesh is None:
        return state
    model = {k: dataclasses.replace(s, shape=s.shape) for k, s in SPECS.items()}
    moments = {}
    for k, v in state.optimizer.items():
        of = k.partition(".")[2]
        moments[k] = rules.place({of: v}, {of: model[of]}, mesh)[of] if of else v.clone()
    trees = (rules.place(t, model, mesh) for t in (state.params, state.ema))
    params, ema = ({k: v.detach() for k, v in t.items()} for t in trees)
    params = {k: v.requires_grad_() for k, v in params.items()}
    return dataclasses.replace(state, params=params, optimizer=moments, ema=ema)


def mesh_named(name: str) -> Mesh | None:
    sizes, ranks = LAYOUTS[name]
    return mesh_of(ranks=ranks, **sizes)


@functools.cache
def writer_of(name: str, background: bool = False) -> Writer:
    """One writer per mesh and process: each makes a process group."""
    return Writer(mesh_named(name), background=background)


def load(state: TrainState, folder: Path) -> None:
    states.fill(state, states.open_for(state, folder, RECORD, weights_only=False))


def differing(state: TrainState, seed: int) -> list[str]:
    """Leaves whose local shard is not that of `whole(seed)`, to the bit."""
    wrong = []
    for name, tree in states.groups(state).items():
        expected = states.groups(whole(seed))[name]
        wrong += [
            f"{name}/{k}"
            for k, leaf in tree.items()
            if not torch.equal(local(leaf).detach(), expected[k].detach()[local_slices(leaf)])
        ]
    return wrong


# --- one layout's checkpoint on every other -----------------------------------------------------------------------


def _save(name, out, seed):
    if (mesh := mesh_named(name)) is not None:
        return states.save(out, placed(whole(seed), mesh), RECORD, keep=0, writer=writer_of(name))


def _load_everywhere(folder, seed):
    out = {}
    for name in LAYOUTS:
        if (mesh := mesh_named(name)) is not None:
            state = placed(whole(99, step=0), mesh)
            step = state.optimizer["step"]
            load(state, folder)
            assert state.optimizer["step"] is step and (state.step, state.position) == (4, 12)
            assert all(p.requires_grad and p.is_leaf for p in state.params.values())
            out[name] = differing(state, seed)
    return out


@pytest.mark.parametrize("name", [*LAYOUTS, "alone"])
def test_every_layout_reads_every_other_to_the_bit(pool, tmp_path, name):
    if name == "alone":
        folder = states.save(tmp_path, whole(5), RECORD, keep=0)
    else:
        (folder,) = {f for f in pool.run(_save, name, tmp_path, 5) if f is not None}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert {p.name for p in folder.iterdir()} == {"params", "optimizer", "ema", states.SCALARS, states.RECORD}
    for rank, got in enumerate(pool.run(_load_everywhere, folder, 5)):
        assert len(got) == (6 if rank in (1, 2) else 5) and not any(got.values()), got
    state = whole(99, step=0)
    load(state, folder)
    assert differing(state, 5) == [] and (state.step, state.position) == (4, 12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_written_once_and_by_processes_alike(pool, tmp_path, name):
    (folder,) = {f for f in pool.run(_save, name, tmp_path, 5) if f is not None}
    held = [safetensors.torch.load_file(f) for f in sorted((folder / "params").glob("*"))]
    sizes = [sum(t.nbytes for t in part.values()) for part in held]
    tree = {k: v.detach() for k, v in whole(5).params.items()}
    assert len(held) == (2 if name == "pair" else 4)
    assert sum(sizes) == sum(t.nbytes for t in tree.values()), "replicas are written once"
    largest = max(t.nbytes for t in tree.values())
    assert max(sizes) - min(sizes) <= largest, f"{sizes}: shared evenly, up to one leaf"
    written = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert written == {".safetensors", ".json"}, "nothing that needs pickle"


def _regions_as_dcp():
    """Our places of local shards, beside PyTorch's."""
    wrong = []
    for name in ("fsdp", "hsdp", "tp", "sp"):
        for k, leaf in placed(whole(0), mesh_named(name)).params.items():
            (chunk,) = leaf.__create_chunk_list__()
            if 0 not in chunk.sizes:
                theirs = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
                wrong += [(name, k)] if theirs != local_slices(leaf) else []
    return wrong


def test_what_is_read_lies_where_dcp_wrote_it(pool):
    assert pool.run(_regions_as_dcp) == [[]] * 4


# --- joined and separate projections ------------------------------------------------------------------------------


def _joined(state: TrainState) -> TrainState:
    join = lambda tree: apply(tree, pack("to_qkv", ["to_q", "to_k", "to_v"])(specs_of(tree)))  # noqa: E731
    params = {k: v.detach().requires_grad_() for k, v in join(state.params).items()}
    return dataclasses.replace(state, params=params, optimizer=join(state.optimizer), ema=join(state.ema))


def _sharded_rows(state: TrainState, mesh: Mesh) -> TrainState:
    """Any tree, its first dimension over the shards."""
    specs = lambda tree: {k: ParamSpec(tuple(v.shape), v.dtype) for k, v in tree.items()}  # noqa: E731
    put = lambda tree: {k: v.detach() for k, v in rules.place(tree, specs(tree), mesh).items()}  # noqa: E731
    step, moments = state.optimizer["step"], {k: v for k, v in state.optimizer.items() if k != "step"}
    return dataclasses.replace(
        state, params=put(state.params), optimizer={"step": step.clone(), **put(moments)}, ema=put(state.ema)
    )


def _resume_packed(folder, into_packed):
    state = _joined(whole(99, 0)) if into_packed else whole(99, 0)
    state = _sharded_rows(state, mesh_of(dp_shard=4))
    load(state, folder)
    expected = states.groups(_joined(whole(5)) if into_packed else whole(5))
    return [
        f"{name}/{k}"
        for name, tree in states.groups(state).items()
        for k, leaf in tree.items()
        if not torch.equal(local(leaf), expected[name][k].detach()[local_slices(leaf)])
    ]


def _save_packed(out):
    mesh = mesh_of(dp_shard=4)
    return states.save(out, _sharded_rows(_joined(whole(5)), mesh), RECORD, keep=0, writer=writer_of("fsdp"))


def test_joined_and_separate_projections_resume_into_each_other(pool, tmp_path):
    joined = pool.run(_save_packed, tmp_path / "joined")[0]
    separate = pool.run(_save, "tp", tmp_path / "separate", 5)[0]
    assert any("to_qkv" in k for k in open_checkpoint(joined / "optimizer"))
    for folder in (joined, separate):
        assert pool.run(_resume_packed, folder, True) == [[]] * 4
        assert pool.run(_resume_packed, folder, False) == [[]] * 4
    state = whole(99, step=0)
    load(state, joined)
    assert differing(state, 5) == []


def test_projections_whose_rows_do_not_add_up_are_named(tmp_path):
    folder = states.save(tmp_path, _joined(whole(5)), RECORD, keep=0)
    state = whole(99, step=0)
    for tree in states.groups(state).values():
        for k in [k for k in tree if k.endswith("blocks.1.attn1.to_k.weight")]:
            tree[k] = torch.zeros(4, 12)
    with pytest.raises(UserError, match="blocks.1.attn1.to_qkv.weight has 24, the parts 8 . 4 . 8 = 20"):
        load(state, folder)


# --- saving while training goes on --------------------------------------------------------------------------------


@contextlib.contextmanager
def _writing(act):
    """Runs `act(key)` before each leaf is written by this process."""
    append = save._append
    save._append = lambda file, key, *rest: (act(key), append(file, key, *rest))
    try:
        yield
    finally:
        save._append = append


def _train_on(out):
    """Changes every leaf in place, and communicates, while the save of the old values is held up on each process."""
    mesh = mesh_named("hsdp")
    state, gate = placed(whole(5), mesh), threading.Event()
    everyone = as_group(mesh.group("dp_replicate", "dp_shard", "sp"))
    with _writing(lambda key: gate.wait(20)), writer_of("hsdp", True) as writer:
        folder = states.save(out, state, RECORD, keep=0, writer=writer)
        early = folder.exists()
        with torch.no_grad():
            for tree in states.groups(state).values():
                for leaf in tree.values():
                    local(leaf).add_(1)
        sums = [all_sum(torch.ones(3), everyone).sum().item() for _ in range(5)]
        still_early = folder.exists()
        gate.set()
        assert writer.wait() == folder and folder.is_dir()
        buffers = {k: v.data_ptr() for k, v in writer.buffers.items()}
        states.save(out, dataclasses.replace(state, step=5), RECORD, keep=0, writer=writer)
        again = {k: v.data_ptr() for k, v in writer.buffers.items()}
    return early, still_early, sums, buffers == again


def test_training_goes_on_while_a_checkpoint_is_written(pool, tmp_path):
    for early, still_early, sums, same_memory in pool.run(_train_on, tmp_path):
        assert not early and not still_early and sums == [12.0] * 5 and same_memory
    state = whole(99, step=0)
    load(state, states.folder_of(tmp_path, 4))
    assert differing(state, 5) == [], "what was saved is what stood there at the call"
    assert [p.name for p in states.checkpoints(tmp_path)] == ["step-000004", "step-000005"]


def _two_in_flight(out):
    """The second save finds the first held up, which it must wait for."""
    mesh, events = mesh_named("fsdp"), []
    held = threading.Event()

    def slow(key):
        if not held.is_set():
            held.set()
            time.sleep(0.5)
            events.append("first written")

    with _writing(slow), writer_of("fsdp", True) as writer:
        states.save(out, placed(whole(5), mesh), RECORD, keep=1, writer=writer)
        assert held.wait(20)
        states.save(out, placed(whole(6, step=5), mesh), RECORD, keep=1, writer=writer)
        events.append("second began")
        first = states.folder_of(out, 4).is_dir()
    return events, first, [p.name for p in states.checkpoints(out)]


def test_a_second_save_waits_for_the_first_and_old_ones_go_after_it_is_there(pool, tmp_path):
    for events, first, left in pool.run(_two_in_flight, tmp_path):
        assert events == ["first written", "second began"] and first
        assert left == ["step-000005"]
    state = whole(99, step=0)
    load(state, states.folder_of(tmp_path, 5))
    assert differing(state, 6) == []


def test_a_process_alone_saves_in_the_background_too(tmp_path):
    state = whole(5)
    with Writer(single(), background=True) as writer:
        folder = states.save(tmp_path, state, RECORD, keep=0, writer=writer)
        with torch.no_grad():
            for p in state.params.values():
                p.zero_()
    load(state, folder)
    assert differing(state, 5) == [] and (folder / "params" / "diffusion_pytorch_model.safetensors").is_file()


class Stop(Exception):
    pass


def test_an_exception_in_training_lets_the_save_under_way_end(tmp_path, monkeypatch):
    held, writer = threading.Event(), Writer(single(), background=True)
    append = save._append
    monkeypatch.setattr(save, "_append", lambda *a: (held.set(), time.sleep(0.01), append(*a)))
    with pytest.raises(Stop), writer:
        states.save(tmp_path, whole(5), RECORD, keep=0, writer=writer)
        assert held.wait(20)
        raise Stop
    assert states.folder_of(tmp_path, 4).is_dir()
    monkeypatch.setattr(Writer, "PATIENCE", 0.0)
    gate = threading.Event()
    monkeypatch.setattr(save, "_append", lambda *a: (gate.wait(20), append(*a)))
    with pytest.raises(Stop), writer:
        states.save(tmp_path, whole(5, step=5), RECORD, keep=0, writer=writer)
        raise Stop
    assert not states.folder_of(tmp_path, 5).is_dir(), "other processes may be gone: it does not wait for ever"
    gate.set()
    assert writer.wait() == states.folder_of(tmp_path, 5)


def test_a_failed_save_in_the_background_is_told_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_append", lambda *a: _full(0)(None))
    writer = Writer(single(), background=True)
    states.save(tmp_path, whole(5), RECORD, keep=0, writer=writer)
    with pytest.raises(UserError, match="step-000004.*No space left on device"):
        states.save(tmp_path, whole(5, step=5), RECORD, keep=0, writer=writer)
    assert writer.wait() is None and list((tmp_path / "checkpoints").iterdir()) == []


# --- failures -----------------------------------------------------------------------------------------------------


def _full(after, error=None):
    """A disk that takes `after` leaves."""
    left = [after]

    def act(key):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if error is None else error

    return act


def _fails_on_one(out, bad_rank, background, error):
    mesh = mesh_named("hsdp")
    writer = writer_of("hsdp", background)
    states.save(out, placed(whole(5), mesh), RECORD, keep=1, writer=writer)
    writer.wait()
    act = _full(3, error) if mesh.rank == bad_rank else lambda key: None
    with _writing(act), pytest.raises(Exception) as caught:
        states.save(out, placed(whole(6, step=5), mesh), RECORD, keep=1, writer=writer)
        writer.wait()
    assert writer.wait() == states.folder_of(out, 4), "the newest that is there"
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_full_disk_on_one_process_is_reported_by_all(pool, tmp_path, bad_rank, background):
    ((kind, said),) = set(pool.run(_fails_on_one, tmp_path, bad_rank, background, None))
    assert kind == "UserError" and [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert re.search(rf"step-000005: the checkpoint could not be written \(process {bad_rank}: .*No space left", said)
    assert "older ones are untouched" in said
    state = whole(99, step=0)
    load(state, states.folder_of(tmp_path, 4))
    assert differing(state, 5) == []
    pool.run(_save, "fsdp", tmp_path, 7)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000004"], "the next save is a good one"


def test_an_error_of_ours_is_none_of_the_users(pool, tmp_path):
    for kind, said in pool.run(_fails_on_one, tmp_path, 1, True, TypeError("no such dtype")):
        assert kind == "RuntimeError" and "TypeError: no such dtype" in said and "RANK 1" in said
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


def _fails_in_a_pair(out):
    mesh = mesh_named("pair")
    if mesh is None:
        return None
    with _writing(_full(0) if mesh.rank == 2 else lambda key: None), pytest.raises(UserError) as caught:
        states.save(out, placed(whole(5), mesh), RECORD, keep=0, writer=writer_of("pair"))
    return str(caught.value)


def test_a_process_is_named_by_its_rank_in_a_mesh_over_some_of_them(pool, tmp_path):
    out = pool.run(_fails_in_a_pair, tmp_path)
    assert out[0] is None and out[1] == out[2] and "(process 2: [Errno 28]" in out[1]


def _own_disk(out):
    """Process 1 writes where process 0 does not see it."""
    mesh, write = mesh_named("fsdp"), checkpoint.save_part
    if mesh.rank == 1:
        checkpoint.save_part = lambda folder, *rest, **named: write(out / "own" / folder.name, *rest, **named)
    try:
        states.save(out, placed(whole(5), mesh), RECORD, keep=0, writer=writer_of("fsdp"))
    finally:
        checkpoint.save_part = write


def test_processes_without_a_common_file_system_publish_nothing(pool, tmp_path):
    with pytest.raises(UserError, match="process 0: .*part-00002-of-00004.*another process .*one file system"):
        pool.run(_own_disk, tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def _save_below(out):
    mesh = mesh_named("fsdp")
    states.save(out, placed(whole(5), mesh), RECORD, keep=0, writer=writer_of("fsdp"))


def test_a_place_that_cannot_be_written_is_reported_by_all(pool, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"step-000004: .*process 0: .*(Not a directory|File exists)"):
        pool.run(_save_below, tmp_path / "file")


def _with_nan(rank, group):
    mesh = mesh_named("tp")
    state = placed(whole(5), mesh)
    states.check_weights(state, None, mesh)
    if mesh.rank == rank:
        with torch.no_grad():
            local(states.groups(state)[group]["blocks.1.attn1.to_k.weight"])[0, 0] = torch.nan
    with pytest.raises(UserError) as caught:
        states.check_weights(state, None, mesh)
    return str(caught.value)


@pytest.mark.parametrize("rank, group", [(0, "params"), (3, "ema")])
def test_weights_that_are_not_finite_on_one_process_are_refused_by_all(pool, rank, group):
    said = set(pool.run(_with_nan, rank, group))
    assert said == {f"step 4: 1 leaves are not finite ({group}/blocks.1.attn1.to_k.weight, ...); "
                    "no checkpoint was saved yet"}  # fmt: skip


def _killed(out, when):
    """Process 0 is killed after all have written and before the folder appears, or process 1 while it writes."""
    mesh = mesh_of(dp_shard=2)
    writer = Writer(mesh)
    states.save(out, placed(whole(5), mesh), RECORD, keep=0, writer=writer)
    if when == "publish":
        states.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif mesh.rank == 1:
        save._append = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        states.save(out, placed(whole(6, step=5), mesh), RECORD, keep=1, writer=writer)
    except Exception as error:
        (out / "said").write_text(str(error))


@pytest.mark.parametrize("when", ["publish", "write"])
def test_a_process_killed_in_a_save_leaves_the_older_one_and_the_next_save_cleans_up(tmp_path, when):
    pool = Pool(2)
    try:
        with pytest.raises(AssertionError, match=f"process {0 if when == 'publish' else 1} died"):
            pool.run(_killed, tmp_path, when, timeout=60)
    finally:
        pool.stop(kill=True)
    assert states.checkpoints(tmp_path) == [states.folder_of(tmp_path, 4)]
    assert "step-000005: not saved, another process ended" in (tmp_path / "said").read_text()
    left = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert (len(left) == 2) == (when == "publish"), "a killed process cannot clean up, the others can"
    state = whole(99, step=0)
    load(state, states.find(tmp_path, "latest"))
    assert differing(state, 5) == []
    states.save(tmp_path, whole(7, step=6), RECORD, keep=0)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000006"]


# --- models of FSDP2, and exports ------------------------------------------------------------------------------------


def _squares(tree, carry):
    return carry + sum((leaf * leaf).sum() for leaf in tree.values())


def _fsdp_model(name, folder, out):
    """Reads a checkpoint into FSDP2's parameters, uses them, and saves them again."""
    mesh = mesh_named(name)
    model = shard(SPECS, mesh, stacks=("blocks",), compute={k: torch.float32 for k in SPECS})
    ema = {k: torch.zeros_like(v.detach(), dtype=torch.float32) for k, v in model.params.items()}
    state = TrainState(model.params, adamw_init(model.params), ema, 0, 0, keys.key(0))
    load(state, folder)
    wrong = differing(state, 5)
    total = model(lambda p: _squares(p.root, p.stacks["blocks"][1](_squares, torch.zeros(()))))
    total.backward()
    states.save(out, state, RECORD, keep=0, writer=writer_of(name))
    return wrong, float(total)


@pytest.mark.parametrize("name", ["hsdp", "tp"])
def test_parameters_of_fsdp_are_read_and_saved_between_their_uses(pool, tmp_path, name):
    folder = pool.run(_save, "sp", tmp_path / "a", 5)[0]
    for wrong, total in pool.run(_fsdp_model, name, folder, tmp_path / "b"):
        assert wrong == [] and total > 0
    state = whole(99, step=0)
    load(state, states.find(tmp_path / "b", "latest"))
    assert differing(state, 5) == []


CFG = wan.WanConfig(num_attention_heads=4, attention_head_dim=12, ffn_dim=32, num_layers=3, in_channels=4,
                    out_channels=4, text_dim=8, freq_dim=16)  # fmt: skip


def _wan(mesh: Mesh) -> tuple[TrainState, dict]:
    model = wan.param_specs(CFG)
    params = rules.place(init(model, keys.key(1)), model, mesh)
    record = RECORD | {"config": to_json(CFG), "sampling": dataclasses.asdict(Defaults())}
    return TrainState(params, adamw_init(params), None, 1, 1, keys.key(0)), record


def _save_wan(name, out):
    mesh = mesh_named(name)
    state, record = _wan(mesh)
    states.save(out, state, record, keep=0, writer=writer_of(name))


def test_an_export_does_not_show_what_it_was_sharded_over(pool, tmp_path):
    pool.run(_save_wan, "tp", tmp_path / "sharded")
    state, record = _wan(single())
    states.save(tmp_path / "alone", state, record, keep=0)
    for name in ("sharded", "alone"):
        export(tmp_path / name, tmp_path / f"out-{name}", dtype="bf16")
    a, b = (open_transformer(tmp_path / f"out-{name}" / "transformer")[0] for name in ("sharded", "alone"))
    assert sorted(a) == sorted(b) and a.metadata == b.metadata
    assert all(torch.equal(a[k].read(), b[k].read()) and a[k].dtype == b[k].dtype for k in b)


# --- an optimiser that made no step -------------------------------------------------------------------------------


def _unstepped(out):
    mesh = mesh_named("tp")
    state = placed(whole(5), mesh)
    state = dataclasses.replace(state, optimizer=adamw_init(state.params))
    step = state.optimizer["step"]
    assert type(step) is torch.Tensor and step.shape == () and step.dtype == torch.float32
    moments = {k: v for k, v in state.optimizer.items() if k != "step"}
    assert all(v.placements == state.params[k.partition(".")[2]].placements for k, v in moments.items())
    folder = states.save(out, state, RECORD, keep=0, writer=writer_of("tp"))
    again = placed(whole(9, step=0), mesh)
    load(again, folder)
    assert all(not local(v).any() for v in again.optimizer.values()) and again.optimizer["step"].device == step.device
    return folder


def test_the_state_of_an_optimiser_without_steps_is_saved_and_read(pool, tmp_path):
    folder = pool.run(_unstepped, tmp_path)[0]
    found = open_checkpoint(folder / "optimizer")
    assert found["step"].shape == () and found["step"].dtype == torch.float32 and len(found) == 1 + 2 * len(SPECS)
    assert found["exp_avg.half"].dtype == torch.float32, "moments are float32 whatever the weights are"
