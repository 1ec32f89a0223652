"""One training run from a recipe, top to bottom."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from core import compat, keys
from core.config import save_config
from core.errors import UserError
from core.trees import num_bytes, num_params
from infer.jobs import Job
from train import metrics
from train import state as states
from train.config import Recipe
from train.data import batches
from train.plot import loss_plot
from train.setup import Setup, blank_state, initial_state, prepare
from train.state import TrainState
from train.step import check_finite, rate_of, train_row, train_step
from train.validate import Interrupted, check_prompts, validate

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT; a second one interrupts at once."""
    received: list[int] = []

    def handler(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextlib.contextmanager
def resource_faults(setup: Setup) -> Iterator[None]:
    """Turns a full disk into a UserError, and too little memory into one that says what the state takes."""
    folder = Path(setup.recipe.training.checkpoint.output_dir)
    compat.record_memory(setup.device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        path = compat.dump_memory(setup.device, folder / "memory_snapshot.pickle")
        state = blank_state(setup, "meta")
        held = num_bytes(state.params) * 2 + num_bytes(state.optimizer) + num_bytes(state.ema or {})
        raise UserError(
            f"out of memory: weights, gradients, moments and EMA take {held / 2**30:.1f} GiB, "
            "the rest are activations. Lower training.data.train_batch_size, set training.model."
            "enable_gradient_checkpointing_type: full, or with enable_torch_compile lower activation_memory_budget. "
            f"Snapshot for pytorch.org/memory_viz: {path}. ({str(error).splitlines()[0]})"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: {error}; complete checkpoints are untouched") from error


@contextlib.contextmanager
def traces(setup: Setup, log: Callable[[str], None]) -> Iterator[Callable[[int], contextlib.AbstractContextManager]]:
    """Yields `traced(step)`, to wrap each optimiser step (0-based) in: those that the recipe names are traced.

    `trace.json` is written after the last of them, or when the run ends before it.
    """
    want, active = setup.recipe.training.profile, []
    path = Path(setup.recipe.training.checkpoint.output_dir) / "trace.json"

    def finish() -> None:
        if active:
            profile = active.pop()
            profile.stop()
            profile.export_chrome_trace(str(path))
            log(f"trace: {path}")

    @contextlib.contextmanager
    def traced(step: int) -> Iterator[None]:
        if want is not None and step == want.start:
            active.append(torch.profiler.profile())
            active[0].start()
        yield
        if want is not None and step + 1 >= want.start + want.steps:
            finish()

    try:
        yield traced
    finally:
        finish()


def opened_checkpoint(setup: Setup) -> states.Opened | None:
    """The checkpoint that the recipe asks for, judged against a state without memory: nothing is allocated or read."""
    asked = setup.recipe.training.checkpoint
    if asked.resume_from_checkpoint is None:
        return None
    folder = states.find(asked.output_dir, asked.resume_from_checkpoint)
    return states.open_for(blank_state(setup, "meta"), folder, setup.record(), weights_only=asked.weights_only)


def starting_state(setup: Setup, opened: states.Opened | None, log: Callable[[str], None]) -> TrainState:
    """A fresh state, or that of a checkpoint."""
    if opened is None:
        return initial_state(setup)
    state = blank_state(setup, setup.device)
    states.fill(state, opened)
    if setup.recipe.training.checkpoint.weights_only:
        state.step = opened.record["step"]
        state.position = state.step * setup.recipe.training.loop.gradient_accumulation_steps
    threads, now = opened.record["threads"], torch.get_num_threads()
    if threads != now and setup.device.type == "cpu":
        log(f"note: made with {threads} threads, now {now}: losses agree, but not to the last bit")
    log(f"resumed from {opened.folder} at step {state.step}")
    return state


def train(recipe: Recipe) -> metrics.Summary:
    """Runs a recipe to its last step, or to a checkpoint when asked to stop.

    Raises:
        UserError: bad input before anything is written; later a loss that is not finite, a full disk or
            too little memory. Checkpoints that were complete stay.
    """
    started = time.perf_counter()
    setup = prepare(recipe)
    opened = opened_checkpoint(setup)
    jobs = check_prompts(setup)
    if recipe.training.deterministic:
        compat.deterministic()
    out = Path(recipe.training.checkpoint.output_dir)
    with stop_requests() as stop, resource_faults(setup):
        state = starting_state(setup, opened, print)
        out.mkdir(parents=True, exist_ok=True)
        save_config(recipe, out / "config.yaml")
        metrics.drop_after(out / "metrics.jsonl", state.step)
        write_setup_row(setup, state, out, time.perf_counter() - started)
        run_steps(setup, state, jobs, None if opened is None else opened.folder, out, stop)
    summary = metrics.summary(metrics.read_rows(out / "metrics.jsonl"))
    print(metrics.summary_text(summary), flush=True)
    if stop:
        raise SystemExit(128 + stop[0])
    return summary


def write_setup_row(setup: Setup, state: TrainState, out: Path, seconds: float) -> None:
    """The first row of a run, and the same on the terminal."""
    training = setup.recipe.training
    batch = training.data.train_batch_size * training.loop.gradient_accumulation_steps
    dtype, size = str(setup.compute).removeprefix("torch."), num_params(state.params)
    if setup.objective.caption_dropout > 0 and setup.components.text is None:
        print("note: dropped captions become zeros, since there is no text encoder to embed the empty caption")
    print(
        f"{f'{size / 1e6:,.1f} M' if size >= 1e5 else size} parameters on {setup.device} in {dtype}, "
        f"{len(setup.dataset)} samples, effective batch {batch}, output {out}",
        flush=True,
    )
    metrics.append_row(
        out / "metrics.jsonl",
        "setup",
        seconds=seconds,
        effective_batch=batch,
        parameters=num_params(state.params),
        samples=len(setup.dataset),
        device=str(setup.device),
        compute_dtype=str(setup.compute),
        torch=str(torch.__version__),
    )


def run_steps(setup, state, jobs: list[Job], last: Path | None, out: Path, stop: list[int]) -> None:
    """The loop: ends after the last step, or after the step during which a signal came; always saves its end.

    Saving comes before validation, which may take long and which a resuming run makes up for.
    """
    recipe, total = setup.recipe, setup.recipe.training.loop.max_train_steps
    accumulation = recipe.training.loop.gradient_accumulation_steps
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(metrics.progress(total, state.step))
        traced = stack.enter_context(traces(setup, display.log))
        data = stack.enter_context(stream(setup, state))
        while not stop:
            if jobs and validation_owed(setup, state, out):
                with contextlib.suppress(Interrupted):
                    timed(out, "validate", state, lambda: validate(setup, state, jobs, display.log, stop))
                loss_plot(metrics.read_rows(out / "metrics.jsonl"), out / "loss.png", title=out.name)
            if stop or state.step >= total:
                break
            start, lr = time.perf_counter(), rate_of(setup, state.step)
            with traced(state.step):
                step = train_step(setup, state, [next(data) for _ in range(accumulation)])
            check_finite(step, state.step, last)
            row = train_row(setup, step, lr, state.step, time.perf_counter() - start)
            display.update(metrics.append_row(out / "metrics.jsonl", "train", **row))
            if due(recipe.training.checkpoint.training_state_checkpointing_steps, state.step) or state.step == total:
                last = save_now(setup, state, out, last, display.log)
        if not states.folder_of(out, state.step).is_dir():
            save_now(setup, state, out, last, display.log)
        loss_plot(metrics.read_rows(out / "metrics.jsonl"), out / "loss.png", title=out.name)
        if stop:
            display.log(f"stopped by {signal.Signals(stop[0]).name} after step {state.step}; continue with "
                        "--training.checkpoint.resume_from_checkpoint latest")  # fmt: skip


def stream(setup: Setup, state: TrainState) -> contextlib.closing:
    """The batches from the state's data position on; closing it ends their worker processes."""
    data = setup.recipe.training.data
    return contextlib.closing(
        batches(
            setup.dataset,
            key=keys.fold_in(state.key, "data"),
            batch_size=data.train_batch_size,
            start=state.position,
            num_workers=data.dataloader_num_workers,
        )
    )


def validation_owed(setup: Setup, state: TrainState, out: Path) -> bool:
    """Whether a validation is due at this step and metrics.jsonl has none (a run may have been stopped before it)."""
    v, step = setup.recipe.callbacks.validation, state.step
    last = setup.recipe.training.loop.max_train_steps
    wanted = v.validate_at_start if step == 0 else due(v.every_steps, step) or step >= last
    rows = metrics.read_rows(out / "metrics.jsonl") if wanted else []
    return wanted and not any(row["phase"] == "validate" and row["step"] == step for row in rows)


def due(every: int, step: int) -> bool:
    """True after every `every` steps; 0 means never."""
    return every > 0 and step % every == 0


def save_now(setup: Setup, state: TrainState, out: Path, last: Path | None, log: Callable[[str], None]) -> Path:
    """Saves a checkpoint and notes it; weights that are not finite are refused, with the `last` good checkpoint."""
    states.check_weights(state, last)
    keep = setup.recipe.training.checkpoint.checkpoints_total_limit
    path = timed(out, "save", state, lambda: states.save(out, state, setup.record(), keep=keep))
    log(f"saved {path}")
    return path


def timed(out: Path, phase: str, state: TrainState, work):
    """Runs `work` and writes a metrics row of its phase."""
    start = time.perf_counter()
    result = work()
    metrics.append_row(out / "metrics.jsonl", phase, step=state.step, seconds=time.perf_counter() - start)
    return result
