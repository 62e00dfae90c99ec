"""Files in and out: target folders, stage weights, module artifacts, tokenizers, provenance."""

from megatron_spd.checkpoint.artifact import (
    ArtifactMeta,
    check_pairing,
    load_artifact,
    load_meta,
    save_artifact,
)
from megatron_spd.checkpoint.atomic import write_all_atomic, write_atomic
from megatron_spd.checkpoint.hf_folder import FolderHashes, HfFolder
from megatron_spd.checkpoint.provenance import write_provenance, write_run
from megatron_spd.checkpoint.stage_weights import (
    load_embedding,
    load_final_norm,
    load_head,
    load_stage,
    merge_index,
    save_stage,
)
from megatron_spd.checkpoint.tokenizer import Tokenizer, train_sentencepiece

__all__ = [
    "HfFolder",
    "FolderHashes",
    "load_stage",
    "load_embedding",
    "load_head",
    "load_final_norm",
    "save_stage",
    "merge_index",
    "ArtifactMeta",
    "save_artifact",
    "load_meta",
    "load_artifact",
    "check_pairing",
    "Tokenizer",
    "train_sentencepiece",
    "write_atomic",
    "write_all_atomic",
    "write_run",
    "write_provenance",
]
