"""Laws of checkpoints: bits survive, leaves are read apart, damage is named, a failed save changes nothing."""

import errno
import json
import os
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import save
from core.checkpoint import LazyLeaf, LazyTree, open_checkpoint
from core.errors import UserError
from core.rules import cast, pack
from core.save import SCHEMA_VERSION, check_metadata, describe, plan_shards, save_checkpoint, save_file
from core.stored import DTYPES
from core.transforms import apply, history

META = describe("toy", {"dim": 4, "flags": [True, None]}, ["cast bfloat16"])


def toy(n=4, rows=6):
    return {f"blocks.{i}.w": torch.arange(rows * 4.0).reshape(rows, 4) + 100 * i for i in range(n)}


def same(a, b):
    assert sorted(a) == sorted(b)
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


def of_dtype(dtype, *shape):
    """Random bits as a tensor of `dtype` (0 and 1 for bool)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (4,), (), (0, 5), (2, 0)])
def test_every_dtype_and_shape_keeps_its_bits(tmp_path, dtype, shape):
    tensor = of_dtype(dtype, *shape)
    save_file(tmp_path / "a.safetensors", {"x": torch.zeros(1), "t": tensor}, META)
    tree = open_checkpoint(tmp_path / "a.safetensors")
    assert tree["t"].shape == shape and tree["t"].dtype == dtype
    assert torch.equal(raw(tree["t"].read()), raw(tensor))
    if shape:
        assert torch.equal(raw(tree["t"].read_rows(1, shape[0])) if shape[0] else raw(tensor), raw(tensor[1:]))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 100))
def test_shards_hold_every_leaf_once_and_stay_below_the_limit(tmp_path_factory, rows, limit):
    folder = tmp_path_factory.mktemp("save")
    tree = {f"l{i}": torch.randn(n, 3) for i, n in enumerate(rows)}
    sizes = {k: t.numel() * 4 for k, t in tree.items()}
    for keys in plan_shards(tree, limit):
        assert len(keys) == 1 or sum(sizes[k] for k in keys) <= limit
    files = save_checkpoint(folder, tree, metadata=META, max_shard_bytes=limit)
    opened = open_checkpoint(folder)
    same(opened.read(), tree)
    assert sorted(opened.files) == sorted(files) == sorted(folder.glob("*.safetensors"))
    assert opened.metadata == {"format": "pt", **META}
    # The library's own reader agrees, and every shard carries the metadata.
    same({k: t for f in files for k, t in safetensors.torch.load_file(f).items()}, tree)
    assert all(open_checkpoint(f).metadata == opened.metadata for f in files)


def test_names_and_index_are_those_of_the_hub(tmp_path):
    save_checkpoint(tmp_path, toy(3), metadata=META, stem="model", max_shard_bytes=100)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 3 * 96}
    assert index["weight_map"] == {f"blocks.{i}.w": name for i, name in enumerate(names)}
    same(open_checkpoint(tmp_path / "model.safetensors.index.json").read(), toy(3))


def test_leaves_that_share_memory_or_are_strided_are_saved_as_they_look(tmp_path):
    base = torch.randn(6, 4)
    tree = {
        "head": base[:2],
        "rest": base[2:],
        "overlap": base[1:3],
        "again": base,
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(base[3:]),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }
    save_file(tmp_path / "a.safetensors", tree, META)
    same(open_checkpoint(tmp_path / "a.safetensors").read(), {k: t.detach() for k, t in tree.items()})
    assert (tmp_path / "a.safetensors").stat().st_size < sum(t.nbytes for t in tree.values()) + 2000


def test_reading_one_leaf_needs_no_other_bytes(tmp_path):
    save_checkpoint(tmp_path, toy(4), metadata=META, max_shard_bytes=200)
    tree = open_checkpoint(tmp_path)
    first, second = tree.files
    with open(first, "r+b") as file:
        file.truncate(first.stat().st_size - 96)  # the last leaf of the first shard is gone
    second.unlink()
    assert torch.equal(tree["blocks.0.w"].read(), toy()["blocks.0.w"])
    assert torch.equal(tree["blocks.3.w"].read(), toy()["blocks.3.w"]), "an opened file stays readable"
    with pytest.raises(UserError, match="blocks.1.w ends at byte"):
        tree["blocks.1.w"].read()


def test_reading_rows_needs_no_other_rows(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(path, toy(1), META)
    tree = open_checkpoint(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 48)  # rows 3 to 5
    assert torch.equal(tree["blocks.0.w"].read_rows(1, 3), toy()["blocks.0.w"][1:3])
    with pytest.raises(UserError, match="cut short after it was opened"):
        tree["blocks.0.w"].read_rows(2, 4)
    with pytest.raises(UserError, match=r"rows 2:7 do not exist in a leaf of shape \[6, 4\]"):
        tree["blocks.0.w"].read_rows(2, 7)


def test_read_gives_fresh_writable_tensors_and_names_unknown_keys(tmp_path):
    save_checkpoint(tmp_path, toy(2), metadata=META)
    tree = open_checkpoint(tmp_path)
    tree["blocks.0.w"].read().zero_()
    same(tree.read(["blocks.1.w", "blocks.0.w"]), toy(2))
    assert tree.read([]) == {}
    assert tree.read(["blocks.0.w"], device="meta")["blocks.0.w"].is_meta
    with pytest.raises(UserError, match=r"no leaf blocks.9.w \(did you mean 'blocks.[01].w'\?\)\n.*no leaf x"):
        tree.read(["blocks.9.w", "x"])


def test_several_files_are_one_tree(tmp_path):
    save_file(tmp_path / "a.safetensors", {"a": torch.ones(1)}, META)
    save_file(tmp_path / "b.safetensors", {"b": torch.zeros(2)}, META)
    save_checkpoint(tmp_path / "sub", toy(2), metadata=META, max_shard_bytes=96)
    tree = open_checkpoint([tmp_path / "a.safetensors", str(tmp_path / "b.safetensors"), tmp_path / "sub"])
    same(tree.read(), {"a": torch.ones(1), "b": torch.zeros(2), **toy(2)})
    assert len(tree.files) == 4
    assert sorted(open_checkpoint(tmp_path)) == ["a", "b"], "a folder without index is all its files"


# --- damage -------------------------------------------------------------------------------------------


def refuses(path, *words):
    with pytest.raises(UserError) as error:
        open_checkpoint(path)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"
    return str(error.value)


def test_every_length_of_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(path, toy(1, rows=2), {})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert f"{length} bytes, its header" in refuses(path, str(path), "cut short")
    path.write_bytes(whole[:-5])
    refuses(path, f"cut short: {len(whole) - 5} bytes, its header says {len(whole)}")
    path.write_bytes(whole + b"x")
    refuses(path, f"too long: {len(whole) + 1} bytes, its header says {len(whole)}")


def headed(header, data=b""):
    blob = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(blob)) + blob + data


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (headed(b"{not json"), "header of 9 bytes is corrupt"),
        (headed(b"\xff\xfe"), "corrupt"),
        (headed(b"[1, 2]"), "corrupt"),
        (headed({"a": 1}), "corrupt"),
        (headed({"a": {"dtype": "F32", "shape": [1]}}), "corrupt"),
        (headed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "not safetensors"),
        (headed({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "not safetensors"),
        (headed({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, b"1234"), "a has dtype F4"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"PK\x03\x04 a zip file of some length", "not safetensors"),
    ],
)
def test_what_is_not_safetensors_is_refused(tmp_path, content, word):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    refuses(path, str(path), word)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_a_damaged_header_never_gives_anything_but_our_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "a.safetensors"
    save_file(path, toy(2, rows=1), META)
    blob = bytearray(path.read_bytes())
    length = struct.unpack("<Q", blob[:8])[0]
    for at in data.draw(st.lists(st.integers(0, 8 + length - 1), min_size=1, max_size=3)):
        blob[at] = data.draw(st.integers(0, 255))
    path.write_bytes(blob)
    try:
        open_checkpoint(path).read()
    except UserError as error:
        assert str(path) in str(error)


def test_pickles_missing_files_and_pipeline_folders_are_refused_with_the_reason(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    refuses(tmp_path / "a.pt", "a.pt: a pickle, which can run code when loaded: convert it")
    refuses(tmp_path, "no *.safetensors in this folder", "pickles are not loaded, convert them: a.pt")
    text = refuses([tmp_path / "no.safetensors", tmp_path / "x.bin", tmp_path / "gone"], "no.safetensors: no such file")
    assert "x.bin: a pickle" in text and "gone: no such file" in text
    (tmp_path / "model_index.json").write_text("{}")
    refuses(tmp_path, "a pipeline folder", str(tmp_path / "transformer"))
    with pytest.raises(UserError, match="no path was given"):
        open_checkpoint([])


def test_an_index_that_does_not_hold_what_it_promises(tmp_path):
    files = save_checkpoint(tmp_path, toy(4), metadata=META, max_shard_bytes=96)
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] |= {"extra.w": files[0].name, "other.w": files[0].name}
    index.write_text(json.dumps(data))
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-1])
    safetensors.torch.save_file({"blocks.3.w": torch.ones(1), "blocks.0.w": torch.ones(1)}, files[3])
    refuses(
        tmp_path,
        f"{files[0]}: lacks extra.w, other.w, which the index promises",
        f"{files[1]}: no such file",
        f"{files[2]}: cut short",
        f"{files[0]} and {files[3]} both hold blocks.0.w",
    )
    (tmp_path / "second.safetensors.index.json").write_text("{}")
    refuses(tmp_path, "several indices, give one")
    refuses(tmp_path / "second.safetensors.index.json", "weight_map must map keys to file names")
    index.write_text("{")
    refuses(index, "not valid JSON")
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    refuses(index, "beside the index, not at ../a.safetensors")


def test_files_of_two_models_do_not_make_one_tree(tmp_path):
    for name in ("wan", "ltx2"):
        save_file(tmp_path / f"{name}.safetensors", {name: torch.ones(1)}, describe(name, {}))
    refuses(tmp_path, "files of different models", "wan.safetensors is wan")


# --- metadata and saving --------------------------------------------------------------------------------


def test_metadata_describes_model_config_transforms_and_versions(tmp_path):
    tree = {"to_q.weight": torch.randn(2, 2), "to_k.weight": torch.randn(2, 2)}
    save_checkpoint(tmp_path / "in", tree, metadata=describe("toy", {"dim": 4}))
    source = open_checkpoint(tmp_path / "in")
    bound = pack("to_qk", ["to_q", "to_k"])(source.specs)
    save_checkpoint(tmp_path / "out", apply(source, bound), metadata=describe("toy", {"dim": 4}, history(bound)))
    found = open_checkpoint(tmp_path / "out").metadata
    assert json.loads(found["config"]) == {"dim": 4}
    assert json.loads(found["transforms"]) == ["pack to_qk <- to_q, to_k"]
    assert found["model_type"] == "toy" and found["schema_version"] == "1" and found["project_version"]
    with pytest.raises(UserError, match="config of toy cannot be written as JSON"):
        describe("toy", {"dtype": torch.float32})


def test_another_model_and_a_newer_schema_are_refused_together():
    check_metadata(LazyTree({}, META), "toy")
    check_metadata(LazyTree({}, {"format": "pt"}), "toy")
    newer = LazyTree({}, {**META, "schema_version": str(SCHEMA_VERSION + 1)}, ["a.safetensors"])
    with pytest.raises(UserError) as error:
        check_metadata(newer, "wan")
    words = ("a.safetensors", "a model of type 'toy', wanted 'wan'", "schema_version is 2", "reads up to 1")
    assert all(word in str(error.value) for word in words)
    with pytest.raises(UserError, match="schema_version is 'x', must be a number"):
        check_metadata(LazyTree({}, {"schema_version": "x"}), "toy")


def test_what_cannot_be_stored_is_listed_before_anything_is_written(tmp_path):
    tree = {
        "fine": torch.ones(1),
        "meta": torch.ones(1, device="meta"),
        "number": 3,
        "wide": torch.ones(1, dtype=torch.complex128),
        "__metadata__": torch.ones(1),
    }
    with pytest.raises(UserError) as error:
        save_checkpoint(tmp_path / "out", tree, metadata={"epoch": 3})
    words = (
        "meta is on the meta device",
        "number is a int",
        "wide has dtype torch.complex128",
        "metadata 'epoch' is 3",
    )
    assert all(word in str(error.value) for word in (*words, "'__metadata__' is not"))
    with pytest.raises(UserError, match="the tree is empty"):
        save_checkpoint(tmp_path / "out", {}, metadata=META)
    with pytest.raises(UserError, match="max_shard_bytes is 0"):
        save_checkpoint(tmp_path / "out", toy(1), metadata=META, max_shard_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file stands where"):
        save_checkpoint(tmp_path / "file", toy(1), metadata=META)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_save_replaces_its_own_shards_and_keeps_other_files(tmp_path):
    folder = tmp_path / "transformer"
    save_checkpoint(folder, toy(5), metadata=META, max_shard_bytes=96)
    save_checkpoint(folder, {"ema": torch.ones(1)}, metadata=META, stem="ema")
    (folder / "config.json").write_text('{"dim": 4}')
    (folder / "notes").mkdir()
    (folder / "notes" / "diffusion_pytorch_model.safetensors").write_text("not ours to remove")
    save_checkpoint(folder, toy(2), metadata=META, max_shard_bytes=96)
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", *names, index, "ema.safetensors", "notes"]
    same(open_checkpoint(folder).read(), toy(2))
    save_checkpoint(folder, toy(2), metadata=META)
    kept = ["config.json", "diffusion_pytorch_model.safetensors", "ema.safetensors", "notes"]
    assert sorted(p.name for p in folder.iterdir()) == kept
    assert (folder / "config.json").read_text() == '{"dim": 4}' and len(list((folder / "notes").iterdir())) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["transformer"], "temporary files are left"


def test_a_checkpoint_can_be_rewritten_in_place_through_a_lazy_transform(tmp_path):
    save_checkpoint(tmp_path, toy(3), metadata=META, max_shard_bytes=96)
    source = open_checkpoint(tmp_path)
    half = apply(source, cast(torch.bfloat16)(source.specs))
    for _ in range(2):  # the second time the source's files are gone from the folder
        save_checkpoint(tmp_path, half, metadata=META, max_shard_bytes=100)
        same(open_checkpoint(tmp_path).read(), {k: t.bfloat16() for k, t in toy(3).items()})


def test_lazy_leaves_are_written_before_the_next_is_read(tmp_path, monkeypatch):
    events, append = [], save._append

    def leaf(key, tensor):
        return LazyLeaf(tuple(tensor.shape), tensor.dtype, lambda memo: events.append(f"read {key}") or tensor)

    monkeypatch.setattr(save, "_append", lambda file, key, *a: events.append(f"write {key}") or append(file, key, *a))
    tree = {k: leaf(k, t) for k, t in toy(3).items()}
    save_checkpoint(tmp_path, tree, metadata=META, max_shard_bytes=200)
    assert events == [f"{what} blocks.{i}.w" for i in range(3) for what in ("read", "write")]
    same(open_checkpoint(tmp_path).read(), toy(3))


def test_leaves_of_any_dtypes_are_aligned_for_other_readers(tmp_path):
    tree = {f"{i}": of_dtype(d, 3) for i, d in enumerate([torch.bool, torch.float64, torch.bfloat16, torch.float32])}
    save_file(tmp_path / "a.safetensors", tree, {"note": "ü"})
    theirs = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(raw(theirs[k]), raw(t)) and theirs[k].dtype == t.dtype for k, t in tree.items())
    blob = (tmp_path / "a.safetensors").read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt", "note": "ü"}
    assert all((8 + length + v["data_offsets"][0]) % tree[k].dtype.itemsize == 0 for k, v in header.items())


def test_a_leaf_that_is_not_what_it_said_is_never_published(tmp_path):
    tree = {"a": LazyLeaf((3,), torch.float32, lambda memo: torch.ones(2))}
    with pytest.raises(RuntimeError, match="a: read 8 bytes, its shape and dtype said 12"):
        save_file(tmp_path / "a.safetensors", tree, {})
    assert list(tmp_path.iterdir()) == []


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    (tmp_path / "plain").touch()
    save_file(tmp_path / "a.safetensors", toy(1), META)
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def full_after(count):
    """A disk that is full after `count` leaves, in the middle of the next."""
    append, done = save._append, []

    def writer(file, key, *rest):
        if len(done) == count:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done.append(key)
        append(file, key, *rest)

    return writer


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    folder, single = tmp_path / "model", tmp_path / "one.safetensors"
    save_checkpoint(folder, toy(3), metadata=META, max_shard_bytes=96)
    save_file(single, toy(1), META)
    (folder / "config.json").write_text("{}")
    before = {p: p.read_bytes() for p in [single, *folder.iterdir()]}
    new = {k: t + 1 for k, t in toy(6).items()}
    with monkeypatch.context() as patch:
        patch.setattr(save, "_append", full_after(3))
        with pytest.raises(UserError, match="No space left on device") as caught:
            save_checkpoint(folder, new, metadata=META, max_shard_bytes=96)
        patch.setattr(save, "_append", full_after(0))
        with pytest.raises(UserError, match="one.safetensors: not saved"):
            save_file(single, new, META)
    assert str(folder) in str(caught.value) and f"{6 * 96} bytes are needed" in str(caught.value)
    assert {p: p.read_bytes() for p in [single, *folder.iterdir()]} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "one.safetensors"], "temporary files are left"
    same(open_checkpoint(folder).read(), toy(3))


def test_a_diffusers_folder_opens_and_ours_loads_in_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    # A model that diffusers loads without accelerate; the folder's layout is the same for all of them.
    kind, sides = diffusers.AutoencoderTiny, ("encoder", "decoder")
    model = kind(**{f"{s}_block_out_channels": (8, 8) for s in sides}, **{f"num_{s}_blocks": (1, 1) for s in sides})
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    theirs = open_checkpoint(tmp_path / "theirs")
    assert len(theirs.files) > 2
    same(theirs.read(), model.state_dict())
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_bytes((tmp_path / "theirs" / "config.json").read_bytes())
    save_checkpoint(tmp_path / "ours", theirs, metadata=describe("taesd", {}), max_shard_bytes=10_000)
    loaded = kind.from_pretrained(tmp_path / "ours")
    same(loaded.state_dict(), model.state_dict())


def test_large_leaves_are_read_in_slices(tmp_path, monkeypatch):
    """Slices that do not divide the leaf; a file cut in the middle of one is still named."""
    monkeypatch.setattr("core.stored.SLICE", 1000)
    leaf = torch.randn(41, 53)
    save_file(tmp_path / "a.safetensors", {"big": leaf, "small": leaf[0]}, {})
    tree = open_checkpoint(tmp_path / "a.safetensors")
    assert torch.equal(tree["big"].read(), leaf) and torch.equal(tree["big"].read_rows(3, 30), leaf[3:30])
    os.truncate(tmp_path / "a.safetensors", 5000)
    with pytest.raises(UserError, match="a.safetensors: cut short after it was opened: big"):
        tree["big"].read()


def test_reading_to_another_device_loads_each_leaf_once_and_in_order():
    """The meta device stands for one that copies; an error of a leaf is raised as it is."""
    seen = []
    leaf = lambda n: LazyLeaf((n,), torch.float32, lambda memo: seen.append(n) or torch.ones(n))  # noqa: E731
    tree = LazyTree({str(n): leaf(n) for n in (3, 1, 2)}, {})
    got = tree.read(device="meta")
    assert seen == [3, 1, 2] and {k: (x.shape[0], x.device.type) for k, x in got.items()} == {
        str(n): (n, "meta") for n in (3, 1, 2)
    }

    def broken(memo):
        raise UserError("cut short")

    tree = LazyTree({"a": leaf(1), "b": LazyLeaf((1,), torch.float32, broken)}, {})
    with pytest.raises(UserError, match="cut short"):
        tree.read(device="meta")
