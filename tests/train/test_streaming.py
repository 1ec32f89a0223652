"""Streams: epochs without a remainder, pure positions, what is read, the index, and resuming runs."""

import dataclasses
import itertools
import json
import math
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_rows import sample, write
from test_run import assert_same_end, course

from core import keys
from core.errors import UserError
from train import streaming
from train.data import batches, open_dataset, row_groups
from train.export import export
from train.order import Share, epoch_batches
from train.rows import I2V, T2V, encode_row
from train.run import train
from train.streaming import Group, Streaming, epoch_order, read_batches, stream_entries

KEY = keys.key(7)
GRIDS = [(2, 2, 3), (1, 2, 2), (3, 2, 2)]


@st.composite
def sets(draw):
    """Row groups over two files, and the bucket of every sample: long runs of one shape, or all mixed."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    firsts = np.cumsum([0, *sizes])
    groups = [Group(int(g % 2), g // 2, int(firsts[g]), n) for g, n in enumerate(sizes)]
    buckets = draw(st.lists(st.integers(0, 2), min_size=sum(sizes), max_size=sum(sizes)))
    return groups, np.array(sorted(buckets) if draw(st.booleans()) else buckets)


def group_at(order, place) -> Group:
    return order.groups[int(np.searchsorted(order.starts, place, side="right")) - 1]


def stream_of(groups, buckets, batch_size, shuffle=True, key=KEY):
    """`orders(epoch)`, and `plan(epoch)`: the batches that are complete in it, as lists of (epoch, sample)."""
    orders = lambda epoch: epoch_order(groups, key, epoch, shuffle)  # noqa: E731
    entries, size = stream_entries(orders, buckets), len(buckets)

    def plan(epoch):
        ticks = epoch_batches(entries, np.bincount(buckets), batch_size, epoch)
        named = lambda tick: (tick // size, int(orders(tick // size).samples[tick % size]))  # noqa: E731
        return ticks, [[named(tick) for tick in batch] for batch in ticks.tolist()]

    return orders, plan


@given(sets(), st.integers(1, 7), st.booleans())
def test_every_sample_comes_once_in_each_epoch(a_set, batch_size, shuffle):
    groups, buckets = a_set
    _, plan = stream_of(groups, buckets, batch_size, shuffle)
    batches = [batch for epoch in range(5) for batch in plan(epoch)[1]]
    assert all(len({buckets[i] for _, i in batch}) == 1 for batch in batches)
    counts = Counter(pair for batch in batches for pair in batch)
    assert not counts or max(counts.values()) == 1
    for bucket in np.unique(buckets):
        row = [pair for batch in batches for pair in batch if buckets[pair[1]] == bucket]
        assert [e for e, _ in row] == sorted(e for e, _ in row)
        # What is left fills no batch.
        assert 0 <= 5 * int((buckets == bucket).sum()) - len(row) < batch_size


@given(sets(), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_batches_are_read_in_order_and_every_row_group_once_an_epoch(a_set, world, share, shuffle):
    """By each of `world` processes, which read the row groups of their own samples only."""
    groups, buckets = a_set
    orders, plan = stream_of(groups, buckets, share * world, shuffle)
    ticks, whole = plan(1)
    for rank, start in itertools.product(range(world), range(len(whole) + 1)):
        part, asked = Share(rank, world).part(share * world), []
        read = lambda group, rows: asked.append(group) or [group.first + int(r) for r in rows]  # noqa: B023, E731
        got = list(read_batches(ticks[start:, part], orders, len(buckets), read))
        assert [[index for index, _ in b] for b in got] == [[i for _, i in b[part]] for b in whole[start:]]
        assert all(index == value for b in got for index, value in b)
        needed = {(t // len(buckets), group_at(orders(t // len(buckets)), t % len(buckets)))
                  for t in ticks[start:, part].flatten().tolist()}  # fmt: skip
        wanted = [(e, g) for e in sorted({e for e, _ in needed}) for g in orders(e).groups if (e, g) in needed]
        assert asked == [g for _, g in wanted], "one pass, in the epochs' order, and nothing else"


def test_the_order_of_row_groups_depends_on_key_and_epoch_and_rows_stay_together():
    groups = [Group(0, g, 4 * g, 4) for g in range(12)]
    buckets = np.zeros(48, dtype=int)

    def order(key, epoch, shuffle=True):
        return [[i for _, i in batch] for batch in stream_of(groups, buckets, 4, shuffle, key)[1](epoch)[1]]

    assert order(KEY, 0) == order(keys.key(7), 0)
    assert order(KEY, 0) != order(KEY, 1) and order(KEY, 0) != order(keys.key(8), 0)
    assert sorted(order(KEY, 0)) == order(KEY, 3, False) == [list(range(4 * g, 4 * g + 4)) for g in range(12)]


# --- files ----------------------------------------------------------------------------------------------------


def two_files(folder, kind=T2V):
    """17 samples of two shapes, mixed, in row groups of 3 and 2."""
    grids = [GRIDS[0], GRIDS[1], GRIDS[0]] * 6
    write(folder / "b" / "two.parquet", kind, [sample(kind, i, grids[i]) for i in range(9, 17)], group=2)
    write(folder / "a" / "one.parquet", kind, [sample(kind, i, grids[i]) for i in range(9)])
    return grids


def take(dataset, n, **options):
    return list(itertools.islice(batches(dataset, key=KEY, **options), n))


def assert_same(a, b):
    assert a.indices == b.indices and a.names == b.names and a.text_lens == b.text_lens
    for ours, theirs in ((a.targets, b.targets), (a.conditions, b.conditions)):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("kind", [T2V, I2V], ids=lambda k: k.name)
@pytest.mark.parametrize("read", [1, 2, 50])
def test_a_stream_gives_what_the_rows_hold_from_any_position(tmp_path, kind, read):
    grids = two_files(tmp_path, kind)
    dataset = open_dataset(tmp_path, kind, Streaming(read_batch_size=read))
    whole = take(dataset, 20, batch_size=2)
    for batch in whole:
        for row, index in enumerate(batch.indices):
            wanted = sample(kind, index, grids[index])
            assert batch.names[row] == wanted["id"]
            assert torch.equal(batch.latents[row], wanted["vae_latent"])
            assert torch.equal(batch.text[row, : batch.text_lens[row]], wanted["text_embedding"])
            assert kind is T2V or torch.equal(batch.conditions["first_frame"][row], wanted["first_frame_latent"])
    for start in (1, 7, 8, 15):
        for ours, theirs in zip(take(dataset, 3, batch_size=2, start=start), whole[start : start + 3], strict=True):
            assert_same(ours, theirs)
    # 12 and 5 samples: 16 in the 8 batches of the first epoch, the odd one in the second.
    assert max(Counter(i for b in whole[:8] for i in b.indices).values()) == 1
    assert Counter(i for b in whole[:17] for i in b.indices) == dict.fromkeys(range(17), 2)
    assert [b.indices for b in whole[:8]] != [b.indices for b in whole[8:16]]


def test_processes_share_batches_of_files_and_a_worker_changes_nothing(tmp_path):
    two_files(tmp_path)
    dataset = open_dataset(tmp_path, T2V, Streaming(read_batch_size=2))
    whole = take(dataset, 9, batch_size=6, start=1)
    for rank in range(3):
        share = Share(rank, 3)
        inline = take(dataset, 9, batch_size=6, start=1, share=share)
        assert [b.indices for b in inline] == [b.indices[2 * rank : 2 * rank + 2] for b in whole]
        apart = take(dataset, 9, batch_size=6, start=1, share=share, num_workers=1)
        for ours, theirs in zip(apart, inline, strict=True):
            assert_same(ours, theirs)
    with pytest.raises(UserError, match="num_workers is 2, a stream is read by one process"):
        batches(dataset, key=KEY, batch_size=2, num_workers=2)


def test_repeats_are_further_row_groups(tmp_path):
    path = write(tmp_path / "x.parquet", T2V, [sample(T2V, i) for i in range(5)])
    dataset = open_dataset({path: 3}, T2V, Streaming())
    assert [(g.number, g.first, g.rows) for g in row_groups(dataset)] == [
        (0, 0, 3), (1, 3, 2), (0, 5, 3), (1, 8, 2), (0, 10, 3), (1, 13, 2)]  # fmt: skip
    assert Counter(name for b in take(dataset, 15, batch_size=1) for name in b.names) == {
        f"sample-{i}": 3 for i in range(5)
    }


def test_only_the_columns_of_batches_are_read(tmp_path, monkeypatch):
    schema = I2V.schema.append(pa.field("notes", pa.string()))
    rows = [encode_row(I2V, sample(I2V, i)) | {"notes": "n"} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "x.parquet")
    asked, original = [], pq.ParquetFile.iter_batches

    def spy(self, batch_size, row_groups=None, columns=None, **options):
        asked.append((batch_size, columns))
        return original(self, batch_size, row_groups=row_groups, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    take(open_dataset(tmp_path, I2V, Streaming(read_batch_size=3)), 2, batch_size=2)
    ((size, columns),) = asked
    assert size == 3 and "notes" not in columns and not any(c.startswith("pil_image") for c in columns)
    assert {"vae_latent_bytes", "clip_feature_bytes"} <= set(columns)


def test_memory_is_that_of_a_read_not_of_the_row_group(tmp_path):
    """64 rows of 256 KiB in one row group of 16 MiB; a read of 2 rows holds them twice (pages and rows) at most."""
    big = [sample(T2V, i, (4, 64, 64)) for i in range(64)]
    table = pa.Table.from_pylist([encode_row(T2V, s) for s in big], T2V.schema)
    # Pages of a row or so: pyarrow's writer looks at their size only every write_batch_size rows.
    pq.write_table(table, tmp_path / "x.parquet", write_batch_size=1, use_dictionary=False)
    del table, big
    pool = pa.default_memory_pool()
    before, peak = pool.bytes_allocated(), 0
    columns = ["vae_latent_bytes"]
    for _ in streaming.read_group(tmp_path / "x.parquet", 0, range(64), columns, 2):
        peak = max(peak, pool.bytes_allocated() - before)
    assert 0 < peak < 6 * 2**20


def test_a_rare_shape_comes_when_its_epochs_fill_a_batch(tmp_path):
    rows = [sample(T2V, i, GRIDS[i == 4]) for i in range(6)]
    write(tmp_path / "x.parquet", T2V, rows)
    dataset = open_dataset(tmp_path, T2V, Streaming())
    seen = [b.indices for b in take(dataset, 12, batch_size=3)]
    rare = [number for number, indices in enumerate(seen) if 4 in indices]
    # Two epochs of six are 10 samples of one shape and 2 of the other: it fills every sixth batch.
    assert [seen[number] for number in rare] == [[4, 4, 4]] * 2 and rare[1] - rare[0] == 6
    with pytest.raises(UserError, match="streaming: read_batch_size is 0"):
        Streaming(read_batch_size=0)


def test_a_damaged_file_met_while_streaming_is_named(tmp_path):
    path = write(tmp_path / "x.parquet", T2V, [sample(T2V, i) for i in range(6)])
    for num_workers in (0, 1):
        stream = batches(open_dataset(path, T2V, Streaming()), key=KEY, batch_size=1, num_workers=num_workers)
        table = pq.read_table(path).to_pylist()
        pq.write_table(pa.Table.from_pylist([r | {"vae_latent_bytes": b"123"} for r in table], T2V.schema), path)
        with pytest.raises(UserError, match=r"x.parquet, row \d, column vae_latent_bytes: 3 bytes"):
            next(stream)
        path.write_bytes(path.read_bytes()[:100])
        stream = batches(dataset_with(path), key=KEY, batch_size=1, num_workers=num_workers)
        with pytest.raises(UserError, match="x.parquet: not a Parquet file, or cut short"):
            next(stream)
        write(path, T2V, [sample(T2V, i) for i in range(6)])


def dataset_with(path):
    """The set as it was before the file at `path` was damaged."""
    whole = write(path.parent / "whole" / path.name, T2V, [sample(T2V, i) for i in range(6)])
    dataset = open_dataset(whole, T2V, Streaming())
    shutil.rmtree(whole.parent)
    return dataclasses.replace(dataset, files=(dataclasses.replace(dataset.files[0], path=path),))


# --- the index ------------------------------------------------------------------------------------------------


def tree(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in [folder, *folder.rglob("*")]}


def test_the_index_is_made_once_outside_the_data_and_gives_the_same_set(tmp_path, monkeypatch):
    two_files(tmp_path / "data")
    before, index = tree(tmp_path / "data"), tmp_path / "cache" / "index.json"
    how, opened = Streaming(), []
    made = open_dataset(tmp_path / "data", T2V, how, index)
    text = index.read_text()
    monkeypatch.setattr(streaming.pq, "ParquetFile", lambda *a, **k: opened.append(a) or pytest.fail("opened"))
    again = open_dataset({str(tmp_path / "data"): 1}, T2V, how, index)
    monkeypatch.undo()
    plain = open_dataset(tmp_path / "data", T2V, how)
    for other in (again, plain):
        assert (other.files, other.signatures) == (made.files, made.signatures)
        assert np.array_equal(other.places, made.places) and np.array_equal(other.buckets, made.buckets)
    take(again, 9, batch_size=2)
    assert index.read_text() == text and tree(tmp_path / "data") == before and not opened
    assert [p.name for p in index.parent.iterdir()] == ["index.json"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d, f: f.write_bytes(f.read_bytes() + b"x"), r"one.parquet: \d+ bytes, noted are \d+"),
        (lambda d, f: f.rename(f.with_name("new.parquet")), r"new.parquet: is not in it.*one.parquet: is in it, but"),
        (lambda d, f: d.update(version=0), "version 0, expected 1"),
        (lambda d, f: d.update(row_type="i2v"), "row type 'i2v', expected 't2v'"),
        (lambda d, f: d.pop("files"), r"malformed \(KeyError\('files'\)\)"),
        (lambda d, f: d["files"][0].update(signatures=[[9, 1]]), "malformed"),
    ],
)
def test_an_index_that_is_not_of_this_set_is_refused(tmp_path, change, message):
    two_files(tmp_path / "data")
    index = tmp_path / "index.json"
    open_dataset(tmp_path / "data", T2V, Streaming(), index)
    data = json.loads(index.read_text())
    change(data, tmp_path / "data" / "a" / "one.parquet")
    index.write_text(json.dumps(data))
    with pytest.raises(UserError, match=rf"(?s)index.json: not the index of this set; remove it.*{message}"):
        open_dataset(tmp_path / "data", T2V, Streaming(), index)


def test_no_index_is_left_by_bad_data_or_inside_the_data(tmp_path):
    two_files(tmp_path / "data")
    with pytest.raises(UserError, match="index must be outside the data"):
        open_dataset(tmp_path / "data", T2V, Streaming(), tmp_path / "data" / "deep" / "index.json")
    (tmp_path / "data" / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="bad.parquet: not a Parquet file"):
        open_dataset(tmp_path / "data", T2V, Streaming(), tmp_path / "index.json")
    assert not (tmp_path / "data" / "deep").exists() and not (tmp_path / "index.json").exists()


# --- runs -----------------------------------------------------------------------------------------------------

TYPE, WORKERS = "training.data.dataloader_type", "training.data.dataloader_num_workers"
TOTAL, RESUME = "training.loop.max_train_steps", "training.checkpoint.resume_from_checkpoint"
SHUFFLE = "training.data.streaming_shuffle_row_groups"


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A set of two latent shapes that the shared recipe's model takes, and the changes that stream it."""
    root = tmp_path_factory.mktemp("streamed")
    grids = [(2, 4, 4), (1, 2, 4)]
    write(root / "data" / "x.parquet", T2V, [sample(T2V, i, grids[i % 3 == 2]) for i in range(14)])
    return {"training.data.data_path": str(root / "data"), TYPE: "streaming",
            "training.data.streaming_manifest_path": str(root / "index.json"), "training.data.train_batch_size": 2,
            "training.data.streaming_read_batch_size": 2}  # fmt: skip


