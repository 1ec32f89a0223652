"""Row types and datasets: what is written comes back, batches depend on key and position alone, faults are named."""

import itertools
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import keys
from core.errors import UserError
from train.data import (
    Reader,
    batch_indices,
    batches,
    check_latents,
    check_text,
    map_entries,
    open_dataset,
)
from train.order import Share, batches_before, epoch_batches, find_batch
from train.rows import ROW_TYPES, T2V, decode_row, encode_row, row_type

KEY = keys.key(7)
SHAPE_A, SHAPE_B = (4, 2, 2, 3), (4, 3, 2, 2)


def sample(i: int, shape=SHAPE_A, dtype=torch.float32) -> dict:
    """Sample i: random tensors, and a text of 1 + i % 3 words."""
    k = keys.fold_in(keys.key(0), i)
    return {
        "id": f"sample-{i}",
        "vae_latent": keys.normal(keys.fold_in(k, "z"), shape).to(dtype),
        "text_embedding": keys.normal(keys.fold_in(k, "c"), (1 + i % 3, 5)).to(dtype),
        "file_name": f"{i}.mp4",
        "caption": f"caption {i}",
        "media_type": "video",
        "width": 24,
        "height": 16,
        "num_frames": 5,
        "duration_sec": 0.2,
        "fps": 25.0,
    }


def write(path, samples, group=3, schema=T2V.schema, change=None):
    rows = [encode_row(T2V, s) for s in samples]
    if change is not None:
        rows = [row | change for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group)
    return path


def two_shapes(folder):
    """11 samples of one latent shape and 6 of another, in two files, mixed."""
    shapes = [SHAPE_A, SHAPE_B, SHAPE_A] * 6
    write(folder / "b" / "two.parquet", [sample(i, shapes[i]) for i in range(9, 17)])
    write(folder / "a" / "one.parquet", [sample(i, shapes[i]) for i in range(9)], group=2)
    return open_dataset(folder, T2V)


def text_of(batch, i):
    return batch.text[i, : batch.text_lens[i]]


# --- rows -----------------------------------------------------------------------------------------------------


def test_the_columns_are_those_of_published_t2v_sets():
    parts = [f"{stem}_{part}" for stem in ("vae_latent", "text_embedding") for part in ("bytes", "shape", "dtype")]
    notes = ["file_name", "caption", "media_type", "width", "height", "num_frames", "duration_sec", "fps"]
    assert T2V.schema.names == ["id", *parts, *notes]
    assert row_type("t2v") is ROW_TYPES["t2v"] is T2V
    with pytest.raises(UserError, match="'t2w' is not known .did you mean 't2v'"):
        row_type("t2w")


