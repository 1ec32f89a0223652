"""Specs: initialisation leaf by leaf, meta trees, and one message for everything that does not fit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import keys, specs
from core.errors import UserError
from core.specs import ParamSpec

INITS = st.sampled_from([specs.ZEROS, specs.ONES, specs.normal(0.3), specs.fan_in(4), specs.xavier(3, 5)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
SPECS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.builds(ParamSpec, st.lists(st.integers(1, 4), max_size=3).map(tuple), DTYPES, init=INITS),
    min_size=1,
    max_size=5,
)


@given(tree=SPECS, seed=st.integers(0, 99), data=st.data())
def test_a_leaf_depends_on_the_key_and_its_name_alone(tree, seed, data):
    """Not on the order of the specs, not on the other leaves, not on PyTorch's global generator."""
    torch.manual_seed(seed)
    whole = specs.init(tree, keys.key(seed))
    order = data.draw(st.permutations(list(tree)))
    torch.manual_seed(seed + 1)
    again = specs.init({k: tree[k] for k in order}, keys.key(seed))
    alone = {k: specs.init({k: tree[k]}, keys.key(seed))[k] for k in tree}
    for name, spec in tree.items():
        assert torch.equal(whole[name], again[name]) and torch.equal(whole[name], alone[name])
        assert (whole[name].shape, whole[name].dtype) == (spec.shape, spec.dtype)


def test_names_and_seeds_make_independent_leaves():
    tree = {"a": ParamSpec((1000,), init=specs.normal(1.0)), "b": ParamSpec((1000,), init=specs.normal(1.0))}
    one, two = specs.init(tree, keys.key(0)), specs.init(tree, keys.key(1))
    # Correlation of independent normals has deviation 1 / sqrt(1000) = 0.03; 0.2 is six of them.
    for x, y in [(one["a"], one["b"]), (one["a"], two["a"]), (one["b"], two["b"])]:
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 0.2


def test_scales_of_the_initialisers():
    """20,000 draws: the deviation is known to 0.5 %, and a uniform comes within 0.1 % of its ends."""
    shape = (20_000,)
    drawn = {n: specs.draw(ParamSpec(shape, init=i), keys.key(0)) for n, i in [
        ("normal", specs.normal(0.02)), ("fan_in", specs.fan_in(16)), ("xavier", specs.xavier(10, 14)),
    ]}  # fmt: skip
    assert drawn["normal"].std().item() == pytest.approx(0.02, rel=0.02)
    for name, bound in [("fan_in", 1 / 4), ("xavier", math.sqrt(6 / 24))]:
        assert bound * 0.995 < drawn[name].abs().max() <= bound
        assert abs(drawn[name].mean()) < 0.03 * bound
    assert specs.draw(ParamSpec((2,), init=specs.ONES), keys.key(0)).tolist() == [1, 1]
    with pytest.raises(ValueError, match="orthogonal.*zeros, ones, normal, uniform"):
        specs.draw(ParamSpec((2,), init=specs.Init("orthogonal")), keys.key(0))


def test_a_tied_leaf_is_stored_once():
    tree = {"embed": ParamSpec((3, 2), init=specs.normal(1.0)), "head": ParamSpec((3, 2), alias_of="embed")}
    params = specs.init(tree, keys.key(0))
    assert list(params) == list(specs.abstract(tree)) == ["embed"]
    specs.check(params, tree)
    both = specs.tied(params, tree)
    assert both["head"] is both["embed"] is params["embed"]
    with pytest.raises(UserError, match=r"unexpected head \[3, 2\]: it is tied to embed"):
        specs.check(both, tree)


def test_abstract_takes_no_memory():
    tree = {"w": ParamSpec((1 << 20, 1 << 20), torch.bfloat16)}
    leaf = specs.abstract(tree)["w"]
    assert leaf.is_meta and leaf.shape == (1 << 20, 1 << 20) and leaf.dtype == torch.bfloat16
    specs.check({"w": leaf}, tree, dtypes=True)


@given(tree=SPECS, data=st.data())
def test_check_lists_everything_in_one_message(tree, data):
    """Every key is right, absent, of another shape or of another dtype; nothing else is named."""
    leaves, faults = specs.abstract(tree), []
    for k, s in tree.items():
        what = data.draw(st.sampled_from(["right", "absent", "shape", "dtype"]))
        if what == "absent":
            del leaves[k]
            faults.append(f"missing {k} {list(s.shape)}")
        elif what == "shape":
            leaves[k] = torch.empty(*s.shape, 7, device="meta", dtype=s.dtype)
            faults.append(f"{k} has shape {[*s.shape, 7]}, expected {list(s.shape)}")
        elif what == "dtype":
            leaves[k] = leaves[k].to(torch.int8)
            faults.append(f"{k} has dtype torch.int8, expected {s.dtype}")
    for k in data.draw(st.sets(st.text("xyz", min_size=1, max_size=3), max_size=2)):
        leaves[k] = torch.empty(5, device="meta")
        faults.append(f"unexpected {k} [5]")
    if not faults:
        specs.check(leaves, tree, dtypes=True)
        return
    with pytest.raises(UserError) as error:
        specs.check(leaves, tree, what="the tree", dtypes=True)
    title, *lines = str(error.value).split("\n  - ")
    assert title == f"the tree: {len(faults)} keys do not fit the model"
    assert sorted(lines) == sorted(faults)


def test_a_key_with_two_faults_names_both():
    with pytest.raises(
        UserError, match=r"w has shape \[3\], expected \[2\] and dtype torch.int8, expected torch.float32"
    ):
        specs.check({"w": torch.zeros(3, dtype=torch.int8)}, {"w": ParamSpec((2,))}, dtypes=True)


def test_dtypes_are_compared_on_request_only():
    specs.check({"w": torch.zeros(2, dtype=torch.bfloat16)}, {"w": ParamSpec((2,))})


def test_specs_of_tensors_and_of_specs():
    spec = ParamSpec((2, 3), axes=("embed", None), keep_fp32=True)
    assert specs.specs_of({"a": torch.zeros(2, dtype=torch.int8), "b": spec}) == {
        "a": ParamSpec((2,), torch.int8),
        "b": spec,
    }
    with pytest.raises(ValueError, match="axes"):
        ParamSpec((2, 3), axes=("embed",))
