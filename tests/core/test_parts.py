"""Sharded folders: leaves put together from any regions, and everything wrong with the files in one message."""

import itertools
import json
import math
import os
import resource
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import parts, regions, save
from core.checkpoint import LazyLeaf, open_checkpoint
from core.errors import UserError
from core.parts import Place, part_name
from core.rules import cast
from core.save import describe, save_part
from core.transforms import apply

META = describe("toy", {"dim": 4}) | {"step": "3"}


def write_parts(folder, tree, files, metadata=META):
    """`files`: for each file `{key: region}`."""
    for number, held in enumerate(files, 1):
        leaves = {k: tree[k][r] for k, r in held.items()}
        places = {k: Place(tuple(s.start for s in r), tuple(tree[k].shape)) for k, r in held.items()}
        save_part(folder, leaves, places, number, len(files), metadata=metadata)


def by_rows(tree, count):
    """Each leaf cut into `count` files along dimension 0; a scalar lies in the first."""
    files = [{} for _ in range(count)]
    for key, leaf in tree.items():
        if not leaf.shape:
            files[0][key] = ()
            continue
        step = -(-leaf.shape[0] // count)
        for held, first in zip(files, range(0, leaf.shape[0], step), strict=False):
            held[key] = (slice(first, min(first + step, leaf.shape[0])), *regions.whole(leaf.shape[1:]))
    return [held for held in files if held]


def toy():
    torch.manual_seed(0)
    return {"a.w": torch.randn(7, 5), "a.b": torch.randn(7).bfloat16(), "s": torch.tensor(3), "t": torch.randn(2, 3, 4)}


def same(a, b):
    assert sorted(a) == sorted(b)
    assert all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in b)


