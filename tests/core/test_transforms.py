"""Laws of transforms: inverses are bitwise, specs are kept, lazy equals eager, errors come before any read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.checkpoint import LazyLeaf, LazyTree
from core.errors import UserError
from core.rules import cast, drop, pack, rename, rename_regex, select, unpack, widens
from core.specs import ParamSpec, specs_of
from core.transforms import Bound, Rule, apply, bind_rules, compose, history, invert, move

laws = settings(max_examples=25, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def lazy(tree, log=None):
    """A lazy tree over tensors that notes every leaf it reads."""

    def leaf(key, tensor):
        def load(memo):
            log.append(key)
            return tensor

        return LazyLeaf(tuple(tensor.shape), tensor.dtype, load)

    log = [] if log is None else log
    return LazyTree({k: leaf(k, t) for k, t in tree.items()}, {"model_type": "toy"})


def unreadable(specs):
    """A lazy tree whose leaves must not be read."""

    def load(memo):
        raise AssertionError("a leaf was read")

    return LazyTree({k: LazyLeaf(s.shape, s.dtype, load) for k, s in specs.items()}, {})


def same_bits(a, b):
    """Equal keys in equal order, dtypes and bytes (NaN and -0.0 included)."""
    assert list(a) == list(b)
    for key in a:
        assert a[key].dtype == b[key].dtype and a[key].shape == b[key].shape, key
        raw = [t.contiguous().flatten().view(torch.uint8) for t in (a[key], b[key])]
        assert torch.equal(*raw), key


@st.composite
def trees(draw):
    """Blocks with split attention of unequal rows, in a shuffled key order, plus a few other leaves."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype, width = draw(dtypes), draw(st.integers(1, 4))
    tree = {"audio.table": torch.arange(3), "audio_proj.weight": torch.randn(2, 3, generator=generator)}
    for i in range(draw(st.integers(1, 3))):
        for part in ("to_q", "to_k", "to_v"):
            rows = draw(st.integers(1, 5))
            at = f"blocks.{i}.attn1.{part}"
            tree[f"{at}.weight"] = torch.randn(rows, width, generator=generator).to(dtype)
            tree[f"{at}.bias"] = torch.randn(rows, generator=generator).to(dtype)
    return {k: tree[k] for k in draw(st.permutations(sorted(tree)))}


LOSSLESS = {
    "rename": rename({"audio.table": "sound.table"}),
    "regex": rename_regex([(r"^blocks\.", "model.layers."), (r"^audio_proj", "proj")]),
    "pack": pack("to_qkv", ["to_q", "to_k", "to_v"]),
    "pack kv": pack("to_kv", ["to_k", "to_v"], under=["attn1"]),
    "widen": cast(torch.float32),
}


@laws
@given(trees(), st.permutations(["rename", "regex", "widen"]), st.sampled_from(["pack", "pack kv"]))
def test_inverse_specs_and_laziness(tree, others, packing):
    bound = compose(*(LOSSLESS[name] for name in [*others[:1], packing, *others[1:]]))(specs_of(tree))
    done = apply(tree, bound)
    assert list(done) == list(bound.specs)
    assert all((t.shape, t.dtype) == (bound.specs[k].shape, bound.specs[k].dtype) for k, t in done.items())
    later = apply(lazy(tree), bound)
    assert later.specs == specs_of(done) and later.metadata == {"model_type": "toy"}
    same_bits(later.read(), done)
    same_bits(apply(done, invert(bound)), tree)
    same_bits(apply(later, invert(bound)).read(), tree)
    assert invert(bound).specs == bound.source
    same_bits(apply(tree, invert(invert(bound))), done)


@laws
@given(trees())
def test_pack_joins_rows_in_the_order_of_the_parts(tree):
    packed = apply(tree, pack("to_qkv", ["to_q", "to_k", "to_v"])(specs_of(tree)))
    for leaf in ("weight", "bias"):
        parts = [tree[f"blocks.0.attn1.{p}.{leaf}"] for p in ("to_q", "to_k", "to_v")]
        assert torch.equal(packed[f"blocks.0.attn1.to_qkv.{leaf}"], torch.cat(parts))
    assert not any("to_q." in k for k in packed) and "audio.table" in packed


