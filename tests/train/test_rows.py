"""Row types beside t2v: their columns, round trips, the channels of their batches, and who can be trained with them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import keys
from core.errors import UserError
from train.data import Reader, batches, check_tensors, common_shape, first_fps, open_dataset
from train.families import FAMILIES
from train.rows import I2V, ROW_TYPES, T2A, T2V, T2VA, TEXT_ONLY, RowType, collate, decode_row, encode_row
from train.run import train
from train.setup import prepare
from train.streaming import Streaming

GRID = (2, 2, 3)
NOTES = {"file_name": "x.mp4", "media_type": "video", "width": 24, "height": 16, "num_frames": 5, "duration_sec": 0.2,
         "fps": 25.0, "audio_sample_rate": 32000}  # fmt: skip


def sample(kind: RowType, i: int, grid=GRID, audio: int = 6, dtype=torch.float32) -> dict:
    """Sample i of a row type: random tensors, a text of 1 + i % 3 words."""
    k = keys.fold_in(keys.key(0), i)
    shapes = {"vae_latent": (4, *grid), "text_embedding": (1 + i % 3, 8), "clip_feature": (5, 6),
              "first_frame_latent": (4, *grid), "audio_latent": (2, audio, 3),
              "audio_text_embedding": (2 + i % 2, 7)}  # fmt: skip
    out = {"id": f"sample-{i}", "caption": f"caption {i}", **NOTES}
    out |= {stem: keys.normal(keys.fold_in(k, stem), shape).to(dtype) for stem, shape in shapes.items()}
    out["pil_image"] = (torch.arange(3 * 4 * 5).reshape(3, 4, 5) + i).to(torch.uint8)
    stems = {c.stem for c in kind.tensors}
    return {name: v for name, v in out.items() if name in kind.schema.names or name in stems}


def write(path, kind: RowType, samples, group: int = 3):
    """A file of these samples with `group` rows per row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [encode_row(kind, s) for s in samples]
    pq.write_table(pa.Table.from_pylist(rows, kind.schema), path, row_group_size=group)
    return path


def parts(*stems: str) -> list[str]:
    return [f"{stem}_{part}" for stem in stems for part in ("bytes", "shape", "dtype")]


def test_columns_and_their_order_are_those_of_published_sets():
    notes = ["file_name", "caption", "media_type", "width", "height", "num_frames", "duration_sec", "fps"]
    image = parts("vae_latent", "text_embedding", "clip_feature", "first_frame_latent", "pil_image")
    assert I2V.schema.names == ["id", *image, *notes]
    sound = parts("vae_latent", "audio_latent", "text_embedding", "audio_text_embedding")
    assert T2VA.schema.names == ["id", *sound, *notes, "audio_sample_rate"]
    assert TEXT_ONLY.schema.names == ["id", *parts("text_embedding"), "caption"]
    assert list(ROW_TYPES) == ["t2v", "i2v", "t2va", "t2a", "text_only"]
    kinds = {"bytes": pa.binary(), "shape": pa.list_(pa.int64()), "dtype": pa.string()}
    assert all(f.type == kinds[f.name.rsplit("_", 1)[1]] for f in I2V.schema if f.name in image)


