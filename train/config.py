"""The typed recipe of a training run: every key, its type, default and meaning.

Key names follow FastVideo's modular training recipes, so that their YAML files read alike.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from core.config import Label, Section, load_config, raise_field_faults, show
from core.geometry import nearest_valid
from infer.schedules import is_int
from train.preprocess.metadata import PARSERS
from train.preprocess.settings import Encoding

Sampler = Literal["euler", "unipc", "gradient_estimation", "res_2s"]
Scalar = bool | int | float | str | None
Override = Annotated[Scalar | tuple[Scalar, ...], Label("scalar or list")]
Positive = Annotated[int, Field(ge=1)]
Modality = Literal["audio_video", "video", "audio"]


def _spelled(value: Any) -> Any:
    """Text as names are compared: stripped, in lower case."""
    return value.strip().lower() if isinstance(value, str) else value


Float = Annotated[Literal["fp32", "bf16"], BeforeValidator(_spelled)]
Attention = Annotated[
    Literal[
        "auto", "reference", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "triton",
        "triton_cudnn", "fa3", "fa4",
    ],
    BeforeValidator(_spelled),
]  # fmt: skip


class Wan(Section):
    """A Wan text-to-video transformer."""

    target: Literal["wan"] = Field(alias="_target_", description="Kind of model.")
    init_from: str | None = Field(None, description="Diffusers-style folder with the starting weights; null: random.")
    preset: str | None = Field(None, description="Named architecture; null: the config found in init_from.")
    config: dict[str, Override] = Field({}, description="Architecture values that replace the preset's.")
    trainable: bool = Field(True, description="Whether the weights are updated.")
    attention_backend: Attention = Field("auto", description="Attention kernel of this model.")

    @property
    def temporal_stride(self) -> int:
        """Video frames per latent frame after the first."""
        return 4


class LTX2(Section):
    """An LTX-2 transformer of video, audio or both."""

    target: Literal["ltx2"] = Field(alias="_target_", description="Kind of model.")
    init_from: str | None = Field(None, description="Folder of an LTX-2 pipeline with the starting weights.")
    preset: str | None = Field(None, description="Named architecture; null: the config found in init_from.")
    config: dict[str, Override] = Field({}, description="Architecture values that replace the preset's.")
    trainable: bool = Field(True, description="Whether the weights are updated.")
    attention_backend: Attention = Field("auto", description="Attention kernel of this model.")
    modality: Modality | None = Field(
        None, description="LTX-2's streams that are made; null: those of init_from, else audio_video."
    )
    frozen: Literal["video", "audio"] | None = Field(
        None, description="LTX-2's stream that is given: clean, without a loss, its weights not updated; null: none."
    )

    @property
    def temporal_stride(self) -> int:
        """Video frames per latent frame after the first."""
        factors = self.config.get("vae_scale_factors")
        return factors[0] if isinstance(factors, tuple) and factors and is_int(factors[0]) else 8

    @model_validator(mode="after")
    def _check(self):
        faults = []
        if "modality" in self.config:
            faults.append(("config.modality", "is models.student.modality: set it there"))
        if self.frozen is not None and self.modality not in (None, "audio_video"):
            what = f"needs modality: audio_video, which is {self.modality}"
            faults.append(("frozen", what))
        raise_field_faults(faults)
        return self


class Models(Section):
    """The models of a run by role."""

    student: Wan | LTX2 = Field(discriminator="target", description="The model that is trained.")


class SFT(Section):
    """Supervised flow matching."""

    target: Literal["sft"] = Field(alias="_target_", description="Training method; sft: supervised flow matching.")


class Encode(Encoding):
    """Encoding on the fly: what `python -m train.preprocess` takes, by the same names."""

    model: str | None = Field(
        None, description="Wan or LTX-2 pipeline folder or hub id with the models; null: those named below."
    )
    vae: str | None = Field(None, description="Folder of the VAE; null: the model's.")
    text_encoder: str | None = Field(None, description="Folder of the text encoder; null: the model's.")
    image_encoder: str | None = Field(None, description="Folder of the image encoder, for i2v; null: the model's.")
    audio_vae: str | None = Field(None, description="Folder of the audio VAE, for t2va; null: the model's.")
    skip_unusable: bool = Field(False, description="Leave out clips that cannot be used, instead of refusing them.")


class Data(Section):
    """The data set and how it is read."""

    data_path: str | tuple[str, ...] | dict[str, Positive] = Field(
        description="Folder or file of preprocessed latents; a list of them; or a mapping {path: repeats}. "
        "With encode: one metadata file of clips and captions."
    )
    encode: Encode | None = Field(
        None, description="Encode the clips of a metadata file at every step; null: data_path is preprocessed."
    )
    preprocessed_data_type: Literal["t2v", "i2v", "t2va", "t2a", "text_only"] = Field(
        "t2v", description="Row type of the files."
    )
    dataloader_type: Literal["map", "streaming"] = Field(
        "map", description="map: samples in any order; streaming: row groups read from end to end, for large sets."
    )
    streaming_read_batch_size: Positive = Field(8, description="Rows in memory per read of a stream.")
    streaming_shuffle_row_groups: bool = Field(True, description="Another order of row groups in every epoch.")
    streaming_manifest_path: str | None = Field(
        None, description="JSON index outside the data, made when missing; null: the files are indexed at every start."
    )
    train_batch_size: int = Field(1, ge=1, description="Samples per microbatch of each data-parallel process.")
    dataloader_num_workers: int = Field(0, ge=0, description="Worker processes that read data; 0: the main process.")
    training_cfg_rate: float = Field(0.0, ge=0, le=1, description="Share of captions replaced by the empty caption.")
    seed: int = Field(
        0, ge=-(2**63), lt=2**63, description="Seed of weights, data order, noise, timesteps and caption dropout."
    )
    num_latent_t: int | None = Field(None, ge=1, description="Latent frames per sample; null: as the data has.")
    num_height: int | None = Field(None, ge=1, description="Video height in pixels; null: as the data has.")
    num_width: int | None = Field(None, ge=1, description="Video width in pixels; null: as the data has.")
    num_frames: int | None = Field(None, ge=1, description="Video frames per sample; null: as the data has.")
    text_padding_length: int | None = Field(
        None, ge=1, description="Tokens to which prompt embeddings are padded or cut; null: the model's text length."
    )

    @model_validator(mode="after")
    def _check(self):
        faults = []
        if self.dataloader_type == "map":
            keys = {k: field.default for k, field in Data.model_fields.items() if k.startswith("streaming_")}
            changed = [k for k, default in keys.items() if getattr(self, k) != default]
            faults += [(k, "needs dataloader_type: streaming, which is map") for k in changed]
        elif self.dataloader_num_workers > 1:
            what = f"must be 0 or 1 with dataloader_type: streaming, got {self.dataloader_num_workers}"
            faults.append(("dataloader_num_workers", what))
        raise_field_faults(faults + self._encode_faults())
        return self

    def _encode_faults(self) -> list[tuple[str, str]]:
        if self.encode is None:
            return []
        faults, path = [], self.data_path
        if not isinstance(path, str) or Path(path).suffix.lower() not in PARSERS:
            what = f"must be one metadata file ({', '.join(PARSERS)}) with training.data.encode, got {show(path)}"
            faults.append(("data_path", what))
        if self.dataloader_type == "streaming":
            what = "must be map with encode: streaming reads Parquet files, which `python -m train.preprocess` makes"
            faults.append(("dataloader_type", what))
        if self.dataloader_num_workers > 0:
            what = f"must be 0 with encode, got {self.dataloader_num_workers}: the main process runs the encoders"
            faults.append(("dataloader_num_workers", what))
        return faults


class Optimizer(Section):
    """AdamW and its learning rate."""

    learning_rate: float = Field(gt=0, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Decay of the first and second moments."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    fused: bool | None = Field(None, description="Fused kernel: true, false, or null: where there is one (CUDA, CPU).")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warmup.")
    lr_warmup_steps: int = Field(0, ge=0, description="Optimiser steps of linear warmup from 0.")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Where linear and cosine decay end, as a share of the peak."
    )


class Loop(Section):
    """How long to train."""

    max_train_steps: int = Field(ge=0, description="Total optimiser steps, counted from the start of training.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Microbatches per optimiser step.")


class Checkpoint(Section):
    """What is saved, where, and what to resume from."""

    output_dir: str = Field(description="Folder for metrics, pictures, samples and checkpoints.")
    training_state_checkpointing_steps: int = Field(
        0, ge=0, description="Optimiser steps between saved states; 0: only the final one."
    )
    checkpoints_total_limit: int = Field(0, ge=0, description="Newest checkpoints to keep; 0: all.")
    resume_from_checkpoint: str | None = Field(
        None, description="`latest` in output_dir, or a checkpoint folder; null: start anew."
    )
    weights_only: bool = Field(
        False, description="Resume the weights alone; a missing or damaged optimiser state is then no error."
    )
    save_in_background: bool = Field(
        False, description="Go on training while a checkpoint is written, from a copy in host memory."
    )

    @model_validator(mode="after")
    def _check(self):
        if self.weights_only and self.resume_from_checkpoint is None:
            raise_field_faults([("weights_only", "needs resume_from_checkpoint (`latest` or a folder), which is null")])
        return self


class ModelTraining(Section):
    """The loss, and how memory is traded for compute."""

    weighting_scheme: Literal["uniform", "logit_normal", "shifted_logit_normal"] | None = Field(
        None,
        description="Density of the noise levels. Wan: uniform (null) or logit_normal, before pipeline.flow_shift. "
        "LTX-2: shifted_logit_normal (null), whose mean follows from the number of tokens, or uniform.",
    )
    logit_mean: float = Field(0.0, description="Mean of Wan's logit-normal density.")
    logit_std: float = Field(1.0, gt=0, description="Standard deviation of the logit-normal densities.")
    timestep_uniform_prob: float = Field(
        0.1, ge=0, le=1, description="Share of LTX-2's noise levels that are drawn uniformly instead."
    )
    video_loss_weight: float = Field(1.0, ge=0, description="What LTX-2's video loss counts in the sum.")
    audio_loss_weight: float = Field(1.0, ge=0, description="What LTX-2's audio loss counts in the sum.")
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        "none", description="Weight of the loss by sigma (Esser et al., 2024)."
    )
    precondition_outputs: bool = Field(
        False, description="Compare the clean latents that the velocity implies, instead of the velocity."
    )
    enable_gradient_checkpointing_type: Literal["full", "save_attention", "save_matmuls"] | None = Field(
        None,
        description="full: recompute blocks in the backward pass; save_attention, save_matmuls: all but the outputs of "
        "attention, or of attention and every other matrix product; null: keep activations.",
    )
    gradient_checkpointing_every: int = Field(1, ge=1, description="Consecutive blocks per recomputed group.")
    gradient_checkpointing_nth: int = Field(
        1, ge=1, description="Recompute only every n-th group; the others keep their activations."
    )
    activation_offload: bool = Field(
        False, description="Keep what recomputed groups start from in host memory until the backward pass."
    )
    pack_attention_projections: bool = Field(
        False, description="Compute q, k, v of attention by one matrix each for self- and cross-attention."
    )
    enable_torch_compile: bool = Field(False, description="Compile the transformer block, once for all blocks.")
    activation_memory_budget: float = Field(
        1.0, gt=0, le=1, description="Share of activations that the compiler may keep; below 1 it recomputes cheap ops."
    )

    @model_validator(mode="after")
    def _check(self):
        faults, kind = [], self.enable_gradient_checkpointing_type
        if self.activation_memory_budget < 1 and not self.enable_torch_compile:
            faults.append(("activation_memory_budget", "below 1 needs enable_torch_compile: true"))
        if kind is None:
            needs = "needs enable_gradient_checkpointing_type: full (or save_attention, save_matmuls)"
            if self.gradient_checkpointing_every > 1:
                faults.append(("gradient_checkpointing_every", f"above 1 {needs}"))
            if self.gradient_checkpointing_nth > 1:
                faults.append(("gradient_checkpointing_nth", f"above 1 {needs}"))
            if self.activation_offload:
                faults.append(("activation_offload", f"true {needs}"))
        elif kind != "full" and self.enable_torch_compile:
            what = f"{kind} sees nothing in compiled blocks: use full, or activation_memory_budget"
            faults.append(("enable_gradient_checkpointing_type", what))
        raise_field_faults(faults)
        return self


class Distributed(Section):
    """The processes of a run, and what each of them holds. hsdp_replicate_dim x hsdp_shard_dim x tp_size of them."""

    num_gpus: int | None = Field(None, ge=1, description="Processes of the run; null: as many as were started.")
    hsdp_replicate_dim: int = Field(1, ge=1, description="Copies of the sharded weights.")
    hsdp_shard_dim: int = Field(
        -1, ge=-1, description="Shards of the weights, those of sp_size included; -1: what the others leave."
    )
    sp_size: int = Field(1, ge=1, description="Processes that share the tokens of a sample; divides hsdp_shard_dim.")
    tp_size: int = Field(1, ge=1, description="Processes that share each matrix: heads and MLP width.")
    reshard_after_forward: bool = Field(
        True, description="Free gathered weights after the forward pass; false: more memory, fewer all-gathers."
    )
    fsdp_modules_per_group: int = Field(
        1, ge=1, description="Consecutive blocks per all-gather: fewer launches, larger buffers, less overlap."
    )
    fsdp_prefetch: int = Field(1, ge=0, description="Groups that are gathered ahead; 0: left to PyTorch.")
    fsdp_symmetric_memory: bool = Field(False, description="NCCL's symmetric-memory collectives for the weights.")
    reduce_dtype: Float | None = Field(
        "fp32", description="In what gradients travel; bf16 halves it. Sums are fp32 either way; null: fp32."
    )
    accumulate: Literal["last", "sharded"] = Field(
        "last",
        description="last: reduce gradients after the last microbatch, whole until then; sharded: after each, which "
        "takes less memory and more communication.",
    )
    pin_cpu_memory: bool = Field(
        False, description="Keep weights, gradients and moments in (on CUDA pinned) host memory between uses."
    )
    timeout_s: float = Field(
        1800.0, gt=0, description="Seconds that a collective may take; then the run ends and says where each rank was."
    )

    @model_validator(mode="after")
    def _check(self):
        faults, shard, sp = [], self.hsdp_shard_dim, self.sp_size
        if shard == 0:
            faults.append(("hsdp_shard_dim", "must be at least 1, or -1 for what the others leave, got 0"))
        elif shard > 0 and shard % sp:
            faults.append(("sp_size", f"must divide hsdp_shard_dim, got {sp} and {shard}"))
        sizes = (self.hsdp_replicate_dim, shard, self.tp_size)
        if shard > 0 and self.num_gpus is not None and self.hsdp_replicate_dim * shard * self.tp_size != self.num_gpus:
            product = " x ".join(map(str, sizes))
            what = f"must be hsdp_replicate_dim x hsdp_shard_dim x tp_size = {product}, got {self.num_gpus}"
            faults.append(("num_gpus", what))
        raise_field_faults(faults)
        return self


class Profile(Section):
    """Which steps to trace."""

    start: int = Field(ge=0, description="First optimiser step of the trace, from 0.")
    steps: int = Field(ge=1, description="Optimiser steps in the trace.")


class Training(Section):
    """Everything about a run that is not the model or the method."""

    data: Data
    optimizer: Optimizer
    loop: Loop
    checkpoint: Checkpoint
    model: ModelTraining = ModelTraining()
    distributed: Distributed = Distributed()
    dit_precision: Literal["fp32", "bf16"] = Field("fp32", description="Stored (master) weights.")
    compute_dtype: Literal["fp32", "bf16"] | None = Field(
        None, description="Arithmetic of the blocks; null: bf16 on a GPU that has it, else fp32."
    )
    device: str | None = Field(
        None, description="cuda, cuda:1, mps, cpu; null: the best there is. Of several processes each has its own GPU."
    )
    deterministic: bool = Field(False, description="Deterministic kernels: bit-equal resume on a GPU too, but slower.")
    profile: Profile | None = Field(None, description="Write a trace of these steps; null: none.")


class GradClip(Section):
    """Gradient clipping by global norm."""

    max_grad_norm: float = Field(1.0, description="Largest global gradient norm; 0 or less: no clipping.")
    log_grad_norms: bool = Field(True, description="Log the norm before clipping.")


class EMA(Section):
    """Exponential moving average of the weights."""

    decay: float = Field(ge=0, lt=1, description="Share of the average kept at each step.")
    start_iter: int = Field(0, ge=0, description="Optimiser step at which averaging starts.")


class Validation(Section):
    """Videos sampled during training."""

    dataset_file: str = Field(description='Prompt file: {"data": [{"caption": ..., "image": ..., "seed": ...}, ...]}.')
    every_steps: int = Field(ge=1, description="Optimiser steps between validations.")
    sampling_steps: tuple[Positive, ...] = Field(
        min_length=1, description="Denoising steps; each entry gives one video per prompt."
    )
    sampler: Sampler | None = Field(None, description="Sampler of the videos; null: unipc for Wan, euler for LTX-2.")
    guidance_scale: float = Field(1.0, ge=0, description="uncond + scale * (cond - uncond); 1: no guidance.")
    audio_guidance_scale: float | None = Field(
        None, ge=0, description="The same for LTX-2's audio; null: as guidance_scale."
    )
    num_frames: int | None = Field(None, ge=1, description="Frames per video; null: as in training.")
    height: int | None = Field(None, ge=1, description="Height in pixels; null: as in training.")
    width: int | None = Field(None, ge=1, description="Width in pixels; null: as in training.")
    fps: float | None = Field(None, gt=0, description="Frames per second of the files; null: the data's.")
    validate_at_start: bool = Field(False, description="Also validate before the first step.")
    use_ema: bool = Field(True, description="Sample with the averaged weights when there are any.")


class Callbacks(Section):
    """What happens around the optimiser steps."""

    grad_clip: GradClip = GradClip()
    ema: EMA | None = Field(None, description="Moving average of the weights; null: none.")
    validation: Validation | None = Field(None, description="Sampling during training; null: none.")


class Pipeline(Section):
    """The noise schedule, shared by training, validation and inference, and the models around the transformer."""

    flow_shift: float = Field(3.0, gt=0, description="sigma -> s * sigma / (1 + (s - 1) * sigma); 1: no shift.")
    vae: str | None = Field(
        None, description="Folder of the VAE of the latents; null: beside the data, or init_from's."
    )
    vae_dtype: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of the VAE in validation.")
    audio_vae: str | None = Field(None, description="Folder of LTX-2's audio VAE; null: likewise.")
    vocoder: str | None = Field(None, description="Folder of LTX-2's vocoder; null: likewise.")
    text_encoder: str | None = Field(None, description="Folder of the text encoder; null: likewise.")
    image_encoder: str | None = Field(
        None, description="Folder of the image encoder, for models with image features; null: likewise."
    )
    expand_timesteps: bool | None = Field(
        None, description="Whether a picture is the model's clean first latent frame (Wan2.2 5B); null: as init_from."
    )


# Keys that only one kind of model reads.
OWN_KEYS = {
    "wan": (
        "training.data.text_padding_length",
        "training.model.logit_mean",
        "pipeline.flow_shift",
        "pipeline.image_encoder",
        "pipeline.expand_timesteps",
    ),
    "ltx2": (
        "training.model.timestep_uniform_prob",
        "training.model.video_loss_weight",
        "training.model.audio_loss_weight",
        "callbacks.validation.audio_guidance_scale",
        "pipeline.audio_vae",
        "pipeline.vocoder",
    ),
}
SCHEMES = {"wan": ("uniform", "logit_normal"), "ltx2": ("shifted_logit_normal", "uniform")}
SAMPLERS = {"wan": ("unipc", "euler"), "ltx2": ("euler", "gradient_estimation", "res_2s")}
"""Densities and samplers of each kind of model; the first is what null stands for."""


def sampler_of(recipe: "Recipe") -> str:
    """The sampler of a recipe's validation."""
    asked = recipe.callbacks.validation.sampler
    return SAMPLERS[recipe.models.student.target][0] if asked is None else asked