def test_pack_then_gate_then_base_names_round_trip():
    tree = {
        f"model.diffusion_model.transformer_blocks.{i}.{name}": torch.randn(*shape)
        for i in range(2)
        for name, shape in {
            "attn1.to_v.weight": (3, 4),
            "attn1.norm.weight": (4,),
            "attn1.to_q.weight": (2, 4),
            "attn1.to_k.weight": (1, 4),
            "attn2.to_q.weight": (2, 4),
            "attn2.to_k.weight": (2, 5),
            "attn2.to_v.weight": (2, 5),
            "attn1.to_gate_compress.bias": (2,),
        }.items()
    } | {"model.diffusion_model.patchify_proj.bias": torch.randn(4)}
    convert = compose(
        pack("to_qkv", ["to_q", "to_k", "to_v"], under=("attn1",)),
        pack("to_kv", ["to_k", "to_v"], under=lambda key: ".attn2." in key),
        rename_regex([(r"\.to_gate_compress\.", ".to_gate_logits."), (r"^nothing", "")], partial=True),
        rename_regex([(r"^model\.diffusion_model\.", "model.")]),
        rename({"model.patchify_proj.bias": "model.patch.bias"}),
    )
    bound = convert(specs_of(tree))
    assert list(bound.specs)[:6] == [
        "model.transformer_blocks.0.attn1.to_qkv.weight",
        "model.transformer_blocks.0.attn1.norm.weight",
        "model.transformer_blocks.0.attn2.to_q.weight",
        "model.transformer_blocks.0.attn2.to_kv.weight",
        "model.transformer_blocks.0.attn1.to_gate_logits.bias",
        "model.transformer_blocks.1.attn1.to_qkv.weight",
    ]
    same_bits(apply(apply(tree, bound), invert(bound)), tree)
    assert history(bound)[0] == "pack to_qkv <- to_q, to_k, to_v" and len(history(bound)) == 5
    nested = compose(compose(convert), compose())(specs_of(tree))
    assert nested.specs == bound.specs and history(nested) == history(bound)


def test_reading_one_target_reads_its_sources_only_and_once_per_pass():
    tree = {"a.to_qkv.weight": torch.randn(6, 2), "b.weight": torch.randn(2)}
    log = []
    split = compose(unpack("to_qkv", ["to_q", "to_k", "to_v"]), cast(torch.float64))
    later = apply(lazy(tree, log), split(specs_of(tree)))
    assert log == []
    assert torch.equal(later["a.to_k.weight"].read(), tree["a.to_qkv.weight"][2:4].double())
    assert log == ["a.to_qkv.weight"]
    log.clear()
    later.read([k for k in later if k.startswith("a.")])
    assert log == ["a.to_qkv.weight"], "three casts behind one split must read it once"
    log.clear()
    assert later["b.weight"].read_rows(1, 2).tolist() == tree["b.weight"][1:].tolist()
    assert torch.equal(later["a.to_v.weight"].read_rows(0, 1), tree["a.to_qkv.weight"][4:5].double())
    assert log == ["b.weight", "a.to_qkv.weight"]


def test_rows_of_casts_and_renames_read_only_those_rows():
    def load(memo):
        raise AssertionError("the whole leaf was read")

    source = torch.randn(5, 2)
    tree = LazyTree({"a": LazyLeaf((5, 2), torch.float32, load, lambda start, stop: source[start:stop])}, {})
    later = apply(tree, compose(rename({"a": "b"}), cast(torch.bfloat16))(tree.specs))
    assert torch.equal(later["b"].read_rows(1, 3), source[1:3].bfloat16())
    for start, stop in [(-1, 2), (3, 2), (0, 6)]:
        with pytest.raises(UserError, match=r"do not exist in a leaf of shape \[5, 2\]"):
            later["b"].read_rows(start, stop)


# --- faults -------------------------------------------------------------------------------------------


def spec(*shape, **kw):
    return ParamSpec(shape, **kw)


def fails(transform, specs, *words):
    """Binding must fail with all `words` in one message; a tree of these specs is never read."""
    tree = unreadable(specs)
    with pytest.raises(UserError) as error:
        apply(tree, transform(specs))
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


BAD_PACKS = {
    "0.to_q.weight": spec(2, 3),  # 0: incomplete
    "0.to_v.weight": spec(2, 3),
    "1.to_q.weight": spec(2, 3),  # 1: mixed
    "1.to_k.weight": spec(2, 3),
    "1.to_v.weight": spec(2, 3),
    "1.to_qkv.weight": spec(6, 3),
    "2.to_q.weight": spec(2, 3),  # 2: inconsistent
    "2.to_k.weight": spec(2, 4),
    "2.to_v.weight": spec(2, 3, dtype=torch.bfloat16),
    "3.to_q.scale": spec(),  # 3: scalars
    "3.to_k.scale": spec(),
    "3.to_v.scale": spec(),
}


