"""The target's stages, built from Megatron-core layers."""

from megatron_spd import compat  # noqa: F401  # first: it silences what Megatron says on import
from megatron_spd.model.parallel import init_single_rank
from megatron_spd.model.stage import StageOutput, TargetStage

__all__ = ["StageOutput", "TargetStage", "init_single_rank"]
