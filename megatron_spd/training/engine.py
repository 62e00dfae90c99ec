"""The optimizer engine: DeepSpeed over one rank's own parameters.

DeepSpeed holds what one rank trains; a pipeline's ranks are to it the ranks of one model. It runs
on the process groups of Megatron-core and never starts torch.distributed by itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_spd.config import TrainOptions
from megatron_spd.errors import SpdError


class ModelRanks:
    """What DeepSpeed asks of a Megatron mpu: the ranks that hold one model's parameters.

    The rank in the model is 0 everywhere. To DeepSpeed the others hold copies of every parameter
    that is not marked as sharded, which it would leave out of the gradient's norm; here each rank
    has parameters of its own, and all of them count.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group, self._size = group, size

    @classmethod
    def alone(cls) -> ModelRanks:
        """This rank trains by itself."""
        return cls(parallel_state.get_tensor_model_parallel_group(), 1)

    @classmethod
    def pipeline(cls) -> ModelRanks:
        """All ranks of the pipeline train."""
        size = parallel_state.get_pipeline_model_parallel_world_size()
        return cls(parallel_state.get_pipeline_model_parallel_group(), size)

    def get_data_parallel_group(self) -> Any:
        return parallel_state.get_data_parallel_group()

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_group(self) -> Any:
        return self._group

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return self._size


def start_engine(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    options: TrainOptions,
    ranks: ModelRanks,
    *,
    backwards: int,
) -> Any:
    """A DeepSpeed engine with AdamW over `parameters`.

    Args:
        model: the module that DeepSpeed wraps.
        parameters: those of its parameters that the optimizer updates.
        ranks: over which ranks the gradient's norm is taken.
        backwards: how many times `engine.step` is called for one update.
    """
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed wants it also of a world of one
    import deepspeed  # reads DS_ACCELERATOR when it is imported

    # DeepSpeed would compile a shared-memory all-reduce at start: half a minute, and a compiler
    # that a user may not have, for one norm a step.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": backwards,
        "zero_optimization": {"stage": options.zero_stage},
        "gradient_clipping": options.gradient_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": options.learning_rate,
                "weight_decay": options.weight_decay,
                "torch_adam": True,
            },
        },
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(parameters),
        mpu=ranks,
        dist_init_required=False,
        config=config,
    )
    return engine


def set_learning_rate(engine: Any, rate: float) -> None:
    """The rate of the next update."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def optimizer_state(engine: Any) -> dict[str, Any]:
    """The optimizer's state on this rank, for a checkpoint."""
    state: dict[str, Any] = engine.optimizer.optimizer.state_dict()
    return state


def restore_optimizer(engine: Any, state: Mapping[str, Any]) -> None:
    """Goes on from a saved state; the model's tensors are already restored."""
    zero = engine.optimizer
    zero.refresh_fp32_params()
    zero.optimizer.load_state_dict(state)


def check_finite(step: int, name: str, value: float) -> None:
    """Stops a run that has diverged.

    Raises:
        SpdError: naming the step (from 1) and the value.
    """
    if not math.isfinite(value):
        raise SpdError(
            f"step {step}: the {name} is {value}, so training stops; the last checkpoint is kept: "
            "lower train.learning_rate or look at the data"
        )


def check_updated(engine: Any, step: int) -> None:
    """Stops a run whose gradient is not finite; DeepSpeed has then left the update out.

    Raises:
        SpdError: naming the step (from 1).
    """
    if engine.optimizer.overflow:
        check_finite(step, "gradient's norm", float("inf"))
