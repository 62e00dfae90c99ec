"""`megatron-spd generate`: continue one prompt over the ranks of a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from megatron_spd import comm
from megatron_spd.checkpoint.artifact import check_pairing, load_artifact, load_meta
from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.config import GenerateOptions, PlanConfig
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
    folder = HfFolder(plan_config.target)
    plan = plan_config.build(folder.spec.num_layers)
    tokenizer = Tokenizer(plan_config.target)
    request = Request(
        prompt_ids=tuple(tokenizer.encode(options.prompt)),
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        ),
        eos_ids=frozenset(folder.spec.eos_ids),
        stop=options.stop,
    )
    request.limit(folder.spec.max_positions)
    if options.module:
        check_pairing(load_meta(options.module), folder.spec, folder.hashes(), plan)
    run_under_torchrun(argv, plan.world_size)
    comm.init_ranks()
    engine = EngineOptions()

    def drafter() -> Drafter:
        if not options.module:
            return SilentDrafter()
        meta, tensors = load_artifact(options.module)
        return build_module_drafter(folder, plan, engine, meta, tensors)

    with comm.reporting_failures():
        return decode_on_ranks(
            folder,
            plan,
            engine,
            drafter=drafter,
            decode=tokenizer.decode,
            work=lambda driver: driver.run(request),
        )


def to_json(result: Result) -> str:
    """The machine-readable result."""
    facts = {
        "ids": list(result.ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        **asdict(result.counters),
        "acceptance": result.acceptance,
        "eal": result.eal,
        "seconds": result.seconds,
    }
    return json.dumps(facts, indent=2)