@given(
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_encode_then_decode_is_bitwise_the_identity(shape, seed, dtype):
    before = sample(seed, shape, dtype)
    after = decode_row(T2V, encode_row(T2V, before), "here")
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert after[name].dtype == dtype and torch.equal(after[name], value)
        else:
            assert after[name] == value


def test_text_may_have_a_leading_one_and_dtype_text_may_be_wrong_where_float32_fits():
    one = sample(1)
    row = encode_row(T2V, one | {"text_embedding": one["text_embedding"][None]})
    row |= {"text_embedding_shape": [1, 2, 5], "vae_latent_dtype": "torch.bfloat16", "text_embedding_dtype": "float64"}
    after = decode_row(T2V, row, "here")
    assert torch.equal(after["text_embedding"], one["text_embedding"])
    assert torch.equal(after["vae_latent"], one["vae_latent"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vae_latent_bytes": b"12345"}, r"vae_latent_bytes: 5 bytes, expected 96 for \[4, 2, 2, 3\] in float16"),
        ({"vae_latent_bytes": None}, "vae_latent_bytes: 0 bytes"),
        ({"vae_latent_dtype": "int7"}, "vae_latent_dtype: 'int7', expected one of float32"),
        ({"vae_latent_shape": [4, 2, 6]}, r"vae_latent_shape: \[4, 2, 6\], expected \[C, T, H, W\]"),
        ({"vae_latent_shape": [4, 0, 2, 3]}, r"vae_latent_shape: \[4, 0, 2, 3\] is empty"),
        ({"text_embedding_shape": []}, r"text_embedding_shape: \[\], expected \[L, D\]"),
        ({"text_embedding_shape": None}, r"text_embedding_shape: \[\], expected \[L, D\]"),
    ],
)
def test_a_damaged_row_names_file_row_and_column(tmp_path, change, message):
    good = encode_row(T2V, sample(0, dtype=torch.float16))
    with pytest.raises(UserError, match=r"x\.parquet, row 3, column " + message):
        decode_row(T2V, good | change, "x.parquet, row 3")
    path = write(tmp_path / "x.parquet", [sample(i, dtype=torch.float16) for i in range(4)])
    table = pq.read_table(path).to_pylist()
    table[3] |= change
    pq.write_table(pa.Table.from_pylist(table, T2V.schema), path)
    with pytest.raises(UserError, match=r"x\.parquet, row 3, column " + message):
        Reader(open_dataset(path, T2V)).sample(3)


def test_rows_that_cannot_be_stored_are_refused():
    good = sample(0)
    for change, message in (
        ({"vae_latent": torch.zeros(4, 0, 2, 3)}, r"row 'sample-0' .*vae_latent_shape: \[4, 0, 2, 3\] is empty"),
        ({"vae_latent": torch.zeros(4, 2, 3)}, "expected .C, T, H, W."),
        ({"vae_latent": torch.zeros(SHAPE_A, dtype=torch.int8)}, "dtype int8, expected one of"),
        ({"vae_latent": [1.0]}, "vae_latent is list, expected a tensor"),
        ({"captoin": "x"}, "unknown captoin .did you mean 'caption'"),
    ):
        with pytest.raises(UserError, match=message):
            encode_row(T2V, good | change)
    with pytest.raises(UserError, match="missing caption"):
        encode_row(T2V, {k: v for k, v in good.items() if k != "caption"})


# --- opening --------------------------------------------------------------------------------------------------


def test_every_sample_comes_back_from_files_folders_lists_and_repeats(tmp_path):
    shapes = [SHAPE_A, SHAPE_B, SHAPE_A] * 6
    dataset = two_shapes(tmp_path)
    assert [file.path.name for file in dataset.files] == ["one.parquet", "two.parquet"]
    assert dataset.shapes == (SHAPE_A, SHAPE_B) and len(dataset) == 17
    reader = Reader(dataset, keep=1)
    for i in reversed(range(17)):
        got = reader.sample(i)
        assert got["id"] == f"sample-{i}" and torch.equal(got["vae_latent"], sample(i, shapes[i])["vae_latent"])
    one, two = tmp_path / "a" / "one.parquet", tmp_path / "b"
    assert len(open_dataset([str(one), two], T2V)) == 17
    repeated = open_dataset({one: 3, str(two): 1}, T2V)
    assert len(repeated) == 3 * 9 + 8 and len(repeated.files) == 2
    ids = Counter(Reader(repeated).sample(i)["id"] for i in range(len(repeated)))
    assert ids == {f"sample-{i}": 3 if i < 9 else 1 for i in range(17)}


def test_a_reader_reads_one_row_group_and_no_other_column(tmp_path, monkeypatch):
    extra = T2V.schema.append(pa.field("notes", pa.string()))
    path = write(tmp_path / "x.parquet", [sample(i) for i in range(9)], schema=extra, change={"notes": "n"})
    reader, read = Reader(open_dataset(path, T2V), keep=2), []
    original = pq.ParquetFile.read_row_group

    def spy(self, group, columns=None, **kwargs):
        read.append(group)
        assert "notes" not in columns
        return original(self, group, columns=columns, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    for i in (4, 3, 5, 0, 4, 8, 0):
        reader.sample(i)
    assert read == [1, 0, 2, 0] and len(reader.groups) == 2


def test_a_file_of_another_type_is_refused_with_both_column_lists(tmp_path):
    fields = [f for f in T2V.schema if f.name not in ("caption", "fps")]
    clip = [pa.field("clip_feature_bytes", pa.binary()), pa.field("clip_feature_shape", pa.list_(pa.int64()))]
    write(tmp_path / "i2v.parquet", [sample(0)], schema=pa.schema(fields + clip))
    with pytest.raises(UserError) as error:
        open_dataset(tmp_path, T2V)
    text = str(error.value)
    wanted = next(line for line in text.splitlines() if "columns of t2v" in line)
    found = next(line for line in text.splitlines() if "columns of the file" in line)
    assert "i2v.parquet" in text
    assert re.findall(r"(\w+) \(missing\)", wanted) == ["caption", "fps"]
    assert all(name in wanted for name in T2V.schema.names)
    assert re.findall(r"(\w+) \(unexpected\)", found) == ["clip_feature_bytes", "clip_feature_shape"]
    assert "vae_latent_bytes" in found


def test_more_conditioning_is_another_type_but_notes_and_wider_types_are_not(tmp_path):
    clip = [pa.field("clip_feature_bytes", pa.binary()), pa.field("clip_feature_shape", pa.list_(pa.int64()))]
    path = write(tmp_path / "a.parquet", [sample(0)], schema=pa.schema([*T2V.schema, *clip]))
    with pytest.raises(UserError, match="clip_feature_bytes .unexpected"):
        open_dataset(path, T2V)
    wide = {"vae_latent_bytes": pa.large_binary(), "caption": pa.large_string(), "width": pa.int32()}
    wide |= {"vae_latent_shape": pa.large_list(pa.int32()), "fps": pa.float32()}
    fields = [pa.field(f.name, wide.get(f.name, f.type)) for f in T2V.schema]
    path = write(tmp_path / "b.parquet", [sample(0)], schema=pa.schema([*fields, pa.field("notes", pa.string())]))
    assert torch.equal(Reader(open_dataset(path, T2V)).sample(0)["vae_latent"], sample(0)["vae_latent"])
    fields = [pa.field(f.name, pa.string() if f.name == "fps" else f.type) for f in T2V.schema]
    path = write(tmp_path / "c.parquet", [sample(0)], schema=pa.schema(fields), change={"fps": "25"})
    with pytest.raises(UserError, match=r"fps \(text, expected floating\)"):
        open_dataset(path, T2V)


def test_every_fault_of_the_paths_is_listed_at_once(tmp_path):
    good = write(tmp_path / "good" / "x.parquet", [sample(0)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-50])
    write(tmp_path / "none.parquet", [])
    with pytest.raises(UserError) as error:
        open_dataset([tmp_path / n for n in ("nothing", "empty", "text.parquet", "cut.parquet", "good")] + [good], T2V)
    text = str(error.value)
    for part in (
        "nothing: no such file or folder",
        "empty: no *.parquet",
        "text.parquet: not a Parquet file",
        "cut.parquet: not a Parquet file, or cut short",
        "to repeat data write {path: n}",
    ):
        assert part in text
    with pytest.raises(UserError, match="no rows in .*none.parquet"):
        open_dataset(tmp_path / "none.parquet", T2V)
    with pytest.raises(UserError, match="(?s)a: repeat is 0, expected an integer >= 1.*b: repeat is True.*c: .* 1.5"):
        open_dataset({"a": 0, "b": True, "c": 1.5, str(good): 1}, T2V)
    for nothing in ([], {}):
        with pytest.raises(UserError, match="empty, expected at least one path"):
            open_dataset(nothing, T2V)


def test_latents_and_text_that_do_not_fit_the_model_are_named(tmp_path):
    dataset = two_shapes(tmp_path)
    check_latents(dataset, 4, (1, 2, 1))
    with pytest.raises(UserError, match=r"one.parquet, row 0: latents \[4, 2, 2, 3\] .11 such.: W = 3 is not a mult"):
        check_latents(dataset, 4, (1, 2, 2))
    with pytest.raises(UserError, match=r"(?s)expected 16 channels.*row 1: latents \[4, 3, 2, 2\].*expected 16"):
        check_latents(dataset, 16, (1, 1, 1))
    with pytest.raises(UserError, match=r"row 1: latents \[4, 3, 2, 2\] .6 such.: expected \[4, 2, 2, 3\]"):
        check_latents(dataset, 4, (1, 1, 1), SHAPE_A)
    check_text(dataset, 5)
    with pytest.raises(UserError, match=r"one.parquet, row 0: text_embedding \[L, 5\] .11 such., expected \[L, 8\]"):
        check_text(dataset, 8)


# --- batches --------------------------------------------------------------------------------------------------


def test_a_batch_holds_what_the_rows_hold(tmp_path):
    dataset = two_shapes(tmp_path)
    for batch in itertools.islice(batches(dataset, key=KEY, batch_size=3), 8):
        assert batch.latents.dtype == batch.text.dtype == torch.float32
        assert batch.text.shape == (3, max(batch.text_lens), 5)
        for i, index in enumerate(batch.indices):
            wanted = sample(index, [SHAPE_A, SHAPE_B, SHAPE_A][index % 3])
            assert batch.names[i] == wanted["id"]
            assert torch.equal(batch.latents[i], wanted["vae_latent"])
            assert torch.equal(text_of(batch, i), wanted["text_embedding"])
            assert not batch.text[i, batch.text_lens[i] :].any()


@given(st.integers(1, 20), st.integers(0, 40))
def test_plan_laws(dataset_once, batch_size, start):
    """One shape per batch, every sample once per epoch of its shape and nothing lost, exact resume."""
    dataset = dataset_once
    plan = list(itertools.islice(batch_indices(dataset, KEY, batch_size), 60))
    assert all(len(b) == batch_size and len({dataset.buckets[i] for i in b}) == 1 for b in plan)
    for bucket, size in ((0, 11), (1, 6)):
        row = [i for b in plan for i in b if dataset.buckets[i] == bucket]
        for first in range(0, len(row) - size + 1, size):
            assert sorted(row[first : first + size]) == np.flatnonzero(dataset.buckets == bucket).tolist()
    # Shapes come as often as their samples: neither is more than an epoch and a batch ahead.
    seen = np.bincount([dataset.buckets[i] for b in plan for i in b], minlength=2)
    assert abs(seen[0] / 11 - seen[1] / 6) <= 1 + batch_size / 6
    assert list(itertools.islice(batch_indices(dataset, KEY, batch_size, start), 5)) == plan[start : start + 5]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 30))
