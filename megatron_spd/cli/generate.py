"""`megatron-spd generate`: continue one prompt over the ranks of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from megatron_spd import comm
from megatron_spd.checkpoint.artifact import check_pairing, load_artifact, load_meta
from megatron_spd.cli.target import Target, open_target
from megatron_spd.config import EvalOptions, GenerateOptions, PlanConfig
from megatron_spd.inference.drafter import Drafter, SilentDrafter
from megatron_spd.inference.engine import EngineOptions, build_module_drafter, decode_on_ranks
from megatron_spd.inference.requests import Request, Result
from megatron_spd.launcher import run_under_torchrun
from megatron_spd.sampling import SamplingParams


def generate(
    plan_config: PlanConfig, options: GenerateOptions, argv: Sequence[str]
) -> Result | None:
    """Check everything that needs no weights, become the ranks, decode.

    Returns the result on the module's rank, None on the others.

    Raises:
        ConfigError, PlanError, CheckpointError: the input cannot work.
    """
    target = open_target(plan_config)
    request = request_of(target, options, options.prompt, options.stop)
    check_module(target, options.module)
    run_under_torchrun(argv, target.plan.world_size, target.plan)
    comm.init_ranks()
    engine = engine_of(options)
    with comm.reporting_failures():
        return decode_on_ranks(
            target.folder,
            target.plan,
            engine,
            drafter=drafter_of(target, options.module, engine),
            decode=target.tokenizer.decode,
            work=lambda driver: driver.run(request),
        )


def request_of(
    target: Target,
    options: GenerateOptions | EvalOptions,
    prompt: str,
    stop: tuple[str, ...] = (),
) -> Request:
    """The request that continues a text as the options say.

    Raises:
        ConfigError: the prompt has no tokens or fills the context, or a field is out of range.
    """
    request = Request(
        prompt_ids=tuple(target.tokenizer.encode(prompt)),
        max_new_tokens=options.max_new_tokens,
        sampling=sampling_of(options),
        eos_ids=frozenset(target.folder.spec.eos_ids),
        stop=stop,
    )
    request.limit(target.folder.spec.max_positions)
    return request


def engine_of(options: GenerateOptions | EvalOptions) -> EngineOptions:
    """The engine's sizes for a command's drafts."""
    return EngineOptions(width=options.width, repairs=options.repairs)


def sampling_of(options: GenerateOptions | EvalOptions) -> SamplingParams:
    """The sampling fields of a command."""
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


def check_module(target: Target, module: str) -> None:
    """Refuse a module, if there is one, that was made for another target or plan.

    Raises:
        CheckpointError: a bullet for each difference.
    """
    if module:
        folder = target.folder
        check_pairing(load_meta(module), folder.spec, folder.hashes(), target.plan)


def drafter_of(target: Target, module: str, engine: EngineOptions) -> Callable[[], Drafter]:
    """What makes the drafter of a module's folder; without one nothing is ever drafted."""

    def make() -> Drafter:
        if not module:
            return SilentDrafter()
        meta, tensors = load_artifact(module)
        return build_module_drafter(target.folder, target.plan, engine, meta, tensors)

    return make


def facts_of(result: Result) -> dict[str, Any]:
    """A result as JSON has it."""
    return {
        "ids": list(result.ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        **asdict(result.counters),
        "acceptance": result.acceptance,
        "eal": result.eal,
        "seconds": result.seconds,
    }


def to_json(result: Result) -> str:
    """The machine-readable result."""
    return json.dumps(facts_of(result), indent=2)
