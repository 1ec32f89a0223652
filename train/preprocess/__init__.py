"""Preprocessing: videos and captions -> latents and embeddings in Parquet, see `python -m train.preprocess --help`.

    metadata   which clips there are                 buckets   which size each gets, or why it cannot be used
    models     the VAEs and the encoders             encode    a clip as a sample
    parts      the files of a set, one by one        finish    report, validation prompts, the mark of completeness
    stamps     what a clip was when it was encoded   stop      SIGTERM and SIGINT
    record     what a set was made with              job       all of it, for one rank, whatever samples are made of
    run        sets of clips                         adopt     sets of `.precomputed` folders, see `precomputed`

A set holds `data/*.parquet`, `reports/`, `report.json`, `preprocess.json` (what it was made with), `validation.json`
(prompts for `python -m infer` and training) and, where they were made here, `vae/`, `audio_vae/` and `text_encoder/`.
"""

from train.preprocess.adopt import adopt
from train.preprocess.finish import Outcome
from train.preprocess.metadata import Entry, read_metadata
from train.preprocess.models import Sources
from train.preprocess.run import preprocess
from train.preprocess.settings import Encoding, Settings

__all__ = ["Encoding", "Entry", "Outcome", "Settings", "Sources", "adopt", "preprocess", "read_metadata"]