def test_any_shares_of_any_batches_are_the_same_samples_of_a_step(one_shape, count, cut, start):
    """A step of 12 samples of one shape: over `count` processes, in `cut` microbatches, in equal order."""
    whole = list(itertools.islice(batch_indices(one_shape, KEY, 12), start + 2))[start:]
    if 12 % (count * cut):
        return
    shares = [
        batches(one_shape, key=KEY, batch_size=12 // cut, start=start * cut, share=Share(i, count))
        for i in range(count)
    ]
    for step in whole:
        assert [i for _ in range(cut) for share in shares for i in next(share).indices] == step


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 7), st.integers(0, 60))
def test_the_epoch_of_a_batch_is_found_without_counting(counts, batch_size, number):
    if not sum(counts):
        return
    epoch, inside = find_batch(counts, batch_size, number)
    assert batches_before(counts, batch_size, epoch) + inside == number < batches_before(counts, batch_size, epoch + 1)


def test_shares_are_equal_parts(dataset_once):
    with pytest.raises(UserError, match="batch_size is 5, expected a multiple of the 2 that share it"):
        batches(dataset_once, key=KEY, batch_size=5, share=Share(0, 2))


@pytest.fixture(scope="module")
def one_shape(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("one") / "x.parquet", [sample(i) for i in range(7)])
    return open_dataset(path, T2V)


