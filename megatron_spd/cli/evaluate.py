"""`megatron-spd eval`: decode prompts over a plan, and hold acceptance against training.

Every prompt is decoded by the engine that serves. Then the texts run through training's forward,
which says what share of the same drafts it would have had right. A served row that is not the
trained one shows here and nowhere else: the text stays right while acceptance dies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from megatron_spd import comm
from megatron_spd.checkpoint.artifact import load_artifact
from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.cli.generate import (
    check_module,
    drafter_of,
    engine_of,
    facts_of,
    request_of,
    sampling_of,
)
from megatron_spd.cli.progress import progress
from megatron_spd.cli.prompts import read_prompts
from megatron_spd.cli.target import Target, open_target
from megatron_spd.config import EvalOptions, PlanConfig
from megatron_spd.errors import AgreementError, ConfigError
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.engine import EngineOptions, build_compute, decode_on_ranks, join_plan
from megatron_spd.inference.requests import Request, Result
from megatron_spd.inference.stage_worker import TargetCompute
from megatron_spd.inference.timeline import MeteredCompute, Timeline
from megatron_spd.launcher import run_under_torchrun
from megatron_spd.schedule.theory import eal_of
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.training.agreement import DecodedText, TextChain, judge_text
from megatron_spd.training.pipeline import StreamedStage

_Z_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """What `--json` writes, and the table of it."""

    facts: Mapping[str, Any]
    tolerance: float

    def to_json(self) -> str:
        """One indented JSON object."""
        return json.dumps(self.facts, indent=1) + "\n"

    def to_table(self) -> Table:
        """The sums over all prompts, for a terminal."""
        facts = self.facts
        table = Table(title=f"{facts['num_prompts']} prompts", show_header=False)
        low, high = facts["interval"] or (None, None)
        between = "" if low is None else f"  [{_shown(low)}, {_shown(high)}] (95 %)"
        rows = {
            "acceptance": _shown(facts["acceptance"]) + between,
            "agreement of training": f"{_shown(facts['agreement'])}  "
            f"of {facts['agreement_judged']} judged",
            "accepted, rejected, flushed": f"{facts['accepted']}, {facts['rejected']}, "
            f"{facts['flushed']}",
            "committed, cycles": f"{facts['committed']}, {facts['cycles']}",
            "EAL, theory": f"{_shown(facts['eal'])}, {_shown(facts['eal_theory'])}",
            "seconds": _shown(facts["seconds"]),
            "tokens/s": _shown(facts["tokens_per_second"]),
        }
        for name, value in rows.items():
            table.add_row(name, value.replace("[", r"\["))
        return table

    def check(self) -> None:
        """Compare served acceptance with the training forward, where both are known.

        Raises:
            AgreementError: they differ by more than the tolerance.
        """
        served, trained = self.facts["acceptance"], self.facts["agreement"]
        if served is None or trained is None or abs(served - trained) <= self.tolerance:
            return
        raise AgreementError(
            f"served acceptance is {served:.4f}, the training forward agrees with {trained:.4f} of "
            f"the same drafts, which is more than eval.tolerance ({self.tolerance}) apart: the "
            "module is not served the rows it was trained on"
        )


def evaluate(
    plan_config: PlanConfig, options: EvalOptions, argv: Sequence[str], json_path: str = ""
) -> EvalReport | None:
    """Check everything that needs no weights, become the ranks, decode, judge, write the JSON.

    Returns the report on the module's rank, None on the others.

    Args:
        json_path: file for the report; empty writes none.

    Raises:
        ConfigError, PlanError, CheckpointError: the input cannot work.
        CommError: a rank was lost.
    """
    target = open_target(plan_config)
    asked = read_requests(target, options)
    check_module(target, options.module)
    if json_path and Path(json_path).is_dir():
        raise ConfigError(f"--json: {json_path} is a folder; name a file")
    run_under_torchrun(argv, target.plan.world_size, target.plan)
    comm.init_ranks()
    with comm.reporting_failures():
        return _on_rank(target, options, asked, argv, json_path)


def read_requests(target: Target, options: EvalOptions) -> dict[str, Request]:
    """The requests by question_id, in the file's order.

    Raises:
        ConfigError: a bad file, two prompts of one id, or a prompt that leaves no room to write.
    """
    asked: dict[str, Request] = {}
    for prompt in read_prompts(options.prompts, options.num_prompts):
        name = prompt.question_id
        if name in asked:
            raise ConfigError(f"{options.prompts}: question_id {name} occurs twice; rename one")
        try:
            asked[name] = request_of(target, options, prompt.text)
        except ConfigError as error:
            raise ConfigError(f"{options.prompts}, question_id {name}: {error}") from error
    return asked


def wilson_interval(right: int, total: int) -> tuple[float, float] | None:
    """The 95 % score interval of a share (E. B. Wilson, JASA 22, 1927, p. 209); None of nothing."""
    if not total:
        return None
    share, room = right / total, _Z_95**2 / total
    middle = (share + room / 2) / (1 + room)
    half = math.sqrt(share * (1 - share) * room + room**2 / 4) / (1 + room)
    return max(0.0, middle - half), min(1.0, middle + half)


def _on_rank(
    target: Target,
    options: EvalOptions,
    asked: Mapping[str, Request],
    argv: Sequence[str],
    json_path: str,
) -> EvalReport | None:
    engine, timeline = engine_of(options), Timeline(target.plan.num_stages)
    join_plan(target.plan)
    compute = build_compute(target.folder, target.plan, engine)
    metered = None if compute is None else MeteredCompute(compute)

    def work(driver: Driver) -> list[Result]:
        found: list[Result] = []
        with progress("decode", len(asked)) as advance:
            for request in asked.values():
                driver.timeline = None if found else timeline
                found.append(driver.run(request))
                driver.timeline = None
                advance(len(found), f"{len(found[-1].ids)} tokens")
        return found

    results = decode_on_ranks(
        target.folder,
        target.plan,
        engine,
        drafter=drafter_of(target, options.module, engine),
        decode=target.tokenizer.decode,
        work=work,
        compute=metered,
    )
    shared = _gather(metered, results)
    ids = next(part["ids"] for part in shared if part["ids"] is not None)
    texts = [
        DecodedText(ids=(*request.prompt_ids, *written), prompt_tokens=len(request.prompt_ids))
        for request, written in zip(asked.values(), ids, strict=True)
    ]
    judged = None
    if options.module and engine.is_chain:
        judged = _judge(target, options, compute, texts)
    if results is None:
        return None
    facts = {
        "command": ["megatron-spd", *argv],
        "plan": asdict(target.plan),
        "width": options.width,
        "repairs": options.repairs,
        **summary_of(list(asked), results, judged, target.plan.num_stages, engine.is_chain),
        "ranks": [_rank_facts(target.plan, rank, part) for rank, part in enumerate(shared)],
        "timeline": timeline.to_dict(),
    }
    report = EvalReport(facts=facts, tolerance=options.tolerance)
    if json_path:
        write_atomic(Path(json_path), report.to_json().encode())
    return report


def _gather(metered: MeteredCompute | None, results: list[Result] | None) -> list[dict[str, Any]]:
    """After decoding: what each rank's stage did and, from the module's rank, the written ids."""
    own = {
        "work": None if metered is None else metered.work.to_dict(),
        "ids": None if results is None else [result.ids for result in results],
    }
    return [json.loads(text) for text in comm.current_world().gather(json.dumps(own))]


def _judge(
    target: Target,
    options: EvalOptions,
    compute: TargetCompute | None,
    texts: Sequence[DecodedText],
) -> list[list[bool]] | None:
    """The training forward's flags of every text, on the module's rank."""
    plan, rank = target.plan, comm.current_world().rank
    spec = target.folder.spec
    streamed = None
    if compute is not None:
        streamed = StreamedStage(compute.model, plan, compute.model.stage, spec.hidden_size)
    dtype = EngineOptions().dtype_of(spec)
    chain = TextChain(plan, rank, streamed, hidden_size=spec.hidden_size, dtype=dtype)
    if rank != plan.module_rank:
        for text in texts:
            chain.taps(text.ids)
        return None
    meta, tensors = load_artifact(options.module)
    module = SpeculationModule(ModuleConfig.from_dict(meta.module), plan)
    module.load_state_dict(tensors)
    module.to(torch.float32).eval()  # training's dtype, whatever serving runs in
    flags: list[list[bool]] = []
    with progress("check", len(texts)) as advance:
        for text in texts:
            taps = chain.taps(text.ids)
            if taps is None:
                raise AssertionError("the module's rank got no taps")
            flags.append(judge_text(module, taps, text, sampling_of(options)))
            advance(len(flags))
    return flags


def summary_of(
    names: Sequence[str],
    results: Sequence[Result],
    judged: Sequence[Sequence[bool]] | None,
    num_stages: int,
    is_chain: bool = True,
) -> dict[str, Any]:
    """The sums over all prompts and the result of each.

    Args:
        names: question_id of each prompt.
        results: what decoding gave.
        judged: the training forward's flags of each text; None without a module, or of a tree.
        num_stages: n.
        is_chain: whether one draft entered a cycle; only then acceptance says what EAL to expect.
    """
    counted = {
        name: sum(getattr(result.counters, name) for result in results)
        for name in ("accepted", "rejected", "flushed", "committed", "cycles")
    }
    accepted, total = counted["accepted"], counted["accepted"] + counted["rejected"]
    acceptance = accepted / total if total else None
    seconds = sum(result.seconds for result in results)
    tokens = sum(len(result.ids) for result in results)
    each = [_share(flags) for flags in judged] if judged is not None else [None] * len(results)
    every = [flag for flags in judged or () for flag in flags]
    return {
        "num_prompts": len(results),
        **counted,
        "acceptance": acceptance,
        "interval": wilson_interval(accepted, total),
        "agreement": _share(every),
        "agreement_judged": len(every),
        "eal": num_stages * counted["committed"] / counted["cycles"] if counted["cycles"] else None,
        "eal_theory": eal_of(acceptance, num_stages)
        if acceptance is not None and is_chain
        else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "results": [
            {"question_id": name, **facts_of(result), "agreement": agreement}
            for name, result, agreement in zip(names, results, each, strict=True)
        ],
    }


def _rank_facts(plan: StagePlan, rank: int, part: Mapping[str, Any]) -> dict[str, Any]:
    roles = plan.roles_of(rank)
    layers = None if roles.stage is None else plan.layers_of(roles.stage)
    nothing = {"waves": 0, "nodes": 0, "busy_seconds": 0.0}
    return {
        "rank": rank,
        "stage": roles.stage,
        "module": roles.module,
        "layers": None if layers is None else [layers.start, layers.stop],
        **(part["work"] or nothing),
    }


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
