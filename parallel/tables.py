"""Layouts and plans as text."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from core.specs import Specs
from core.trees import num_params
from parallel.costs import groups, shard_numel
from parallel.job import Job
from parallel.mesh import Sizes
from parallel.rules import Rules, check, layout, starred
from parallel.traffic import Plan

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Row:
    """Equal leaves of the layout: their key (layers as a star), count, global shape, where each dimension of the mesh
    puts them, and the bytes of one of them on the rank that holds most."""

    key: str
    leaves: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Mapping[str, str]
    bytes: int


def layout_rows(specs: Specs, sizes: Sizes, rules: Rules = Rules()) -> list[Row]:
    """The layout of any specs on a mesh, equal leaves of different layers as one row.

    Leaves are stored in the dtypes of the specs. Raises UserError for rules and leaves that do not fit, all at once.
    """
    check(specs, sizes, rules)
    job, found = Job(sizes, {}, rules=rules), {}
    for key, spec in specs.items():
        if spec.alias_of is None:
            where = {name: _said(p) for name, p in layout(spec, sizes, rules).items()}
            row = Row(starred(key), 0, spec.shape, spec.dtype, where, shard_numel(spec, job) * spec.dtype.itemsize)
            found.setdefault((row.key, row.shape, row.dtype, tuple(where.items())), []).append(row)
    return [dataclasses.replace(rows[0], leaves=len(rows)) for rows in found.values()]


def _said(placement) -> str:
    """`Shard(1)` as "dim 1", `Replicate()` as "whole"; "dim 0 of part" is a dimension that an inner axis has cut."""
    if not placement.is_replicate():
        return f"dim {placement.dim}" + (" of part" if hasattr(placement, "split_factor") else "")
    return "whole"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first row a header, as aligned text; cells that look like numbers are set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    number = lambda cell: cell[:1].isdigit()  # noqa: E731
    right = [all(number(row[i]) or not row[i] for row in rows[1:]) for i in range(len(rows[0]))]
    line = lambda row: "  ".join(  # noqa: E731
        cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)
    )
    return "\n".join(line(row).rstrip() for row in rows)


def layout_table(rows: Sequence[Row]) -> str:
    """The layout as text: bytes on the rank that holds most, of all equal leaves together."""
    dims = list(rows[0].placements) if rows else []
    lines = [["leaf", "leaves", "shape", "dtype", *dims, "bytes per rank"]]
    for row in rows:
        shape, dtype = "x".join(map(str, row.shape)) or "scalar", str(row.dtype).removeprefix("torch.")
        where = [row.placements[d] for d in dims]
        lines.append([row.key, str(row.leaves), shape, dtype, *where, f"{row.bytes * row.leaves:,}"])
    sums = sum(row.leaves for row in rows), sum(row.bytes * row.leaves for row in rows)
    lines.append(["sum", str(sums[0]), "", "", *("" for _ in dims), f"{sums[1]:,}"])
    return table(lines)


# --- plans ------------------------------------------------------------------------------------------------------------


def _memory_lines(plan: Plan) -> str:
    m, rows = plan.memory, [["memory per rank, GiB", "always", "backward begins", "ends", "update"]]
    gib = lambda n: f"{n / GIB:.2f}"  # noqa: E731
    parts = (m.held, m.begin, m.end, m.update)
    for name in dict.fromkeys(name for part in parts for name in part):
        rows.append([name, *(gib(part[name]) if name in part else "" for part in parts)])
    rows.append(["sum", *(gib(sum(part.values())) for part in parts)])
    fits = "" if m.peak <= plan.hardware.memory else f", more than {gib(plan.hardware.memory)}: does not fit"
    host = f"\nhost memory per rank {gib(sum(m.host.values()))} GiB" if m.host else ""
    return table(rows) + f"\npeak {gib(m.peak)} GiB{fits}{host}"


def _group_lines(plan: Plan) -> str:
    rows, last = [["communication group", "groups", "leaves", "stored MiB", "gathered MiB"]], None
    for g in groups(plan.model, plan.job):
        facts = [str(len(g.keys)), f"{g.stored / 2**20:.1f}", f"{g.gathered / 2**20:.1f}"]
        if facts == last:
            rows[-1][0], rows[-1][1] = f"{rows[-1][0].partition(' ... ')[0]} ... {g.name}", str(int(rows[-1][1]) + 1)
        else:
            rows.append([g.name, "1", *facts])
        last = facts
    return table(rows)


def _traffic_lines(plan: Plan) -> str:
    if not plan.flows:
        return "no communication"
    rows = [["communication per step and rank", "ranks", "calls", "GiB sent", "seconds", "beside arithmetic"]]
    for flow, seconds in zip(plan.flows, plan.seconds, strict=True):
        beside = "yes" if flow.hidden else "no"
        rows.append([flow.what, str(flow.size), str(flow.calls), f"{flow.sent / GIB:.2f}", f"{seconds:.3f}", beside])
    return table(rows)


def title(plan: Plan) -> str:
    """What is planned, in two lines."""
    job, model = plan.job, plan.model
    tokens = ", ".join(f"{n} {name}" for name, n in job.lengths.items())
    return (
        f"{model.name}: {num_params(model.specs) / 1e9:.2f} B parameters on {said_mesh(job.sizes)}\n"
        f"{tokens} tokens; batch {job.batch} x {job.microbatches} microbatch{'es' * (job.microbatches > 1)}, "
        f"{plan.samples} sample{'s' * (plan.samples > 1)} per step"
    )


def report(plan: Plan) -> str:
    """The plan as text."""
    parts = [title(plan), _memory_lines(plan), _group_lines(plan), _traffic_lines(plan)]
    if plan.compute:
        parts.append(
            f"arithmetic {plan.compute:.3f} s; communication beside it {plan.hidden:.3f} s "
            f"({plan.hidden / plan.compute:.0%} of it), waited for {plan.waited:.3f} s\n"
            f"step {plan.step:.3f} s, {plan.samples / plan.step:.3g} samples/s, "
            f"{plan.compute / plan.step:.0%} of the time in arithmetic"
        )
    return "\n\n".join(parts)


def said_mesh(sizes: Sizes) -> str:
    """The axes that are larger than 1."""
    return " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1) or "one process"


def comparison(plans: Sequence[Plan]) -> str:
    """Plans of one model on several meshes, a line each: what a rank needs and sends, and what a step takes."""
    rows = [["mesh", "samples", "peak GiB", "beside GiB", "s", "waited GiB", "s", "arithmetic s", "step s",
             "samples/s"]]  # fmt: skip
    for p in plans:
        sent = [sum(f.sent for f in p.flows if f.hidden == hidden) / GIB for hidden in (True, False)]
        peak = f"{p.memory.peak / GIB:.1f}" + ("" if p.memory.peak <= p.hardware.memory else " !")
        rows.append([
            said_mesh(p.job.sizes), str(p.samples), peak, f"{sent[0]:.1f}", f"{p.hidden:.2f}", f"{sent[1]:.1f}",
            f"{p.waited:.2f}", f"{p.compute:.2f}", f"{p.step:.2f}", f"{p.samples / p.step:.3g}",
        ])  # fmt: skip
    return table(rows)