def test_pack_lists_every_fault_at_once():
    fails(
        pack("to_qkv", ["to_q", "to_k", "to_v"]),
        BAD_PACKS,
        "4 faults",
        "incomplete 0.to_qkv.weight: 0.to_q.weight, 0.to_v.weight there, 0.to_k.weight missing",
        "mixed: 1.to_qkv.weight is there beside 1.to_q.weight, 1.to_k.weight, 1.to_v.weight",
        "inconsistent trailing dimensions or dtypes: 2.to_q.weight [2, 3] float32, 2.to_k.weight [2, 4] float32, 2.to",
        "scalars cannot be joined: 3.to_q.scale, 3.to_k.scale, 3.to_v.scale",
    )
    adapters = {f"to_{p}.lora_A.weight": spec(4, 8) for p in "qkv"}
    fails(pack("to_qkv", ["to_q", "to_k", "to_v"]), adapters, "merge them before packing", "to_q.lora_A.weight")
    fails(pack("to_qkv", ["to_q", "to_k"]), {"x.to_qkv.weight": spec(4)}, "no leaf below", "already packed, x.to_qkv")
    near = {"to_qq.weight": spec(2), "xto_k.weight": spec(2)}
    fails(pack("to_qk", ["to_q", "to_k"]), near, "no leaf below to_q or to_k")
    twice = {"a.to_q.b": spec(2), "a.to_k.b": spec(2)}
    fails(pack("to_qk", ["to_q", "to_k"], under=["a", "atn"]), twice, "no key has the path component atn")
    for parts, words in [
        (["to_q", "to_q"], "duplicate part to_q"),
        (["to_q"], "at least two parts"),
        (["to_q", "to_qkv"], "cannot be a part of itself"),
        (["to_q", "a.to_k"], "'a.to_k' is not one path component"),
    ]:
        with pytest.raises(UserError, match=words):
            pack("to_qkv", parts)


def test_unpack_lists_every_fault_at_once():
    specs = {
        "0.kv.weight": spec(5, 2),
        "1.kv.scale": spec(),
        "2.kv.weight": spec(4),
        "2.k.weight": spec(2),
        "3.kv.weight": spec(4),
    }
    mixed = "mixed: 2.kv.weight is there beside 2.k.weight"
    fails(unpack("kv", ["k", "v"]), specs, "3 faults", "0.kv.weight has 5 rows", "1.kv.scale is a scalar", mixed)
    fails(unpack("kv", {"k": 1, "v": 3}), specs, "inconsistent rows: 0.kv.weight has 5, the parts 1 + 3 = 4", mixed)
    fails(unpack("qkv", ["q", "k", "v"]), specs, "no leaf below qkv")
    for rows in (0, True, None, 1.0):
        with pytest.raises(UserError, match="k has"):
            unpack("kv", {"k": rows, "v": 2})


@laws
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), dtypes)
def test_unpack_is_the_converse_of_pack(rows, dtype):
    names = [f"p{i}" for i in range(len(rows))]
    tree = {f"x.{n}.weight": torch.randn(r, 3).to(dtype) for n, r in zip(names, rows, strict=True)}
    packed = apply(tree, pack("all", names)(specs_of(tree)))
    bound = unpack("all", dict(zip(names, rows, strict=True)))(specs_of(packed))
    same_bits(apply(packed, bound), tree)
    same_bits(apply(tree, invert(bound)), packed)


def test_rename_faults():
    specs = {"blocks.0.a": spec(2), "blocks.0.b": spec(2), "c": spec(1)}
    both = "duplicate target c: from blocks.0.a (rename blocks.0.a) and from c (untouched)"
    fails(rename({"blocks.0.a": "c", "blocks.0.d": "e"}), specs, "2 faults", both, "no leaf blocks.0.d (did you mean")
    fails(rename_regex([(r"\.[ab]$", ".x")]), specs, "duplicate target blocks.0.x: from blocks.0.a", "blocks.0.b")
    fails(rename_regex([("blocks", "b"), ("block.*0", "n"), ("zzz", "")]), specs, "pattern 1 'block.*0'", "pattern 2")
    assert list(rename({"zzz": "y"}, partial=True)(specs).specs) == list(specs)
    assert list(rename({"c": "blocks.0.a", "blocks.0.a": "c"})(specs).specs) == ["c", "blocks.0.b", "blocks.0.a"]
    first = rename_regex([(r"\.0\.a$", ".A"), (r"\.0\.", ".0.")])(specs).specs
    assert list(first) == ["blocks.A", "blocks.0.b", "c"]