def test_a_run_stopped_and_resumed_is_the_run_that_was_not(recipe, streamed, tmp_path):
    """8 steps of 2 batches pass through two epochs and more; another read size and a worker change nothing."""
    train(recipe(tmp_path / "whole", streamed))
    train(recipe(tmp_path / "cut", {**streamed, TOTAL: 3}))
    other = {**streamed, RESUME: "latest", WORKERS: 1, "training.data.streaming_read_batch_size": 5}
    train(recipe(tmp_path / "cut", other))
    assert course(tmp_path / "cut") == course(tmp_path / "whole")
    assert_same_end(tmp_path / "cut", tmp_path / "whole", 8)
    assert all(math.isfinite(row[1]) for row in course(tmp_path / "whole"))
    export(tmp_path / "whole", tmp_path / "export")


def test_another_order_cannot_be_resumed(recipe, streamed, tmp_path):
    train(recipe(tmp_path / "run", {**streamed, TOTAL: 1}))
    with pytest.raises(UserError, match="data.streaming: the checkpoint has .*True.*this run .*False"):
        train(recipe(tmp_path / "run", {**streamed, TOTAL: 2, RESUME: "latest", SHUFFLE: False}))
    as_map = {k: v for k, v in streamed.items() if "streaming_" not in k} | {TYPE: "map", RESUME: "latest", TOTAL: 2}
    with pytest.raises(UserError, match="data.streaming: the checkpoint has .*this run None"):
        train(recipe(tmp_path / "run", as_map))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({SHUFFLE: False}, "streaming_shuffle_row_groups.*needs dataloader_type: streaming"),
        ({"training.data.streaming_manifest_path": "x"}, "streaming_manifest_path.*needs dataloader_type: streaming"),
        ({"training.data.streaming_read_batch_size": 2}, "streaming_read_batch_size.*needs dataloader_type"),
        ({TYPE: "streaming", "training.data.streaming_read_batch_size": 0}, "streaming_read_batch_size"),
        ({TYPE: "streaming", WORKERS: 2}, "dataloader_num_workers.*must be 0 or 1 with dataloader_type: streaming"),
        ({TYPE: "stream"}, "dataloader_type"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(recipe, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        recipe(tmp_path / "run", changes)


def test_the_door_checks_streamed_data_too(recipe, streamed, tmp_path):
    for changes, message in (
        ({"models.student.config.text_dim": 9}, r"text_embedding \[L, 8\] .* expected \[L, 9\]"),
        ({"training.data.streaming_manifest_path": str(tmp_path)}, "a folder stands where the file should be"),
    ):
        with pytest.raises(UserError, match=message):
            train(recipe(tmp_path / "run", {**streamed, **changes}))
    assert not (tmp_path / "run").exists()
