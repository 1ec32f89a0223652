"""What decides the contents of a set beside the clips and the models: the settings of the command and of recipes."""

from typing import Any, Literal

from pydantic import Field

from core.config import Section

Float = Literal["fp32", "bf16"]


class Encoding(Section):
    """What decides the sample that a clip becomes."""

    buckets: tuple[str, ...] | None = Field(
        None, description="Sizes as WxHxFRAMES, or WxH for pictures (one frame), with commas; null: the three below."
    )
    num_frames: int | None = Field(None, description="Frames taken from the start of each clip, for one bucket.")
    height: int | None = Field(None, description="Height in pixels, for one bucket.")
    width: int | None = Field(None, description="Width in pixels, for one bucket.")
    fps: float | None = Field(
        None, description="Resample clips to this rate by nearest timestamp; null: each clip's own rate."
    )
    max_crop: float = Field(0.5, description="Largest share of a picture's area that may be cropped away.")
    max_upscale: float = Field(2.0, description="Largest factor by which a picture may be enlarged.")
    dtype: Float | None = Field(
        None, description="Arithmetic of the text and image encoders; null: bf16 on a GPU that has it, else fp32."
    )
    vae_dtype: Float = Field("fp32", description="Arithmetic of Wan's and LTX-2's VAEs.")
    allow_silent: bool = Field(
        False, description="For t2va: take a clip without sound as silent; it is not used otherwise."
    )


class Settings(Encoding):
    """What decides a set: the samples, the stand-in models, and how rows are cut into files."""

    row_type: Literal["t2v", "i2v", "t2va"] = Field(
        "t2v", description="Rows to write; i2v adds the first frame's conditions, t2va the sound."
    )
    latent_channels: int = Field(32, description="Channels of the latents of a patch codec that is fitted.")
    text_dim: int = Field(64, description="Values per word of the hash text embedder.")
    text_max_length: int = Field(32, description="Words of a caption that the hash text embedder keeps.")
    audio_latent_channels: int = Field(8, description="Channels of the latents of a sound codec that is fitted.")
    audio_latent_bins: int = Field(16, description="Frequency bins of the latents of a sound codec that is fitted.")
    clips_per_file: int = Field(64, description="Rows of the metadata per Parquet file.")
    rows_per_group: int = Field(8, description="Clips per Parquet row group.")


SOUND = ("allow_silent", "audio_latent_channels", "audio_latent_bins")
"""Settings that only rows with sound depend on."""


def noted(settings: Encoding, kind: type[Encoding], row_type: str) -> dict[str, Any]:
    """The settings of class `kind` that rows of this type depend on, as JSON holds them."""
    names = set(kind.model_fields) - (set() if row_type == "t2va" else set(SOUND))
    return settings.model_dump(mode="json", include=names - {"row_type"})