def test_bind_rules_names_every_key_of_overlapping_missing_and_duplicate():
    specs = {"a": spec(2), "b": spec(2), "c": spec(2)}
    rules = [move("a", "x", specs["a"], "one"), move("a", "b", specs["a"], "two"), move("cc", "y", specs["a"], "three")]
    fails(
        lambda s: bind_rules(s, rules, "toy", ["a fault of the caller"]),
        specs,
        "toy: 4 faults",
        "a fault of the caller",
        "overlapping rules: a is a source of one and of two",
        "duplicate target b: from a (two) and from b (untouched)",
        "three: missing source cc",
    )


def test_apply_refuses_another_tree_before_reading():
    specs = {"a": spec(2), "b": spec(2)}
    bound = rename({"a": "x"})(specs)
    other = {"a": spec(3), "c": spec(1)}
    with pytest.raises(UserError) as error:
        apply(unreadable(other), bound)
    assert all(w in str(error.value) for w in ("missing b", "unexpected c", "a has shape [3], expected [2]"))
    with pytest.raises(UserError, match="a has dtype torch.float16, expected torch.float32"):
        apply({k: torch.zeros(2, dtype=torch.float16) for k in specs}, bound)


def test_a_rule_that_breaks_its_promise_is_caught():
    wrong = Rule(("a",), ("a",), (spec(3),), lambda t: (t[:2],), name="wrong")
    bound = bind_rules({"a": spec(3)}, [wrong], "toy")
    with pytest.raises(RuntimeError, match="wrong: gave"):
        apply({"a": torch.zeros(3)}, bound)


def test_invert_names_every_lossy_rule():
    specs = {"a.w": spec(2), "b.w": spec(2), "n": spec(1, dtype=torch.int64)}
    bound = compose(drop(["b"]), cast(torch.bfloat16))(specs)
    with pytest.raises(UserError) as error:
        invert(bound)
    assert all(w in str(error.value) for w in ("drop (b.w)", "cast float32 to bfloat16 (a.w)"))
    assert "(n)" not in str(error.value)


# --- cast, select, drop, companions and ties ------------------------------------------------------------


def test_cast_keeps_float32_leaves_integers_and_codes():
    tree = {
        "w": torch.randn(2, 2),
        "table": torch.randn(2).half(),
        "sigma": torch.randn(2).half(),
        "n": torch.arange(3),
        "q.weight": torch.randn(2, 2).to(torch.float8_e4m3fn),
        "q.weight_scale": torch.tensor(0.1),
    }
    specs = specs_of(tree) | {
        "table": spec(2, dtype=torch.float16, keep_fp32=True),
        "q.weight": spec(2, 2, dtype=torch.float8_e4m3fn, companions=("q.weight_scale",)),
    }
    done = apply(tree, cast(torch.bfloat16, keep_fp32=lambda k: k == "sigma")(specs))
    found = {k: t.dtype for k, t in done.items()}
    kept = {k: tree[k].dtype for k in ("n", "q.weight", "q.weight_scale")}
    assert found == {"w": torch.bfloat16, "table": torch.float32, "sigma": torch.float32} | kept
    assert torch.equal(done["w"], tree["w"].bfloat16()) and torch.equal(done["table"], tree["table"].float())
    for dtype in (torch.int32, torch.float8_e4m3fn):
        with pytest.raises(UserError, match="floating dtype of 16 bits or more"):
            cast(dtype)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_widens_means_that_every_number_survives(source, target):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(source)
    numbers = numbers[~numbers.isnan()]
    back = numbers.to(target).to(source)
    assert torch.equal(back.view(torch.int16), numbers.view(torch.int16)) == widens(source, target)


