"""Guidance of LTX-2's two streams: by text, by attention that is skipped, and by each stream alone.

Arithmetic is on x0 estimates in float32 (float64 stays). Which passes of the model a step needs is decided once, on
the host, from the parameters: `plan_steps`. `guided_velocity` makes of it what the samplers take.

A `denoise(x, sigma, timestep, conditions, keep)` gives x0 estimates `{stream: [B, N, C]}` for latents `x` of the same
form, channels of conditions `[B, ...]` and the attentions to run, bool `[4, blocks, B]` or None.
"""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from infer.guidance import Conditions, guide
from infer.samplers import VelocityFn
from infer.schedules import Schedule, is_int, is_number
from nn.layers import wide
from nn.ltx2 import SELF_SITE
from nn.ltx2_conditions import Written, keep_given
from nn.ltx2_config import LTX2Config
from nn.ltx2_inputs import keep_masks

Streams = Mapping[str, Tensor]
DenoiseFn = Callable[[Streams, float, Tensor, Conditions, Tensor | None], Streams]

PASSES = ("cond", "uncond", "stg", "modality")
"""In the order in which they are batched: as asked for, without the prompt, with skipped self-attention, and with
each stream alone."""


# --- parameters ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StreamGuidance:
    """Guidance of one stream; the defaults are none at all.

    Args:
        cfg_scale: of the pass without the prompt; 1 needs none.
        stg_scale, stg_blocks: of the pass whose self-attention is skipped in these blocks (None: all); 0 needs none.
        modality_scale: of the pass where the streams do not see each other; 1 needs none.
        rescale: 0..1, how far the deviation of the result is moved to that of the conditional estimate.
        skip_step: k > 0 guides every (k + 1)-th step and keeps its estimate for the k steps after it.
    """

    cfg_scale: float = 1.0
    stg_scale: float = 0.0
    stg_blocks: tuple[int, ...] | None = ()
    modality_scale: float = 1.0
    rescale: float = 0.0
    skip_step: int = 0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value!r}, allowed is a number"
            for name in ("cfg_scale", "stg_scale", "modality_scale", "rescale")
            if not is_number(value := getattr(self, name))
        ]
        if is_number(self.rescale) and not 0 <= self.rescale <= 1:
            faults.append(f"rescale is {self.rescale!r}, allowed is 0..1")
        if not is_int(self.skip_step) or self.skip_step < 0:
            faults.append(f"skip_step is {self.skip_step!r}, allowed is an integer >= 0")
        if self.stg_scale != 0 and self.stg_blocks is not None and len(self.stg_blocks) == 0:
            faults.append(f"stg_scale is {self.stg_scale!r} without stg_blocks: name blocks, or None for all of them")
        raise_faults("this guidance cannot be:", faults)


@dataclasses.dataclass(frozen=True)
class SigmaBins:
    """Guidance that changes on the way: `((upper sigma, parameters), ...)`.

    At a sigma the bin with the smallest bound that is not below it counts; above all bounds the one with the largest.
    """

    bins: tuple[tuple[float, StreamGuidance], ...]

    def __post_init__(self) -> None:
        bounds = [bound for bound, _ in self.bins]
        faults = [] if bounds else ["no bins, expected at least one"]
        faults += [f"bound {b!r}, allowed is a number" for b in bounds if not is_number(b)]
        faults += [f"bound {b!r} is given twice" for b in sorted({b for b in bounds if bounds.count(b) > 1})]
        raise_faults("these guidance bins cannot be:", faults)


Guidance = StreamGuidance | SigmaBins


def _public(block: int) -> dict[str, StreamGuidance]:
    shared = {"stg_scale": 1.0, "stg_blocks": (block,), "modality_scale": 3.0, "rescale": 0.7}
    return {"video": StreamGuidance(cfg_scale=3.0, **shared), "audio": StreamGuidance(cfg_scale=7.0, **shared)}


GUIDANCE = {"ltx-2-19b": _public(29), "ltx-2.3-22b": _public(28)}
"""What the official recipes use of the full models in stage one. Distilled models and stage two need none."""


def at_sigma(guidance: Guidance, sigma: float) -> StreamGuidance:
    """The parameters that count at a sigma; see `SigmaBins`."""
    if isinstance(guidance, StreamGuidance):
        return guidance
    ordered = sorted(guidance.bins, key=lambda item: item[0])
    return next((params for bound, params in ordered if bound >= sigma), ordered[-1][1])


