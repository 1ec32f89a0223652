"""Flat trees: stacking, partition and combination lose nothing, and gaps and duplicates are named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import trees
from core.errors import UserError

NAMES = st.text("abcxyz_0123456789", min_size=1, max_size=4)
KEYS = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
LAYERS = st.lists(st.dictionaries(KEYS, st.integers(), min_size=1, max_size=4), min_size=1, max_size=12)


@given(layers=LAYERS, others=st.dictionaries(KEYS, st.integers()), data=st.data())
def test_stack_inverts_unstack_in_any_order_and_beside_other_keys(layers, others, data):
    """Twelve layers, so that "10" comes after "9" and not after "1"."""
    flat = trees.unstack(layers, "blocks")
    root = {k: v for k, v in others.items() if trees.split_key(k, "blocks") is None}
    shuffled = dict(data.draw(st.permutations(list({**flat, **root}.items()))))
    assert trees.stack(shuffled, "blocks") == layers
    assert trees.unstack(trees.stack(shuffled, "blocks"), "blocks") == flat
    split = trees.layered(shuffled, ["blocks"])
    assert dict(split) == root and len(split) == len(root)
    assert trees.stack(split, "blocks") == layers


def test_stacks_of_a_model_do_not_mix():
    flat = {"blocks.0.w": 1, "blocks_2.0.w": 2, "a.blocks.0.w": 3, "blocks.w": 4, "blocks": 5}
    assert trees.stack(flat, "blocks") == [{"w": 1}]
    assert trees.stack(flat, "a.blocks") == [{"w": 3}]
    both = trees.layered(flat, ["blocks", "blocks_2"])
    assert dict(both) == {"a.blocks.0.w": 3, "blocks.w": 4, "blocks": 5}
    assert both.stacks == {"blocks": [{"w": 1}], "blocks_2": [{"w": 2}]}


@pytest.mark.parametrize("numbers", [[], [1], [0, 2], [0, 1, 3, 4]])
def test_gaps_and_missing_layers_are_named(numbers):
    flat = {"head": 0, **{f"blocks.{i}.w": i for i in numbers}}
    with pytest.raises(UserError, match="'blocks'") as error:
        trees.stack(flat, "blocks")
    assert str(numbers) in str(error.value)


@pytest.mark.parametrize(
    "key", ["blocks.03.w", "blocks.².w", "blocks.٣.w", "blocks.-1.w", "blocks.+1.w", "blocks.1_0.w"]
)
def test_only_plain_numbers_count_layers(key):
    """Otherwise two keys could name one layer, and one of them would be lost."""
    assert trees.split_key(key, "blocks") is None
    assert trees.stack({"blocks.0.w": 0, key: 1}, "blocks") == [{"w": 0}]


def test_layered_hands_out_its_own_layers_and_only_root_leaves():
    layers = [lambda fn, *a: fn({"w": 2}, *a)]
    tree = trees.Layered({"head": 1}, {"blocks": layers})
    assert trees.stack(tree, "blocks") is layers
    assert list(tree) == ["head"] and tree["head"] == 1 and "blocks.0.w" not in tree
    with pytest.raises(KeyError):
        tree["blocks.0.w"]


@given(tree=st.dictionaries(KEYS, st.integers()), kept=st.sets(KEYS))
def test_combine_inverts_partition(tree, kept):
    yes, no = trees.partition(tree, kept.__contains__)
    assert set(yes) == kept & set(tree) and trees.combine(yes, no) == tree
    assert list(yes) + list(no) == sorted(tree, key=lambda k: (k not in kept, list(tree).index(k)))


def test_combine_names_every_duplicate_and_changes_nothing():
    a, b, c = {"x": 1, "y": 2}, {"y": 3, "z": 4}, {"x": 5, "z": 6, "w": 7}
    with pytest.raises(UserError, match=r"\['x', 'y', 'z'\]"):
        trees.combine(a, b, c)
    assert (a, b, c) == ({"x": 1, "y": 2}, {"y": 3, "z": 4}, {"x": 5, "z": 6, "w": 7})
    assert trees.combine() == {}


def test_mapping_keeps_the_structure_and_none_is_a_leaf():
    tree = {"b": (torch.ones(2), [None, torch.zeros(3)]), "a": {"x": torch.ones(1)}}
    out = trees.map_tree(lambda leaf: None if leaf is None else leaf + 1, tree)
    assert out["b"][1][0] is None and torch.equal(out["b"][0], torch.full((2,), 2.0))
    assert [t.numel() for t in trees.tensors(tree)] == [1, 2, 3]
    with pytest.raises(ValueError):
        trees.map_tree(lambda a, b: a, {"a": 1}, {"b": 1})


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4))
def test_counts_equal_those_of_tensors(shapes):
    tree = {
        str(i): torch.zeros(s, dtype=(torch.float32, torch.bfloat16, torch.int8)[i % 3]) for i, s in enumerate(shapes)
    }
    assert trees.num_params(tree) == sum(t.numel() for t in tree.values())
    assert trees.num_bytes(tree) == sum(t.numel() * t.element_size() for t in tree.values())


def test_components_are_whole_words():
    assert trees.has_component("a.audio.weight", ["audio", "video"])
    assert not trees.has_component("a.audio_proj.weight", ["audio", "weigh"])
