"""One optimiser step over microbatches, and the metrics row that it becomes."""

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor

from core import devices, keys
from core.errors import UserError
from core.trees import Params
from train import optim, sft
from train.flops import train_flops
from train.rows import Batch
from train.schedules import learning_rate
from train.setup import Setup
from train.state import TrainState

SIGMA_BINS = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """What one optimiser step leaves on the device: tensors that are read only after it.

    `losses` is the mean squared error per element of every sample, `sigmas` their noise levels.
    """

    loss: Tensor
    grad_norm: Tensor
    losses: Tensor
    sigmas: Tensor
    names: list[str]
    tokens: int
    flops: int


def fit_text(text: Tensor, length: int) -> Tensor:
    """Text embeddings `[B, L, D]` padded with zeros, or cut, to `[B, length, D]`."""
    return torch.nn.functional.pad(text[:, :length], (0, 0, 0, max(0, length - text.shape[1])))


def microbatch_loss(setup: Setup, state: TrainState, batch: Batch, first: int) -> tuple[Tensor, Tensor]:
    """Summed squared errors and sigmas, each `[B]`, of a microbatch; its first sample is number `first` of the step."""
    clean = batch.latents.to(setup.device)
    conditions = {k: batch.conditions[k].to(setup.device) for k in ("text", *sft.image_channels(setup.cfg))}
    conditions["text"] = fit_text(conditions["text"], setup.text_length)
    draws = sft.draw(setup.objective, keys.fold_in(state.key, "sft"), state.step, first, tuple(clean.shape))
    draws = sft.Draws(*(t.to(setup.device) for t in (draws.noise, draws.sigma, draws.dropped)))
    errors = sft.loss(
        state.params,
        setup.cfg,
        setup.objective,
        clean,
        conditions,
        setup.empty.to(setup.device),
        draws,
        dtype=setup.compute,
        run=setup.run,
    )
    return errors, draws.sigma


def add_gradients(sums: Params, params: Params) -> None:
    """Moves the gradients of a microbatch into float32 `sums`, those of 16-bit leaves; others add up in place."""
    for k, p in params.items():
        if p.dtype.itemsize < 4:
            sums[k] = sums[k] + p.grad if k in sums else p.grad.float()
            p.grad = None
        else:
            sums[k] = p.grad


def train_step(setup: Setup, state: TrainState, micro: list[Batch]) -> Step:
    """One optimiser step over all microbatches, in place. Nothing is copied to the host.

    The loss is the sum of squared errors of all microbatches over their number of elements, so unequal
    microbatches weigh by their tokens.
    """
    training = setup.recipe.training
    elements = sum(batch.latents.numel() for batch in micro)
    losses, sigmas, first = [], [], 0
    grads: Params = {}
    for batch in micro:
        errors, sigma = microbatch_loss(setup, state, batch, first)
        (errors.sum() / elements).backward()
        add_gradients(grads, state.params)
        losses.append(errors.detach() / batch.latents[0].numel())
        sigmas.append(sigma)
        first += len(batch.names)
    norm = optim.clip_(grads, setup.recipe.callbacks.grad_clip.max_grad_norm)
    o = training.optimizer
    opt = optim.AdamW(o.betas, o.eps, o.weight_decay, o.fused)
    optim.adamw_update(opt, grads, state.optimizer, state.params, rate_of(setup, state.step))
    for p in state.params.values():
        p.grad = None
    state.step += 1
    state.position += len(micro)
    update_ema(setup, state)
    sizes = torch.tensor([b.latents[0].numel() for b in micro for _ in b.names], device=setup.device)
    losses = torch.cat(losses)
    return Step(
        loss=(losses * sizes).sum() / elements,
        grad_norm=norm,
        losses=losses,
        sigmas=torch.cat(sigmas),
        names=[name for batch in micro for name in batch.names],
        tokens=sum(tokens_of(setup, batch) * len(batch.names) for batch in micro),
        flops=sum(train_flops(setup.cfg, tokens_of(setup, b), setup.text_length) * len(b.names) for b in micro),
    )


def tokens_of(setup: Setup, batch: Batch) -> int:
    """Tokens of one sample after patchify."""
    return math.prod(batch.latents.shape[2:]) // math.prod(setup.cfg.patch_size)


def rate_of(setup: Setup, step: int) -> float:
    """Learning rate of the 0-based optimiser step."""
    o = setup.recipe.training.optimizer
    return learning_rate(
        step,
        o.learning_rate,
        scheduler=o.lr_scheduler,
        total_steps=setup.recipe.training.loop.max_train_steps,
        warmup_steps=o.lr_warmup_steps,
        min_lr_ratio=o.min_lr_ratio,
    )


def update_ema(setup: Setup, state: TrainState) -> None:
    """Moves the average after a step; until `start_iter` it follows the weights."""
    if state.ema is not None:
        ema = setup.recipe.callbacks.ema
        optim.ema_update(state.ema, state.params, 0.0 if state.step <= ema.start_iter else ema.decay)


# --- what a step is reported as -------------------------------------------------------------------------------


def by_sigma(losses: Tensor, sigmas: Tensor) -> list[float | None]:
    """Mean loss of the samples in each of SIGMA_BINS equal bins of sigma; None for an empty bin."""
    bins = (sigmas * SIGMA_BINS).long().clamp(max=SIGMA_BINS - 1)
    return [float(losses[bins == b].mean()) if (bins == b).any() else None for b in range(SIGMA_BINS)]


def train_row(setup: Setup, step: Step, lr: float, number: int, seconds: float) -> dict:
    """The values of a metrics row, read from the device."""
    peak = devices.peak_flops(setup.device) if setup.compute == torch.bfloat16 else None
    row = {
        "step": number,
        "loss": float(step.loss),
        "lr": lr,
        "loss_by_sigma": by_sigma(step.losses.cpu(), step.sigmas.cpu()),
        "seconds": seconds,
        "tokens_per_second": step.tokens / seconds,
        "mfu": None if peak is None else step.flops / seconds / peak,
        "peak_memory_bytes": devices.memory_stats(setup.device)["peak_bytes"],
    }
    if setup.recipe.callbacks.grad_clip.log_grad_norms:
        row["grad_norm"] = float(step.grad_norm)
    return row


def check_finite(step: Step, number: int, last: Path | None) -> None:
    """Stops the run at a loss or gradient norm that is not finite; nothing is saved after it."""
    norm = float(step.grad_norm)
    if math.isfinite(float(step.loss)) and math.isfinite(norm):
        return
    bad = [n for n, x in zip(step.names, step.losses.tolist(), strict=True) if not math.isfinite(x)]
    kept = "no checkpoint was saved yet" if last is None else f"the last good checkpoint is {last}"
    raise UserError(
        f"step {number}: loss is {float(step.loss)}, gradient norm {norm}; samples of this step: "
        f"{', '.join(step.names)}" + (f"; not finite: {', '.join(bad)}" if bad else "") + f"; {kept}"
    )