# --- the plan -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step of a sampler runs.

    Args:
        streams: parameters of each stream of the model. passes: names of `PASSES`, none where all streams reuse.
        reused: streams that keep the estimate of the last step that was guided.
    """

    streams: Mapping[str, StreamGuidance]
    passes: tuple[str, ...]
    reused: tuple[str, ...] = ()

    def skips(self, name: str) -> dict[str, Sequence[int] | None]:
        """The attentions that a pass skips, as `nn.ltx2_inputs.keep_masks` takes them."""
        if name == "stg":
            active = {stream: p for stream, p in self.streams.items() if p.stg_scale != 0 and stream not in self.reused}
            return {SELF_SITE[stream]: p.stg_blocks for stream, p in active.items()}
        return {"a2v": None, "v2a": None} if name == "modality" else {}


def plan_steps(
    cfg: LTX2Config, guidance: Mapping[str, Guidance], schedule: Schedule, *, start: int = 0
) -> tuple[Step, ...]:
    """The passes of every step of a schedule, from the parameters alone.

    Args:
        guidance: by stream, `"video"` and `"audio"`; a stream left out is not guided, and one that the model does not
            have is ignored. Without two streams there is nothing to guide by modality.
        start: the step at which sampling begins, which is guided whatever `skip_step` says.

    Raises:
        UserError: names that are no stream, and blocks that the model does not have.
    """
    faults = [f"{name!r} is no stream, allowed: video, audio" for name in guidance if name not in SELF_SITE]
    raise_faults("guidance does not fit the model", faults)
    steps = []
    for i, sigma in enumerate(schedule.sigmas.tolist()[:-1]):
        streams = {s.name: at_sigma(guidance.get(s.name, StreamGuidance()), sigma) for s in cfg.streams}
        reused = tuple(name for name, p in streams.items() if max(i - start, 0) % (p.skip_step + 1))
        active = [p for name, p in streams.items() if name not in reused]
        needed = {
            "cond": bool(active),
            "uncond": any(p.cfg_scale != 1 for p in active),
            "stg": any(p.stg_scale != 0 for p in active),
            "modality": cfg.crossed and any(p.modality_scale != 1 for p in active),
        }
        steps.append(Step(streams, tuple(name for name in PASSES if needed[name]), reused))
    return tuple(steps)


# --- arithmetic ---------------------------------------------------------------------------------------------------


def combine(params: StreamGuidance, estimates: Mapping[str, Tensor], *, whole_batch: bool = False) -> Tensor:
    """The guided x0 of one stream, `[B, N, C]` in float32 at least.

        c + (cfg - 1) (c - uncond) + stg (c - perturbed) + (modality - 1) (c - alone)

    then rescaled as in `infer.guidance.guide`, with statistics per sample.

    Args:
        estimates: by pass. A pass that is absent has no part; one whose scale is neutral has none either.
        whole_batch: one statistic for the batch, as the official code has it: samples then influence each other.
    """
    cond = estimates["cond"].to(wide(estimates["cond"]))
    weights = {"uncond": params.cfg_scale - 1, "stg": params.stg_scale, "modality": params.modality_scale - 1}
    out = cond
    for name, weight in weights.items():
        if weight != 0 and name in estimates:
            out = out + weight * (cond - estimates[name].to(cond.dtype))
    if params.rescale == 0:
        return out
    # At scale 0 `guide` returns its second estimate, moved towards the deviation of its first.
    if whole_batch:
        return guide(cond[None], out[None], 0.0, params.rescale)[0]
    return guide(cond, out, 0.0, params.rescale)


# --- passes -------------------------------------------------------------------------------------------------------


def _rows(value: Mapping[str, Tensor], a: int, b: int) -> dict[str, Tensor]:
    """Samples a to b of streams or channels."""
    return {k: v[a:b] for k, v in value.items()}


def _joined(parts: Sequence[Streams]) -> dict[str, Tensor]:
    return dict(parts[0]) if len(parts) == 1 else {k: torch.cat([p[k] for p in parts]) for k in parts[0]}


def split_batch(denoise: DenoiseFn, max_batch: int | None) -> DenoiseFn:
    """A `denoise` that calls the given one for at most `max_batch` samples at a time, in order; None: for all."""
    if max_batch is None:
        return denoise
    if not is_int(max_batch) or max_batch < 1:
        raise UserError(f"max_batch is {max_batch!r}, allowed is an integer >= 1, or None for no limit")

    def split(x: Streams, sigma: float, timestep: Tensor, conditions: Conditions, keep: Tensor | None) -> Streams:
        batch = next(iter(x.values())).shape[0]
        parts = []
        for a in range(0, batch, max_batch):
            b = min(a + max_batch, batch)
            kept = None if keep is None else keep[..., a:b]
            parts.append(denoise(_rows(x, a, b), sigma, timestep, _rows(conditions, a, b), kept))
        return _joined(parts)

    return split


def _channels(cond: Conditions, uncond: Conditions | None, plan: Sequence[Step], batched: bool) -> dict[str, dict]:
    """Conditions of every pass; checks that of the pass without the prompt."""
    out = {name: dict(cond) for name in PASSES}
    if not any("uncond" in step.passes for step in plan):
        return out
    if uncond is None:
        raise UserError("guidance by text needs conditions without the prompt (uncond): some cfg_scale is not 1")
    faults = [f"channel {k!r}: only in uncond" for k in uncond if k not in cond]
    faults += [
        f"channel {k!r}: cond has shape {list(cond[k].shape)}, uncond {list(v.shape)}; pad them to one shape (with a "
        "key mask) or use batched=False"
        for k, v in uncond.items()
        if batched and k in cond and cond[k].shape != v.shape
    ]
    raise_faults("the two guidance branches do not fit together:", faults)
    return out | {"uncond": {**cond, **uncond}}


def run_passes(
    denoise: DenoiseFn, x: Streams, sigma: float, timestep: Tensor, step: Step, channels: Mapping[str, Conditions],
    keeps: Mapping[str, Tensor | None], *, batched: bool,
) -> dict[str, dict[str, Tensor]]:  # fmt: skip
    """x0 estimates of a step's passes, `{pass: {stream: [B, N, C]}}`.

    Args:
        channels: conditions by pass, `[B, ...]`. keeps: by pass bool `[4, blocks, 1]`, or None for all.
        batched: one call with the passes on the batch axis, else one call each.
    """
    batch, names = next(iter(x.values())).shape[0], step.passes
    masks = [None if keeps[n] is None else keeps[n].expand(-1, -1, batch) for n in names]
    if not batched or len(names) == 1:
        calls = zip(names, masks, strict=True)
        return {n: dict(denoise(x, sigma, timestep, channels[n], keep)) for n, keep in calls}
    keep = None if masks[0] is None else torch.cat(masks, dim=-1)
    every = {k: torch.cat([channels[n][k] for n in names]) for k in channels["cond"]}
    out = denoise({k: torch.cat([v] * len(names)) for k, v in x.items()}, sigma, timestep, every, keep)
    return {n: _rows(out, i * batch, (i + 1) * batch) for i, n in enumerate(names)}


# --- the seam of samplers -----------------------------------------------------------------------------------------


def pack_streams(x: Streams) -> Tensor:
    """Streams `[B, N, C]` as the one tensor that samplers take, `[B, S]`: they treat every number alike."""
    return torch.cat([v.flatten(1) for v in x.values()], dim=1)


def unpack_streams(packed: Tensor, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Inverse of `pack_streams` for streams of shapes `(N, C)`."""
    sizes = [n * c for n, c in shapes.values()]
    return {k: v.unflatten(1, shape) for (k, shape), v in zip(shapes.items(), packed.split(sizes, dim=1), strict=True)}