def _differs(recipe: Section, key: str) -> bool:
    """Whether a key has another value than its default; those in sections that are null have not."""
    *parents, last = key.split(".")
    node = recipe
    for part in parents:
        node = None if node is None else getattr(node, part)
    return node is not None and getattr(node, last) != type(node).model_fields[last].default


def _kind_faults(recipe: "Recipe") -> list[tuple[str, str]]:
    """Keys and values that mean nothing to the kind of model."""
    kind, faults = recipe.models.student.target, []
    for other in (k for k in OWN_KEYS if k != kind):
        what = f"does nothing for models.student._target_: {kind}, only for {other}"
        faults += [(key, what) for key in OWN_KEYS[other] if _differs(recipe, key)]
    validation = recipe.callbacks.validation
    chosen = {
        "training.model.weighting_scheme": (recipe.training.model.weighting_scheme, SCHEMES[kind]),
        "callbacks.validation.sampler": (None if validation is None else validation.sampler, SAMPLERS[kind]),
    }
    for key, (value, allowed) in chosen.items():
        if value is not None and value not in allowed:
            faults.append((key, f"must be one of {', '.join(allowed)} for {kind}, got {value}"))
    return faults


def _frame_faults(key: str, frames: int | None, stride: int) -> list[tuple[str, str]]:
    near = [] if frames is None else nearest_valid(frames, stride, 1)
    if frames is None or frames in near:
        return []
    return [(key, f"must be {stride}k + 1, got {frames}; nearest: {' or '.join(map(str, near))}")]


class Recipe(Section):
    """One training run."""

    models: Models
    method: SFT
    training: Training
    callbacks: Callbacks = Callbacks()
    pipeline: Pipeline = Pipeline()

    @model_validator(mode="after")
    def _check(self):
        stride, data = self.models.student.temporal_stride, self.training.data
        faults = _frame_faults("training.data.num_frames", data.num_frames, stride)
        if not faults and data.num_frames is not None and data.num_latent_t is not None:
            frames = stride * (data.num_latent_t - 1) + 1
            if data.num_frames != frames:
                what = f"must be {frames} for num_latent_t {data.num_latent_t}, got {data.num_frames}"
                faults.append(("training.data.num_frames", what))
        if self.callbacks.validation is not None:
            faults += _frame_faults("callbacks.validation.num_frames", self.callbacks.validation.num_frames, stride)
        raise_field_faults(faults + _kind_faults(self))
        return self


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and its command-line overrides. Errors as in `core.config.load_config`."""
    return load_config(Recipe, path, overrides)