@st.composite
def tilings(draw):
    """A shape, and regions that tile it: a grid whose columns are cut again, each in its own way."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    cuts = lambda n: sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})  # noqa: E731
    tiles = [()]
    for n in shape:
        tiles = [(*t, slice(a, b)) for t in tiles for a, b in itertools.pairwise(cuts(n))]
    return shape, tiles


@settings(max_examples=30, deadline=None, derandomize=True)
@given(tilings(), st.data())
def test_any_tiling_over_any_files_is_the_leaf_whole_or_by_region(tmp_path_factory, tiling, data):
    folder = tmp_path_factory.mktemp("tiles")
    shape, tiles = tiling
    leaf = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    # A file holds one region of a leaf at most.
    order = data.draw(st.permutations(range(len(tiles))))
    write_parts(folder, {"x": leaf}, [{"x": tiles[i]} for i in order])
    tree = open_checkpoint(folder)
    assert torch.equal(tree["x"].read(), leaf) and tree["x"].shape == shape and tree["x"].dtype == torch.int32
    where = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    got = tree["x"].read(where)
    assert torch.equal(got, leaf[where]) and got.is_contiguous() and got.untyped_storage().nbytes() == 4 * got.numel()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(tilings(), st.data())
def test_every_overlap_and_every_hole_is_found(tiling, data):
    """Against counting how often each element is covered."""
    shape, tiles = tiling
    boxes = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape))
    more = [tuple(slice(*sorted(ends)) for ends in box) for box in data.draw(st.lists(boxes, max_size=2))]
    held = [t for t in tiles if data.draw(st.booleans())] + more
    count = torch.zeros(shape, dtype=torch.int64)
    for region in held:
        count[region] += 1
    found = set(regions.overlaps(held))
    expected = {
        (i, j)
        for i, j in itertools.combinations(range(len(held)), 2)
        if regions.overlap(held[i], held[j]) is not None
    }
    assert found == expected and bool(found) == bool((count > 1).any())
    if not found:
        assert regions.uncovered(shape, held) == int((count == 0).sum())


def test_a_sharded_folder_is_like_any_checkpoint(tmp_path):
    tree = toy()
    write_parts(tmp_path / "ck", tree, by_rows(tree, 3))
    opened = open_checkpoint(tmp_path / "ck")
    same(opened.read(), tree)
    assert opened.metadata == {"format": "pt", **META}, "what says of a file where it lies says nothing of the tree"
    assert [f.name for f in opened.files] == [part_name(i, 3) for i in (1, 2, 3)]
    half = apply(opened, cast(torch.float64)(opened.specs))
    assert torch.equal(half["a.w"].read((slice(2, 6), slice(1, 4))), tree["a.w"][2:6, 1:4].double())
    assert torch.equal(half["a.w"].read_rows(3, 7), tree["a.w"][3:7].double())
    # Each file is safetensors of its own, for any reader.
    theirs = [safetensors.torch.load_file(f) for f in opened.files]
    assert torch.equal(torch.cat([t["a.w"] for t in theirs]), tree["a.w"])
    save.save_checkpoint(tmp_path / "whole", opened, metadata=META)
    same(open_checkpoint([tmp_path / "whole"]).read(), tree)


def test_two_sharded_folders_are_one_tree_as_files_are(tmp_path):
    a, b = toy(), {f"x.{k}": v for k, v in toy().items()}
    write_parts(tmp_path / "a", a, by_rows(a, 2))
    write_parts(tmp_path / "b", b, by_rows(b, 3))
    same(open_checkpoint([tmp_path / "a", tmp_path / "b"]).read(), a | b)
    with pytest.raises(UserError, match="both hold a.w"):
        open_checkpoint([tmp_path / "a", tmp_path / "a"])


def test_a_region_needs_no_other_file(tmp_path):
    tree = {"w": torch.randn(8, 4)}
    write_parts(tmp_path, tree, by_rows(tree, 4))
    opened = open_checkpoint(tmp_path)
    (tmp_path / part_name(3, 4)).unlink()
    assert torch.equal(opened["w"].read((slice(1, 4), slice(2, 4))), tree["w"][1:4, 2:4])
    with pytest.raises(UserError, match="part-00003-of-00004.*cannot be opened any more"):
        opened["w"].read()
    write_parts(tmp_path, {"w": torch.zeros(8, 4)}, by_rows(tree, 4))
    with pytest.raises(UserError, match="part-00001-of-00004.*was replaced after it was opened"):
        opened["w"].read_rows(0, 1)


@pytest.mark.parametrize("slice_bytes", [16, 40, 1000])
def test_regions_of_inner_dimensions_are_read_a_few_rows_at_a_time(tmp_path, monkeypatch, slice_bytes):
    monkeypatch.setattr("core.stored.SLICE", slice_bytes)
    tree = {"w": torch.randn(9, 4, 3)}
    write_parts(tmp_path, tree, by_rows(tree, 2))
    leaf = open_checkpoint(tmp_path)["w"]
    every = slice(None)
    for where in ((slice(1, 8), slice(1, 3), every), (every, every, slice(2, 3)), (slice(4, 4), every, every)):
        assert torch.equal(leaf.read(where), tree["w"][where])


def test_a_leaf_without_short_cut_is_cut_and_freed():
    base, seen = torch.randn(6, 4), []
    leaf = LazyLeaf((6, 4), torch.float32, lambda memo: seen.append(memo) or base)
    got = leaf.read((slice(2, 4), slice(None)))
    assert torch.equal(got, base[2:4]) and got.untyped_storage().nbytes() == 32
    rows = LazyLeaf((6, 4), torch.float32, leaf.load, lambda a, b: base[a:b])
    assert torch.equal(rows.read((slice(2, 4), slice(1, 3))), base[2:4, 1:3]) and len(seen) == 1
    memo = {}
    leaf.read(memo=memo)
    assert seen[-1] is memo


@pytest.mark.parametrize("where", [(slice(0, 2),), (slice(0, 8), slice(0, 4)), (slice(3, 2), slice(0, 4)),
                                   (slice(-1, 2), slice(0, 4)), (slice(0, 4, 2), slice(0, 4)), ()])  # fmt: skip
def test_regions_that_do_not_exist(where):
    leaf = LazyLeaf((6, 4), torch.float32, lambda memo: torch.zeros(6, 4))
    with pytest.raises(UserError, match=r"region \[.*\] does not exist in a leaf of shape \[6, 4\]"):
        leaf.read(where)


# --- damage -------------------------------------------------------------------------------------------------------


def refused(folder) -> str:
    with pytest.raises(UserError) as error:
        open_checkpoint(folder)
    return str(error.value)


def headers(path, change):
    """Rewrites a file with its metadata changed."""
    blob = path.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8 : 8 + length])
    change(header["__metadata__"])
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + blob[8 + length :])


def edit(number, key, change):
    """Changes the place of a leaf in the metadata of a file."""

    def act(folder):
        def table(metadata):
            found = json.loads(metadata[parts.REGIONS])
            found[key] = found[key] | change
            metadata[parts.REGIONS] = json.dumps(found)

        headers(folder / part_name(number, 3), table)

    return act


def entry(number, values):
    return lambda folder: headers(folder / part_name(number, 3), lambda metadata: metadata.update(values))


def drop(number, name):
    return lambda folder: headers(folder / part_name(number, 3), lambda metadata: metadata.pop(name))


DAMAGE = {
    "a file is missing": (lambda f: (f / part_name(2, 3)).unlink(), ["ck: part-00002-of-00003.safetensors is missing"]),
    "a file is cut": (
        lambda f: (f / part_name(2, 3)).write_bytes((f / part_name(2, 3)).read_bytes()[:-1]),
        ["part-00002-of-00003.safetensors: cut short"],
    ),
    "a copy": (
        lambda f: (f / "part-00009-of-00003.safetensors").write_bytes((f / part_name(2, 3)).read_bytes()),
        ["part-00002-of-00003.safetensors and ", "part-00009-of-00003.safetensors are both part 2 of 3"],
    ),
    "of another count": (entry(2, {parts.PART: "2/4"}), ["parts of checkpoints of 3 and of 4 files"]),
    "of another save": (entry(2, {"step": "4"}), ["part-00002-of-00003.safetensors differ in step: of two saves"]),
    "no number": (drop(2, parts.PART), ["its metadata entry 'latentree.part' is damaged"]),
    "a number that is none": (entry(2, {parts.PART: "5/3"}), ["its metadata entry 'latentree.part' is damaged"]),
    "no regions": (drop(3, parts.REGIONS), ["its metadata entry 'latentree.regions' is damaged"]),
    "regions of other leaves": (entry(1, {parts.REGIONS: "{}"}), ["regions' does not describe its tensors"]),
    "a negative place": (edit(1, "a.w", {"at": [-1, 0]}), ["regions' does not describe its tensors"]),
    "a place that is no number": (edit(1, "a.w", {"at": [0.5, 0]}), ["regions' does not describe its tensors"]),
    "another shape": (
        edit(2, "a.w", {"of": [7, 6]}),
        ["a.w: its files do not agree: [7, 5] torch.float32 in part-00001", "[7, 6] torch.float32 in part-00002"],
    ),
    "outside": (edit(3, "a.w", {"at": [7, 0]}), ["a.w: [1, 5] at [7, 0] in part-00003", "outside its shape [7, 5]"]),
    "of another rank": (edit(3, "a.w", {"at": [6]}), ["a.w: [1, 5] at [6] in part-00003", "outside its shape"]),
    "overlapping": (
        edit(2, "a.w", {"at": [2, 0]}),
        ["a.w: [0:3, 0:5] of part-00001-of-00003.safetensors and [2:5, 0:5] of part-00002", "overlap"],
    ),
    "a hole": (
        lambda f: [edit(n, "a.w", {"of": [9, 5]})(f) for n in (1, 2, 3)], ["a.w: 10 of 45 elements are in no file"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    act, words = DAMAGE[damage]
    tree = toy()
    write_parts(tmp_path / "ck", tree, by_rows(tree, 3))
    act(tmp_path / "ck")
    said = refused(tmp_path / "ck")
    assert all(word in said for word in words), said
    assert said.count("\n") == 1, "one fault is one line"


def test_all_faults_are_in_one_message(tmp_path):
    tree = {f"l{i}": torch.randn(6, 2) for i in range(20)}
    write_parts(tmp_path / "a", tree, by_rows(tree, 3))
    for n in (1, 2, 3):
        for i in range(10):
            edit(n, f"l{i}", {"of": [7, 2]})(tmp_path / "a")
    edit(2, "l10", {"at": [1, 0]})(tmp_path / "a")
    said = refused(tmp_path / "a")
    assert said.count("2 of 14 elements are in no file") == parts.SHOWN and "and 2 more leaves likewise" in said
    assert "l10: [0:2, 0:2] of part-00001" in said
    write_parts(tmp_path / "b", tree, by_rows(tree, 6))
    for n in (1, 3):
        (tmp_path / "b" / part_name(n, 6)).unlink()
    (tmp_path / "b" / part_name(5, 6)).write_bytes(b"junk")
    said = refused(tmp_path / "b")
    assert said.count("is missing") == 2 and "part-00005-of-00006.safetensors: not safetensors" in said


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_metadata_never_give_anything_but_our_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage")
    tree = {"a.w": torch.randn(3, 2)}
    write_parts(folder, tree, by_rows(tree, 3))
    path = folder / part_name(2, 3)
    blob = bytearray(path.read_bytes())
    start = blob.index(b'"latentree.part"')
    for at in data.draw(st.lists(st.integers(start, start + 90), min_size=1, max_size=3)):
        blob[at] = data.draw(st.integers(32, 126))
    path.write_bytes(blob)
    try:
        open_checkpoint(folder).read()
    except UserError as error:
        assert str(folder) in str(error)


def test_more_files_than_a_process_may_hold_open(tmp_path):
    """Three groups of hundreds of processes are more files than the usual limit."""
    tree = {"w": torch.randn(120, 2)}
    write_parts(tmp_path, tree, by_rows(tree, 120))
    held, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 20, hard))
    try:
        got = open_checkpoint(tmp_path)["w"].read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert torch.equal(got, tree["w"])