def _keeps(cfg: LTX2Config, plan: Sequence[Step], device) -> list[dict[str, Tensor | None]]:
    """Keep-masks of every step's passes. Where some pass skips anything all have one, so that they share a graph."""
    if not any(step.skips(name) for step in plan for name in step.passes):
        return [dict.fromkeys(PASSES)] * len(plan)
    made: dict[str, Tensor] = {}
    for skips in (step.skips(name) for step in plan for name in step.passes):
        made.setdefault(repr(skips), keep_masks(cfg, [skips], device=device))
    return [{name: made[repr(step.skips(name))] for name in step.passes} for step in plan]


def guided_velocity(
    cfg: LTX2Config, denoise: DenoiseFn, guidance: Mapping[str, Guidance], schedule: Schedule,
    shapes: Mapping[str, tuple[int, int]], cond: Conditions, uncond: Conditions | None = None, *, start: int = 0,
    written: Mapping[str, Written] | None = None, batched: bool = True, max_batch: int | None = None,
    whole_batch: bool = False, device="cpu",
) -> VelocityFn:  # fmt: skip
    """A sampler's `velocity_fn` over packed streams `[B, S]`, for one run along `schedule` from step `start`.

    The velocity is `(x - x0) / sigma` in float32 at least. With `skip_step` it remembers each stream's last estimate.
    A sigma between two of the schedule belongs to the step that comes to it.

    Args:
        shapes: tokens and channels of each stream, in the order of packing.
        cond, uncond: channels `[B, ...]`; uncond may leave out those that are equal.
        written: by stream, what is given: guided estimates are held at it.
        batched, max_batch, whole_batch: see `run_passes`, `split_batch` and `combine`.

    Raises:
        UserError: what `plan_steps` and `split_batch` refuse, conditions that do not fit together.
    """
    plan = plan_steps(cfg, guidance, schedule, start=start)
    channels, keeps = _channels(cond, uncond, plan, batched), _keeps(cfg, plan, device)
    denoise = split_batch(denoise, max_batch)
    rising = [-s for s in schedule.sigmas.tolist()[:-1]]
    last: dict[str, Tensor] = {}

    def velocity(packed: Tensor, sigma: float, timestep: Tensor) -> Tensor:
        i = max(0, bisect.bisect_right(rising, -sigma) - 1)
        step, x = plan[i], unpack_streams(packed, shapes)
        found = {}
        if step.passes:
            found = run_passes(denoise, x, sigma, timestep, step, channels, keeps[i], batched=batched)
        if missing := [name for name in step.reused if name not in last]:
            raise UserError(f"step {i} keeps estimates of {', '.join(missing)} from a step before it: give start={i}")
        for name in x:
            if name not in step.reused:
                estimates = {n: out[name] for n, out in found.items()}
                estimate = combine(step.streams[name], estimates, whole_batch=whole_batch)
                last[name] = estimate if written is None or name not in written else keep_given(written[name], estimate)
        return (packed.to(wide(packed)) - pack_streams({name: last[name] for name in x})) / sigma

    return velocity
