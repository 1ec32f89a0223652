"""What the Triton attention kernels share. Imported only by code that launches them."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _places(
    batch, head, row, rows, stride_b, stride_h, stride_l, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Offsets of the elements `[ROWS, BD]` from row `row` on, and which lie below `rows` and D."""
    r = row + tl.arange(0, ROWS)
    c = tl.arange(0, BD)
    at = batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + r.to(tl.int64)[:, None] * stride_l + c[None, :]
    return at, (r[:, None] < rows) & (c[None, :] < D)


@triton.jit
def load_rows(
    x, batch, head, row, rows, stride_b, stride_h, stride_l, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows `row ... row + ROWS` of one head as `[ROWS, BD]`; zero from column D on.

    `x` is a descriptor of `[B, H, L, D]` (zero outside of the tensor) or a pointer (zero from row `rows` on).
    """
    if TMA:
        found = x.load([batch, head, row, 0]).reshape(ROWS, BD)
    else:
        at, inside = _places(batch, head, row, rows, stride_b, stride_h, stride_l, D, ROWS, BD)
        found = tl.load(x + at, mask=inside, other=0.0)
    return found


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """`a @ b (+ acc)` in float32. "upcast": exact bfloat16 products where the interpreter has none."""
    if PRECISION == "upcast":
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        total = tl.dot(a, b, acc, input_precision=PRECISION)
    return total


@triton.jit
def store_rows(
    x, value, batch, head, row, rows, stride_b, stride_h, stride_l, D: tl.constexpr, ROWS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Writes `value [ROWS, BD]` to rows `row ... rows` and columns below D of one head."""
    at, inside = _places(batch, head, row, rows, stride_b, stride_h, stride_l, D, ROWS, BD)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def sequence(starts, lens, index, length, PACKED: tl.constexpr, RAGGED: tl.constexpr):
    """`(batch, first row, number of rows)` of a sequence: a batch entry, its leading part, or a part of packed rows."""
    batch, first, rows = index, index * 0, length
    if PACKED:
        batch, first, rows = index * 0, tl.load(starts + index), tl.load(lens + index)
    elif RAGGED:
        rows = tl.minimum(tl.maximum(tl.load(lens + index), 0), length)
    return batch, first, rows


@triton.jit
def visible(
    queries, keys, n_keys, offset, key_mask, key_mask_row, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Which pairs of query and key numbers see each other, `[queries or 1, keys]`."""
    real = keys < n_keys
    if MASKED:
        real = real & (tl.load(key_mask + key_mask_row + keys, mask=real, other=0) != 0)
    seen = real[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= queries[:, None] + offset)
    return seen


@triton.jit
def key_range(row, offset, n_keys, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """`(plain, end)` for the query tile at `row`: keys below `plain` need no mask, keys from `end` on are unseen."""
    end = n_keys
    plain = n_keys
    if CAUSAL:
        end = tl.minimum(n_keys, tl.maximum(row + BM + offset, 0))
        plain = tl.minimum(n_keys, tl.maximum(row + offset + 1, 0))
    if MASKED:
        plain = plain * 0
    return plain // BN * BN, end