@pytest.fixture(scope="module")
def dataset_once(tmp_path_factory):
    return two_shapes(tmp_path_factory.mktemp("data"))


def test_order_depends_on_key_and_epoch(dataset_once):
    plan = lambda key, epoch: epoch_batches(map_entries(dataset_once, key), [11, 6], 1, epoch).tolist()  # noqa: E731
    assert plan(KEY, 0) == plan(keys.key(7), 0)
    assert plan(KEY, 0) != plan(KEY, 1) and plan(KEY, 0) != plan(keys.key(8), 0)
    assert sorted(plan(KEY, 0)) == sorted(plan(KEY, 1)) == [[i] for i in range(17)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_give_the_same_batches_and_leave_the_random_state_alone(dataset_once, num_workers):
    state = torch.random.get_rng_state()
    inline = itertools.islice(batches(dataset_once, key=KEY, batch_size=2, start=3), 12)
    apart = itertools.islice(batches(dataset_once, key=KEY, batch_size=2, start=3, num_workers=num_workers), 12)
    for a, b in zip(inline, apart, strict=True):
        assert a.indices == b.indices and a.names == b.names and a.text_lens == b.text_lens
        assert torch.equal(a.latents, b.latents) and torch.equal(a.text, b.text)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_met_while_training_is_named(tmp_path, num_workers):
    path = write(tmp_path / "x.parquet", [sample(0)], change={"vae_latent_bytes": b"123"})
    stream = batches(open_dataset(path, T2V), key=KEY, batch_size=1, num_workers=num_workers)
    with pytest.raises(UserError, match=r"^\S*x\.parquet, row 0, column vae_latent_bytes: 3 bytes, expected 192"):
        next(stream)


def test_bad_arguments_are_named_before_anything_is_read(dataset_once):
    good = {"key": KEY, "batch_size": 1}
    for bad in ({"batch_size": 0}, {"batch_size": True}, {"start": -1}, {"num_workers": -1}, {"num_workers": 1.0}):
        with pytest.raises(UserError, match=f"{next(iter(bad))} is {next(iter(bad.values()))!r}"):
            batches(dataset_once, **(good | bad))
