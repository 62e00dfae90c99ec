"""Builds what a rank of a plan runs, and starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_spd import comm
from megatron_spd.checkpoint.artifact import ArtifactMeta
from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.stage_weights import load_embedding, load_stage
from megatron_spd.inference.drafter import Drafter, ModuleDrafter
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.links import DriverLinks, run_stage
from megatron_spd.inference.stage_worker import StageCompute, TargetCompute
from megatron_spd.inference.tree_drafter import TreeDrafter
from megatron_spd.kv_rows import KvRows
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import TargetSpec
from megatron_spd.wave import WaveFormat

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes of the engine, the same on every rank."""

    chunk_tokens: int = 64
    """Prompt tokens that enter in one wave."""
    inline_nodes: int = 4
    """Nodes whose hidden states travel inside a wave's one message; a tree's always do."""
    width: int = 1
    """W: drafts of a request that may enter in one wave."""
    repairs: bool = False
    """Whether drafts enter behind nodes that have a child in flight (`schedule/tree.py`)."""
    dtype: torch.dtype | None = None
    """Dtype of weights and KV rows; None for the checkpoint's own."""

    @property
    def is_chain(self) -> bool:
        """Whether drafts only ever enter one behind the other."""
        return self.width == 1 and not self.repairs

    def num_rows(self, spec: TargetSpec, plan: StagePlan) -> int:
        """KV rows of a stage: one text at the context limit, and what may still be in flight."""
        return spec.max_positions + self.chunk_tokens + (self.width + 3) * (plan.num_stages + 1)

    def dtype_of(self, spec: TargetSpec) -> torch.dtype:
        """Dtype of weights, KV rows and what travels."""
        dtype: torch.dtype = self.dtype or getattr(torch, spec.dtype)
        return dtype

    def pool(
        self, spec: TargetSpec, plan: StagePlan, num_layers: int, shape: TargetSpec | ModuleConfig
    ) -> KvRows:
        """KV rows for layers of a shape, as many rows as every pool of this plan has."""
        return KvRows(
            num_layers=num_layers,
            num_rows=self.num_rows(spec, plan),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype_of(spec),
            device="cpu",
        )

    def wire(self, spec: TargetSpec, plan: StagePlan) -> WaveFormat:
        """The format of a hop."""
        inline_nodes = max(self.inline_nodes, self.width)
        return WaveFormat(
            fingerprint=plan.fingerprint,
            max_nodes=self.chunk_tokens + inline_nodes,
            inline_nodes=inline_nodes,
            max_ancestors=plan.num_stages,
            hidden_size=spec.hidden_size,
            dtype=self.dtype_of(spec),
        )


def build_stage(
    folder: HfFolder, plan: StagePlan, stage: int, options: EngineOptions
) -> TargetCompute:
    """One stage of the target with its KV rows; opens only the tensors of that stage.

    Needs Megatron's parallel state (`model.parallel.init_single_rank`).
    """
    from megatron_spd.model.stage import TargetStage  # Megatron loads in the ranks alone: seconds

    dtype = options.dtype_of(folder.spec)
    model = TargetStage(folder.spec, plan, stage, dtype, initialize=False)
    model.load_state_dict(load_stage(folder, plan, stage, dtype))
    model.eval()
    kv = options.pool(folder.spec, plan, len(plan.layers_of(stage)), folder.spec)
    return TargetCompute(model, kv, is_last=stage == plan.num_stages - 1)


def meet(plan: StagePlan) -> None:
    """Agree with the other ranks on the plan; every rank must call it, before anything else.

    Raises:
        CommError: the plan needs other ranks, or the ranks hold different plans.
    """
    comm.name_stages(plan)
    comm.exchange_fingerprints(plan.fingerprint)


def join_plan(plan: StagePlan) -> None:
    """Meet the other ranks under this plan, ready to run the target's stages.

    The ranks must have met (`comm.init_ranks`). A second call does no harm if all ranks make it.

    Raises:
        CommError: the plan needs other ranks, or the ranks hold different plans.
    """
    from megatron_spd.model.parallel import init_single_rank

    meet(plan)
    init_single_rank()  # makes process groups, so every rank must take part


def build_compute(
    folder: HfFolder, plan: StagePlan, options: EngineOptions
) -> TargetCompute | None:
    """This rank's stage after `join_plan`; None on a rank that has only the module."""
    stage = plan.roles_of(comm.current_world().rank).stage
    return None if stage is None else build_stage(folder, plan, stage, options)


def decode_on_ranks(
    folder: HfFolder,
    plan: StagePlan,
    options: EngineOptions,
    *,
    drafter: Callable[[], Drafter],
    decode: Callable[[Sequence[int]], str],
    work: Callable[[Driver], T],
    compute: StageCompute | None = None,
) -> T | None:
    """Run this rank's part of the plan. The ranks must have met (`comm.init_ranks`).

    Args:
        folder: the target.
        plan: the plan, the same on every rank.
        options: sizes of the engine.
        drafter: makes the drafter, on the module's rank.
        decode: token ids -> text.
        work: what to decode, on the module's rank.
        compute: this rank's stage if it is loaded already (`build_compute`).

    Returns what `work` returns on the module's rank, None on the others.

    Raises:
        CommError: the ranks hold different plans, or a peer dies.
    """
    join_plan(plan)
    return run_joined(
        folder.spec,
        plan,
        options,
        compute=compute or build_compute(folder, plan, options),
        drafter=drafter,
        decode=decode,
        work=work,
    )


def run_joined(
    spec: TargetSpec,
    plan: StagePlan,
    options: EngineOptions,
    *,
    compute: StageCompute | None,
    drafter: Callable[[], Drafter],
    decode: Callable[[Sequence[int]], str],
    work: Callable[[Driver], T],
) -> T | None:
    """This rank's part of a plan on which the ranks have met; needs the target's shape alone.

    Arguments and result are those of `decode_on_ranks`.

    Raises:
        CommError: a peer dies.
    """
    roles = plan.roles_of(comm.current_world().rank)
    wire = options.wire(spec, plan)
    if not roles.module:
        if roles.stage is None or compute is None:
            raise AssertionError(f"{roles} has nothing to run")
        run_stage(plan, roles.stage, wire, compute)
        return None
    links = DriverLinks(plan, wire, compute)
    driver = Driver(
        plan=plan,
        links=links,
        drafter=drafter(),
        max_positions=spec.max_positions,
        decode=decode,
        num_rows=options.num_rows(spec, plan),
        chunk_tokens=options.chunk_tokens,
    )
    result = work(driver)
    driver.drain()
    links.stop()
    return result


def build_module_drafter(
    folder: HfFolder,
    plan: StagePlan,
    options: EngineOptions,
    meta: ArtifactMeta,
    tensors: Mapping[str, Tensor],
) -> ModuleDrafter:
    """The drafter of a trained module: a chain's, or a tree's if the options ask for one.

    Opens only the target's embedding.
    """
    dtype = options.dtype_of(folder.spec)
    config = ModuleConfig.from_dict(meta.module)
    module = SpeculationModule(config, plan)
    module.load_state_dict(dict(tensors))
    module.to(dtype).eval()
    kv = options.pool(folder.spec, plan, config.num_layers, config)
    embedding = load_embedding(folder, dtype)
    if options.is_chain:
        return ModuleDrafter(plan, module, embedding, kv)
    return TreeDrafter(plan, module, embedding, kv, width=options.width, repairs=options.repairs)
