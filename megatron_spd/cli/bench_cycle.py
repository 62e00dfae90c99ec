"""`megatron-spd bench cycle`: what a cycle costs besides the stages' own time.

Engine, ranks and messages are those that decode; only the stages sleep instead of computing, so
that many of them share few cores, and the drafter follows a script. One run measures bare messages
round the ranks, decoding without drafts and decoding with them, so that each is held against what
the same ranks do in the same minute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_spd import comm
from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.checkpoint.provenance import provenance
from megatron_spd.cli.bench_report import CycleReport, TimedText, findings
from megatron_spd.config import BenchOptions
from megatron_spd.errors import ConfigError
from megatron_spd.inference.drafter import Drafter, SilentDrafter
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.engine import EngineOptions, meet, run_joined
from megatron_spd.inference.phases import PhaseClock
from megatron_spd.inference.rehearsal import RehearsedDrafter, SleepingCompute, TokenScript
from megatron_spd.inference.requests import Request
from megatron_spd.inference.ring import measure_ring, ring_edges
from megatron_spd.inference.timeline import MeteredCompute
from megatron_spd.launcher import run_under_torchrun
from megatron_spd.stage_plan import StagePlan
from megatron_spd.target_spec import RopeSpec, TargetSpec


def bench_cycle(
    options: BenchOptions, argv: Sequence[str], json_path: str = ""
) -> CycleReport | None:
    """Become the ranks, measure, write the JSON.

    Returns the report on the driver's rank, None on the others.

    Args:
        json_path: file for the report; empty writes none.

    Raises:
        ConfigError: the options cannot work.
        CommError: a rank was lost.
    """
    plan = plan_of(options)
    if json_path and Path(json_path).is_dir():
        raise ConfigError(f"--json: {json_path} is a folder; name a file")
    script_of(options)
    run_under_torchrun(argv, plan.world_size, plan)
    comm.init_ranks()
    with comm.reporting_failures():
        found = measure(options)
        if found is None:
            return None
        report = CycleReport(facts={**provenance(["megatron-spd", *argv]), **found})
        if json_path:
            write_atomic(Path(json_path), report.to_json().encode())
        return report


def plan_of(options: BenchOptions) -> StagePlan:
    """A plan of as many layers as stages: sleeping stages have none."""
    stages = options.num_stages
    return StagePlan.even(stages, stages, module_own_rank=options.module_own_rank)


def script_of(options: BenchOptions) -> TokenScript:
    """The text that is decoded and its drafts: a prompt of one token, the first token, the rest."""
    return TokenScript(
        options.agreement,
        length=options.num_tokens + 2,
        vocab_size=options.vocab_size,
        seed=options.seed,
    )


def measure(options: BenchOptions) -> dict[str, Any] | None:
    """This rank's part of a measurement; all ranks of `plan_of` must have met and call it.

    Returns the figures on the driver's rank, None on the others.

    Raises:
        CommError: a rank was lost.
    """
    plan, spec, engine = plan_of(options), _spec(options), EngineOptions()
    meet(plan)
    rank = comm.current_world().rank
    compute = _stage(options, plan, rank)
    wire = engine.wire(spec, plan)
    before = measure_ring(plan, wire, options.num_hops)
    texts = run_joined(
        spec,
        plan,
        engine,
        compute=compute,
        drafter=SilentDrafter,
        decode=str,
        work=lambda driver: _decode(options, driver),
    )
    after = measure_ring(plan, wire, options.num_hops)
    work = None if compute is None else compute.work
    stages = comm.current_world().gather(
        json.dumps(None if work is None else [work.waves, work.busy_seconds])
    )
    if texts is None or before is None or after is None:
        return None
    drafted, *plain = texts
    busy = [json.loads(text) for text in stages]
    return {
        "options": asdict(options),
        "plan": json.loads(plan.to_json()),
        "world_size": plan.world_size,
        "message_bytes": wire.message_bytes,
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "stage_measured_ms": max(1e3 * took / waves for waves, took in filter(None, busy)),
        **findings(
            drafted,
            plain,
            [*before, *after],
            num_stages=options.num_stages,
            num_edges=len(ring_edges(plan)),
            stage_ms=options.stage_ms,
        ),
    }


def _stage(options: BenchOptions, plan: StagePlan, rank: int) -> MeteredCompute | None:
    stage = plan.roles_of(rank).stage
    if stage is None:
        return None
    sleeping = SleepingCompute(
        plan,
        stage,
        script_of(options),
        seconds=options.stage_ms / 1e3,
        hidden_size=options.hidden_size,
        dtype=EngineOptions().dtype_of(_spec(options)),
    )
    return MeteredCompute(sleeping)


def _decode(options: BenchOptions, driver: Driver) -> list[TimedText]:
    """The text with drafts, between two without; the first in the list is the one with."""
    script = RehearsedDrafter(script_of(options))
    before = _text(driver, SilentDrafter(), options.num_plain_tokens)
    drafted = _text(driver, script, options.num_tokens)
    after = _text(driver, SilentDrafter(), options.num_plain_tokens)
    return [drafted, before, after]


def _text(driver: Driver, drafter: Drafter, num_tokens: int) -> TimedText:
    driver.drain()
    driver.drafter, driver.phases = drafter, PhaseClock()
    result = driver.run(Request(prompt_ids=(0,), max_new_tokens=num_tokens + 1))
    cycles = driver.phases.last(result.counters.cycles)
    driver.phases = None
    return TimedText(result=result, cycles=tuple(cycles))


def _spec(options: BenchOptions) -> TargetSpec:
    """A target as the engine sees it: what travels has its width, nothing else is built."""
    return TargetSpec(
        hidden_size=options.hidden_size,
        num_layers=options.num_stages,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=1,
        vocab_size=options.vocab_size,
        norm_eps=1e-6,
        rope=RopeSpec(rope_type="default", theta=10_000.0),
        tied=True,
        max_positions=options.num_tokens + options.num_plain_tokens + 2,
        dtype="bfloat16",
        bos_id=None,
        eos_ids=(),
    )