def test_select_and_drop_match_whole_components_and_take_companions():
    specs = {
        "audio.weight": spec(2, companions=("scales.audio",)),
        "audio_proj.weight": spec(2),
        "blocks.0.audio.bias": spec(2),
        "blocks.0.my_audio.bias": spec(2),
        "scales.audio_": spec(1),
        "scales.audio": spec(1),
    }
    left = ["audio_proj.weight", "blocks.0.my_audio.bias", "scales.audio_"]
    assert list(drop(["audio"])(specs).specs) == left
    assert list(select(["audio"])(specs).specs) == [k for k in specs if k not in left]
    assert list(select("audio_proj")(specs).specs) == ["audio_proj.weight"]
    moved = dict(specs) | {"audio.weight": spec(2, companions=("scales.audio_",))}
    assert "scales.audio_" not in drop(["audio"])(moved).specs, "a companion travels whatever its name"
    fails(drop(["audi", "weigth"]), specs, "no key has the path component audi (did you mean 'audio'?)", "weigth")
    fails(select(["audio", "x"]), specs, "no key has the path component x")
    fails(select([]), specs, "no path component was given")
    fails(drop(["scales"]), specs, "audio.weight needs its companion scales.audio, which is dropped")


def test_dropped_leaves_are_never_read():
    tree, log = {"a.w": torch.ones(1), "b.w": torch.zeros(1)}, []
    assert list(apply(lazy(tree, log), drop("a")(specs_of(tree))).read()) == ["b.w"] and log == ["b.w"]


def scaled(rows):
    """A linear's specs with one scale per row as companion."""
    return {
        f"a.{part}.{leaf}": spec(n, *([3] if leaf == "weight" else []), companions=(companion,) if companion else ())
        for part, n in rows.items()
        for leaf, companion in (("weight", f"a.{part}.weight_scale"), ("weight_scale", None))
    }


def test_companions_are_renamed_packed_and_split_with_their_leaf():
    specs = scaled({"to_k": 2, "to_v": 3})
    renamed = rename_regex([(r"^a\.", "b.")])(specs)
    assert renamed.specs["b.to_k.weight"].companions == ("b.to_k.weight_scale",)
    assert invert(renamed).specs == specs
    packed = pack("to_kv", ["to_k", "to_v"])(specs)
    assert packed.specs == {
        "a.to_kv.weight": spec(5, 3, companions=("a.to_kv.weight_scale",)),
        "a.to_kv.weight_scale": spec(5),
    }
    assert unpack("to_kv", {"to_k": 2, "to_v": 3})(packed.specs).specs == specs


def test_companions_that_a_rule_makes_or_consumes():
    made = Rule(
        ("w",), ("w", "w_scale"), (spec(2, companions=("w_scale",)), spec()), lambda t: (t / 2, torch.tensor(2.0)),
        lambda t, s: (t * s,), "scale",
    )  # fmt: skip
    bound = bind_rules({"w": spec(2)}, [made], "scale")
    assert bound.specs["w"].companions == ("w_scale",)
    tree = {"w": torch.tensor([1.0, 3.0])}
    same_bits(apply(apply(tree, bound), invert(bound)), tree)
    eaten = Rule(("w", "w_scale"), ("w",), (bound.specs["w"],), lambda t, s: (t * s,), name="unscale")
    assert bind_rules(bound.specs, [eaten], "unscale").specs == {"w": spec(2)}


def test_tied_leaves_follow_the_leaf_they_are_tied_to():
    specs = {"embed.weight": spec(4, 2), "head.weight": spec(4, 2, alias_of="embed.weight"), "x": spec(1)}
    bound = compose(rename({"embed.weight": "e.weight", "head.weight": "h.weight"}), cast(torch.float64))(specs)
    assert bound.specs["h.weight"] == spec(4, 2, dtype=torch.float64, alias_of="e.weight")
    tree = {"embed.weight": torch.randn(4, 2), "x": torch.randn(1)}
    done = apply(tree, bound)
    assert list(done) == ["e.weight", "x"] == list(apply(lazy(tree), bound))
    same_bits(apply(done, invert(bound)), tree)
    fails(drop(["embed"]), specs, "head.weight is tied to embed.weight, which is no leaf of its own any more")
    fails(pack("both", ["x", "head"]), {"head.w": specs["head.weight"], "x.w": spec(4, 2), "embed.weight": spec(4, 2)},
          "head.w is tied to embed.weight and not stored")  # fmt: skip
    fails(pack("both", ["x", "embed"]), {**specs, "x.weight": spec(4, 2)}, "head.weight is tied to embed.weight")


def test_bound_is_plain_data():
    specs = {"a": spec(1)}
    bound = rename({"a": "b"})(specs)
    assert isinstance(bound, Bound) and bound.source == specs and bound.specs == {"b": spec(1)}
    assert specs == {"a": spec(1)}