@given(st.sampled_from(list(ROW_TYPES.values())), st.integers(0, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_encode_then_decode_is_bitwise_the_identity(kind, i, dtype):
    before = sample(kind, i, dtype=dtype)
    after = decode_row(kind, encode_row(kind, before), "here")
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert after[name].dtype == value.dtype and torch.equal(after[name], value)
        else:
            assert after[name] == value


def test_notes_and_optional_conditions_may_be_absent_but_others_may_not(tmp_path):
    for stem in ("pil_image", "clip_feature"):
        row = encode_row(I2V, {k: v for k, v in sample(I2V, 0).items() if k != stem})
        assert (row[f"{stem}_bytes"], row[f"{stem}_shape"], row[f"{stem}_dtype"]) == (b"", [], "")
        assert decode_row(I2V, row, "here")[stem] is None
    with pytest.raises(UserError, match="first_frame_latent is NoneType, expected a tensor"):
        encode_row(I2V, {k: v for k, v in sample(I2V, 0).items() if k != "first_frame_latent"})
    row = encode_row(I2V, sample(I2V, 0)) | {"first_frame_latent_bytes": b"", "first_frame_latent_shape": []}
    pq.write_table(pa.Table.from_pylist([row], I2V.schema), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"row 0, column first_frame_latent_shape: \[\], expected \[C, T, H, W\]"):
        open_dataset(tmp_path, I2V)


def some_without_feature(path, grid=GRID):
    """Every second row has no clip_feature."""
    rows = [sample(I2V, i, grid) for i in range(8)]
    return write(path, I2V, [row if i % 2 else row | {"clip_feature": None} for i, row in enumerate(rows)])


@pytest.mark.parametrize("how", [None, Streaming()])
def test_a_batch_has_an_optional_channel_in_all_its_rows_or_in_none(tmp_path, how):
    some_without_feature(tmp_path / "data" / "x.parquet")
    dataset = open_dataset(tmp_path / "data", I2V, how, tmp_path / "index.json" if how else None)
    assert len(dataset.signatures) == 2 and len(set(dataset.shapes)) == 1
    again = open_dataset(tmp_path / "data", I2V, how, tmp_path / "index.json" if how else None)
    assert again.signatures == dataset.signatures  # through the index of a stream, too
    stream, seen = batches(dataset, key=keys.key(1), batch_size=2), set()
    for _ in range(8):
        batch = next(stream)
        odd = {i % 2 for i in batch.indices}
        assert len(odd) == 1 and ("image" in batch.conditions) == (odd == {1})
        assert batch.conditions["first_frame"].shape[0] == 2
        seen |= odd
    assert seen == {0, 1}


def test_a_missing_optional_channel_is_a_fault_where_it_is_expected(tmp_path):
    dataset = open_dataset(some_without_feature(tmp_path / "x.parquet"), I2V)
    check_tensors(dataset, {"first_frame_latent": "vae_latent"}, "title")
    with pytest.raises(UserError, match=r"x.parquet, row 0: clip_feature is missing .4 such., expected \[L, 6\]"):
        check_tensors(dataset, {"clip_feature": (None, 6)}, "title")


CHANNELS = {
    "t2v": ({"video": "vae_latent"}, {"text"}),
    "i2v": ({"video": "vae_latent"}, {"text", "image", "first_frame"}),
    "t2va": ({"video": "vae_latent", "audio": "audio_latent"}, {"text", "audio_text"}),
    "t2a": ({"audio": "audio_latent"}, {"text"}),
    "text_only": ({}, {"text"}),
}


@pytest.mark.parametrize("kind", ROW_TYPES.values(), ids=lambda k: k.name)
def test_every_type_loads_and_collates_into_its_channels(tmp_path, kind):
    write(tmp_path / "x.parquet", kind, [sample(kind, i) for i in range(7)])
    dataset = open_dataset(tmp_path, kind)
    targets, conditions = CHANNELS[kind.name]
    stream = batches(dataset, key=keys.key(1), batch_size=3)
    for _ in range(4):
        batch = next(stream)
        assert batch.targets.keys() == targets.keys() and batch.conditions.keys() == conditions
        for row, index in enumerate(batch.indices):
            wanted = sample(kind, index)
            assert batch.names[row] == wanted["id"]
            assert batch.fps[row] == (25.0 if "fps" in kind.schema.names else None)
            text = wanted["audio_text_embedding" if kind is T2A else "text_embedding"]
            assert torch.equal(batch.text[row, : batch.text_lens[row]], text)
            assert not batch.text[row, batch.text_lens[row] :].any()
            for channel, stem in targets.items():
                assert torch.equal(batch.targets[channel][row], wanted[stem])
            for channel, stem in {"image": "clip_feature", "first_frame": "first_frame_latent"}.items():
                assert channel not in conditions or torch.equal(batch.conditions[channel][row], wanted[stem])


def test_a_batch_never_mixes_shapes_of_any_channel(tmp_path):
    """The same video shape with sounds of two lengths, and texts of any length."""
    write(tmp_path / "x.parquet", T2VA, [sample(T2VA, i, audio=6 + i % 2) for i in range(8)])
    dataset = open_dataset(tmp_path, T2VA)
    assert dataset.shapes == ((4, *GRID), (4, *GRID)) and len(dataset.signatures) == 2
    stream = batches(dataset, key=keys.key(1), batch_size=2)
    lengths = {next(stream).targets["audio"].shape[2] for _ in range(8)}
    assert lengths == {6, 7}


def without_some_texts(i: int, kind: RowType = T2VA, every: int = 2) -> dict:
    """Sample i; every so many have a text of their own for the sound."""
    return sample(kind, i) | ({} if i % every == 0 else {"audio_text_embedding": None})


def read_stems(monkeypatch) -> set[str]:
    """The set that will hold the stems of which readers read the bytes."""
    stems, original = set(), pq.ParquetFile.read_row_group

    def spy(self, group, columns=None, **options):
        stems.update(name.removesuffix("_bytes") for name in columns if name.endswith("_bytes"))
        return original(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    return stems


STREAMS = [
    (("video",), {"vae_latent", "text_embedding"}, {"video"}, "vae_latent"),
    (("audio",), {"audio_latent", "text_embedding", "audio_text_embedding"}, {"audio"}, "audio_latent"),
    (("video", "audio"), {"vae_latent", "audio_latent", "text_embedding", "audio_text_embedding"}, {"video", "audio"},
     "vae_latent"),
]  # fmt: skip


@pytest.mark.parametrize("streams, stems, targets, shapes", STREAMS)
@pytest.mark.parametrize("manifest", [False, True])
def test_a_model_of_one_stream_reads_and_sees_its_own_tensors_only(
    tmp_path, monkeypatch, streams, stems, targets, shapes, manifest
):
    """Through the index of a set, too, which is one for all models."""
    write(tmp_path / "data" / "x.parquet", T2VA, [without_some_texts(i) for i in range(8)])
    place = tmp_path / "index.json" if manifest else None
    if manifest:
        open_dataset(tmp_path / "data", T2VA, None, place)
    data = open_dataset(tmp_path / "data", T2VA, None, place, streams=streams)
    assert set(data.shapes) == {tuple(sample(T2VA, 0)[shapes].shape)}
    assert len(data.signatures) == (1 if streams == ("video",) else 2)
    read = read_stems(monkeypatch)
    stream, first = batches(data, key=keys.key(1), batch_size=2), set()
    for _ in range(8):
        batch = next(stream)
        assert batch.targets.keys() == targets and batch.fps == [25.0, 25.0]
        first |= {(tuple(i % 2 for i in batch.indices), *sorted(batch.conditions))}
        for row, index in enumerate(batch.indices):
            stored = without_some_texts(index)
            own = streams == ("audio",) and stored["audio_text_embedding"] is not None
            text = stored["audio_text_embedding" if own else "text_embedding"]
            assert torch.equal(batch.text[row, : batch.text_lens[row]], text)
            if "audio_text" in batch.conditions:
                length = batch.audio_text_lens[row]
                assert torch.equal(batch.conditions["audio_text"][row, :length], stored["audio_text_embedding"])
    assert read == stems
    if streams == ("video", "audio"):  # a batch has texts for the sound in all its rows or in none
        assert first == {((0, 0), "audio_text", "text"), ((1, 1), "text")}


@pytest.mark.parametrize("kind", [T2VA, T2A])
def test_sound_alone_with_texts_of_its_own_does_not_read_the_others(tmp_path, monkeypatch, kind):
    write(tmp_path / "x.parquet", kind, [without_some_texts(i, kind, every=1) for i in range(4)])
    read = read_stems(monkeypatch)
    data = open_dataset(tmp_path, kind, streams=("audio",))
    batch = next(batches(data, key=keys.key(1), batch_size=2))
    assert batch.text.shape[2] == 7 and read == {"audio_latent", "audio_text_embedding"}


def test_files_without_the_columns_of_an_optional_tensor_are_those_of_published_sets(tmp_path):
    rows = [encode_row(T2VA, without_some_texts(i, every=9)) for i in range(1, 4)]
    table = pa.Table.from_pylist(rows, T2VA.schema)
    table = table.drop_columns(parts("audio_text_embedding"))
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "x.parquet")
    for how in (None, Streaming()):
        data = open_dataset(tmp_path / "data", T2VA, how)
        batch = next(batches(data, key=keys.key(1), batch_size=3))
        assert batch.conditions.keys() == {"text"} and batch.targets.keys() == {"video", "audio"}
    pq.write_table(table.append_column("audio_text_embedding_shape", [[[]] * 3]), tmp_path / "data" / "x.parquet")
    with pytest.raises(UserError, match="audio_text_embedding_bytes .missing"):
        open_dataset(tmp_path / "data", T2VA)


@pytest.mark.parametrize("kind, streams, message", [
    (T2V, ("video", "audio"), "rows of type t2v have no audio: they hold video"),
    (T2A, ("video",), "rows of type t2a have no video: they hold audio"),
    (TEXT_ONLY, ("video",), "rows of type text_only have no video: they hold neither video nor audio"),
])  # fmt: skip
def test_streams_that_rows_do_not_have_are_refused(tmp_path, kind, streams, message):
    write(tmp_path / "x.parquet", kind, [sample(kind, 0)])
    with pytest.raises(UserError, match=message):
        open_dataset(tmp_path, kind, streams=streams)


def test_the_rate_of_a_batch_is_that_of_its_videos():
    notes = [(8.0, 5), (24.0, 1), (0.0, 5)]
    rows = [sample(T2V, i) | {"fps": fps, "num_frames": n} for i, (fps, n) in enumerate(notes)]
    assert collate(T2V, rows, [0, 1, 2]).fps == [8.0, None, None]


def test_pictures_are_never_read(tmp_path, monkeypatch):
    write(tmp_path / "x.parquet", I2V, [sample(I2V, i) for i in range(3)])
    asked, original = [], pq.ParquetFile.read_row_group

    def spy(self, group, columns=None, **options):
        asked.append(columns)
        return original(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    got = Reader(open_dataset(tmp_path, I2V)).sample(0)
    assert "pil_image" not in got and got["caption"] == "caption 0"
    assert asked and not any(name.startswith("pil_image") for columns in asked for name in columns)


def test_a_type_refuses_the_files_of_another(tmp_path):
    paths = {k: write(tmp_path / k / "x.parquet", kind, [sample(kind, 0)]) for k, kind in ROW_TYPES.items()}
    for ours, kind in ROW_TYPES.items():
        for theirs, path in paths.items():
            if ours != theirs:
                with pytest.raises(UserError, match=f"x.parquet: not a file of row type '{ours}'"):
                    open_dataset(path, kind)


def test_sizes_that_do_not_fit_are_named_once_per_signature(tmp_path):
    rows = [sample(I2V, i) for i in range(4)]
    rows[2]["first_frame_latent"] = rows[2]["first_frame_latent"][:, :1]
    write(tmp_path / "x.parquet", I2V, rows)
    dataset = open_dataset(tmp_path, I2V)
    check_tensors(dataset, {"clip_feature": (None, 6), "text_embedding": (None, 8)}, "title")
    with pytest.raises(UserError) as error:
        check_tensors(dataset, {"clip_feature": (None, 9), "first_frame_latent": "vae_latent"}, "title")
    lines = str(error.value).splitlines()
    assert lines[0] == "title" and len(lines) == 4
    assert "x.parquet, row 0: clip_feature [5, 6] (3 such), expected [L, 9]" in str(error.value)
    assert "x.parquet, row 2: first_frame_latent [4, 1, 2, 3] (1 such), expected [4, 2, 2, 3]" in str(error.value)


def test_collate_pads_texts_only():
    rows = [sample(T2V, i) for i in range(2)]
    batch = collate(T2V, rows, [5, 9])
    assert batch.text.shape == (2, 2, 8) and batch.text_lens == [1, 2] and batch.indices == [5, 9]
    assert torch.equal(batch.latents, torch.stack([r["vae_latent"] for r in rows]))


@pytest.mark.parametrize("image_dim", [None, 6])
def test_models_without_an_image_branch_train_on_rows_with_and_without_features(recipe, tmp_path, image_dim):
    some_without_feature(tmp_path / "data" / "x.parquet", (2, 2, 4))
    config = {"in_channels": 12, "image_dim": image_dim, "added_kv_proj_dim": None if image_dim is None else 24}
    changes = {f"models.student.config.{k}": v for k, v in config.items()}
    changes |= {"training.data.preprocessed_data_type": "i2v", "training.data.data_path": str(tmp_path / "data")}
    changes |= {"training.loop.max_train_steps": 3, "training.data.train_batch_size": 2}
    if image_dim is None:
        assert train(recipe(tmp_path / "run", changes)).last_loss > 0
    else:
        with pytest.raises(UserError, match=r"row 0: clip_feature is missing .4 such., expected \[L, 6\]"):
            prepare(recipe(tmp_path / "run", changes))


@pytest.mark.parametrize("kind", ["t2va", "text_only"])
def test_types_that_a_method_cannot_use_are_refused_before_the_data_are_opened(recipe, tmp_path, kind):
    assert kind not in FAMILIES["wan"].row_types
    changes = {"training.data.preprocessed_data_type": kind, "training.data.data_path": str(tmp_path / "nothing")}
    with pytest.raises(UserError, match=f"{kind} cannot train wan with method sft; it takes: t2v, i2v"):
        prepare(recipe(tmp_path / "run", changes))
    assert not (tmp_path / "run").exists()


def test_videos_decide_size_and_rate_before_pictures(tmp_path):
    """However many pictures there are, whose rate is made up; of several shapes as common, the longest."""
    notes = {"num_frames": 1, "fps": 25.0}
    pictures = [sample(T2V, i, (1, 8, 8)) | notes for i in range(4)]
    assert first_fps(open_dataset(write(tmp_path / "a.parquet", T2V, pictures), T2V)) is None
    videos = [sample(T2V, 4 + i, grid) | {"num_frames": n, "fps": 8.0} for i, (n, grid) in
              enumerate([(5, (2, 8, 4)), (9, (3, 4, 4)), (5, (2, 8, 4)), (9, (3, 4, 4))])]  # fmt: skip
    data = open_dataset(write(tmp_path / "b.parquet", T2V, [*pictures, *videos]), T2V)
    assert common_shape(data) == (4, 3, 4, 4) and first_fps(data) == 8.0
