"""The target of a command, its plan and its tokenizer, checked before any weight is opened."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.config import PlanConfig
from megatron_spd.errors import CheckpointError
from megatron_spd.stage_plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class Target:
    """What every command that runs a target starts from."""

    folder: HfFolder
    plan: StagePlan
    tokenizer: Tokenizer


def open_target(config: PlanConfig) -> Target:
    """The target that a plan names.

    Raises:
        CheckpointError: the folder is damaged, or its tokenizer has more ids than the target.
        ConfigError, PlanError: the target is not supported, or cannot be cut so.
    """
    folder = HfFolder(config.target)
    plan = config.build(folder.spec.num_layers)
    tokenizer = Tokenizer(config.target)
    if tokenizer.vocab_size > folder.spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {config.target} has {tokenizer.vocab_size} tokens, the target's "
            f"vocabulary {folder.spec.vocab_size}; put the tokenizer of this target there"
        )
    return Target(folder=folder, plan=plan, tokenizer=tokenizer)
