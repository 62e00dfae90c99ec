"""Does the engine write what the target writes? Every plan, drafter and sampling, id by id.

The oracle of greedy text is transformers' own `generate` in float32. Text at a temperature depends
on this project's noise, so there the oracle is `inference.reference.decode_plain` in one process.
With ORACLE drafts N tokens behind the first must take N + n - 1 cycles, with WRONG drafts n * N.

    python tools/compare_with_transformers.py --target FOLDER --prompts FILE.jsonl

prints a row a (plan, world, drafter, sampling) and exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_spd.checkpoint.artifact import check_pairing, load_artifact, load_meta
from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.tokenizer import Tokenizer
from megatron_spd.cli.prompts import read_prompts
from megatron_spd.errors import ConfigError, SpdError
from megatron_spd.inference.drafter import Drafter, ScriptedDrafter
from megatron_spd.inference.driver import Driver
from megatron_spd.inference.engine import (
    EngineOptions,
    build_module_drafter,
    build_stage,
    decode_on_ranks,
)
from megatron_spd.inference.reference import decode_plain
from megatron_spd.inference.requests import Request
from megatron_spd.model.parallel import init_single_rank
from megatron_spd.sampling import SamplingParams
from megatron_spd.stage_plan import StagePlan
from megatron_spd.testing import run_ranks

ENGINE = EngineOptions(dtype=torch.float32)
SCRIPTS = {"ORACLE": 1.0, "WRONG": 0.0, "RANDOM(0.3)": 0.3}
TRAINED = "trained"
SEED = 7
SAMPLINGS = {
    "greedy": SamplingParams(),
    "T=1": SamplingParams(temperature=1.0, seed=SEED),
    "T=0.7 top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=SEED),
}
EVEN_STAGES = (1, 2, 3, 5)
UNEVEN = ((0, 1, 3, 5), (0, 2, 5))

Texts = dict[str, list[tuple[int, ...]]]
"""Sampling -> ids behind each prompt."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank is told."""

    target: str
    prompts: list[tuple[int, ...]]
    max_new_tokens: int
    samplings: tuple[str, ...]
    expected: Texts

    def requests(self, sampling: SamplingParams, eos_ids: Sequence[int]) -> list[Request]:
        return [
            Request(
                prompt_ids=ids,
                max_new_tokens=self.max_new_tokens,
                sampling=sampling,
                eos_ids=frozenset(eos_ids),
            )
            for ids in self.prompts
        ]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One text of the engine."""

    ids: tuple[int, ...]
    cycles: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    bounds: tuple[int, ...]
    world: int
    drafter: str
    sampling: str
    prompts: int
    ids_equal: int
    cycles_ok: int | None
    """None where the number of cycles depends on the drafts."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ids_equal == self.prompts and self.cycles_ok in (None, self.prompts)


def transformers_texts(job: Job) -> list[tuple[int, ...]]:
    """The greedy text of each prompt, by transformers."""
    from megatron_spd.checkpoint.hf_generate import greedy_ids, load_model

    model = load_model(job.target, torch.float32)
    eos_ids = HfFolder(job.target).spec.eos_ids
    return [tuple(greedy_ids(model, ids, job.max_new_tokens, eos_ids)) for ids in job.prompts]


def plain_texts(rank: int, job: Job) -> Texts:
    """The sampled texts of each prompt, by plain decoding in one process."""
    init_single_rank()
    folder = HfFolder(job.target)
    spec = folder.spec
    stage = build_stage(folder, StagePlan.even(spec.num_layers, 1), 0, ENGINE)
    texts: Texts = {}
    number = 0
    for name in job.samplings:
        sampling = SAMPLINGS[name]
        if sampling.greedy:
            continue
        texts[name] = []
        for request in job.requests(sampling, spec.eos_ids):
            result = decode_plain(
                [stage], request, max_positions=spec.max_positions, decode=str, request_id=number
            )
            texts[name].append(result.ids)
            number += 1
    return texts


def decode_all(
    rank: int, job: Job, plan_json: str, module: str
) -> dict[tuple[str, str], tuple[list[Decoded], float]] | None:
    """All drafters and samplings on one launch of ranks; the trained module is launched alone."""
    folder, plan = HfFolder(job.target), StagePlan.from_json(plan_json)
    script = ScriptedDrafter(1.0, vocab_size=folder.spec.vocab_size)

    def drafter() -> Drafter:
        if not module:
            return script
        meta, tensors = load_artifact(module)
        return build_module_drafter(folder, plan, ENGINE, meta, tensors)

    def work(driver: Driver) -> dict[tuple[str, str], tuple[list[Decoded], float]]:
        found = {}
        for drafts in [TRAINED] if module else SCRIPTS:
            script.right_share = SCRIPTS.get(drafts, 0.0)
            for name in job.samplings:
                sampling = SAMPLINGS[name]
                started, decoded = time.perf_counter(), []
                requests = job.requests(sampling, folder.spec.eos_ids)
                for request, ids in zip(requests, job.expected[name], strict=True):
                    start = len(request.prompt_ids)
                    script.text = {start + place: token for place, token in enumerate(ids)}
                    result = driver.run(request)
                    decoded.append(Decoded(ids=tuple(result.ids), cycles=result.counters.cycles))
                found[drafts, name] = decoded, time.perf_counter() - started
        return found

    return decode_on_ranks(folder, plan, ENGINE, drafter=drafter, decode=str, work=work)


def judge(job: Job, plan: StagePlan, drafts: str, name: str, found: Any) -> Row:
    """Compares one group of texts with the oracle's."""
    decoded, seconds = found
    expected = job.expected[name]
    cycles_ok = None
    if drafts in ("ORACLE", "WRONG"):
        cycles_ok = sum(
            text.cycles == _cycles(drafts, len(ids) - 1, plan.num_stages)
            for text, ids in zip(decoded, expected, strict=True)
        )
    return Row(
        bounds=plan.bounds,
        world=plan.world_size,
        drafter=drafts,
        sampling=name,
        prompts=len(expected),
        ids_equal=sum(text.ids == ids for text, ids in zip(decoded, expected, strict=True)),
        cycles_ok=cycles_ok,
        seconds=seconds,
    )


def _cycles(drafts: str, num_tokens: int, num_stages: int) -> int:
    """Cycles of the tokens behind the first; a text that ends with it takes none."""
    if num_tokens == 0:
        return 0
    return num_tokens + num_stages - 1 if drafts == "ORACLE" else num_tokens * num_stages


def first_difference(
    job: Job, drafts: str, name: str, decoded: Sequence[Decoded], where: str
) -> str:
    """The first token that differs, and how near a tie the target was there."""
    from megatron_spd.checkpoint.hf_generate import load_model

    for prompt, text, ids in zip(job.prompts, decoded, job.expected[name], strict=True):
        if text.ids == ids:
            continue
        ends = min(len(text.ids), len(ids))
        place = next((p for p in range(ends) if text.ids[p] != ids[p]), ends)
        model = load_model(job.target, torch.float32)
        before = torch.tensor([[*prompt, *ids[:place]]], device=model.device)
        with torch.inference_mode():
            top = model(input_ids=before).logits[0, -1].topk(2)
        gap = float(top.values[0] - top.values[1])
        return (
            f"{where}, {drafts}, {name}: prompt {job.prompts.index(prompt)}, token {place} behind "
            f"it: expected {ids[place : place + 1]}, the engine wrote "
            f"{text.ids[place : place + 1]}; the two largest logits are {gap:.2e} apart "
            f"(ids {top.indices.tolist()})"
        )
    return ""


def plans_of(arguments: argparse.Namespace, num_layers: int) -> list[StagePlan]:
    """The plans to decode over, each with the module beside stage 0 and on a rank of its own."""
    bounds = [_bounds(text) for text in arguments.bounds]
    if not bounds:
        bounds = [StagePlan.even(num_layers, n).bounds for n in EVEN_STAGES if n <= num_layers]
        bounds += [cut for cut in UNEVEN if cut[-1] == num_layers and cut not in bounds]
    bounds += [cut for cut in modules_of(arguments) if cut not in bounds]
    for cut in bounds:
        if cut[-1] != num_layers:
            raise ConfigError(f"bounds {cut} end at {cut[-1]}, the target has {num_layers} layers")
    return [
        StagePlan.from_bounds(cut, module_own_rank=own_rank)
        for cut in bounds
        for own_rank in (False, True)
    ]


def modules_of(arguments: argparse.Namespace) -> dict[tuple[int, ...], str]:
    """Bounds -> folder of the module trained for them."""
    found: dict[tuple[int, ...], str] = {}
    for text in arguments.module:
        cut, equals, folder = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--module {text!r}: expected BOUNDS=FOLDER, such as 0,2,5=out/module"
            )
        found[_bounds(cut)] = folder
    return found


def _bounds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"bounds {text!r}: expected numbers such as 0,2,5") from error


def compare(arguments: argparse.Namespace, console: Console) -> list[Row]:
    """Runs everything and returns the table's rows; differences are printed as they are found."""
    folder = HfFolder(arguments.target)
    plans, modules = plans_of(arguments, folder.spec.num_layers), modules_of(arguments)
    for plan in plans:
        if plan.bounds in modules:
            meta = load_meta(modules[plan.bounds])
            check_pairing(meta, folder.spec, folder.hashes(), plan)
    tokenizer = Tokenizer(arguments.target)
    prompts = [
        tuple(tokenizer.encode(prompt.text))
        for prompt in read_prompts(arguments.prompts, arguments.num_prompts)
    ]
    job = Job(
        target=arguments.target,
        prompts=prompts,
        max_new_tokens=arguments.max_new_tokens,
        samplings=tuple(arguments.samplings),
        expected={},
    )
    plain = run_ranks(plain_texts, 1, (job,), timeout_s=arguments.timeout_s)[0]
    job = replace(job, expected={"greedy": transformers_texts(job), **plain})
    rows: list[Row] = []
    for plan in plans:
        where = f"bounds {plan.bounds}, {plan.world_size} ranks"
        for module in dict.fromkeys(["", modules.get(plan.bounds, "")]):
            console.print(f"{where}{', ' + module if module else ''}", highlight=False)
            call = (job, plan.to_json(), module)
            ranks = run_ranks(decode_all, plan.world_size, call, timeout_s=arguments.timeout_s)
            for (drafts, name), found in ranks[plan.module_rank].items():
                rows.append(judge(job, plan, drafts, name, found))
                if rows[-1].ids_equal < len(prompts):
                    console.print(first_difference(job, drafts, name, found[0], where))
            if arguments.json:
                facts = [{**asdict(row), "ok": row.ok} for row in rows]
                arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("bounds", "world", "drafter", "sampling", "prompts", "equal", "cycles", "s")
    for row in rows:
        cycles = "-" if row.cycles_ok is None else str(row.cycles_ok)
        shown = [",".join(map(str, row.bounds)), str(row.world), row.drafter, row.sampling]
        shown += [str(row.prompts), str(row.ids_equal), cycles, f"{row.seconds:.1f}"]
        table.add_row(*shown, style=None if row.ok else "bold red")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--prompts", required=True, help=".jsonl file of prompts")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--bounds", nargs="*", default=[], help="plans such as 0,1,3,5")
    parser.add_argument("--module", nargs="*", default=[], help="BOUNDS=FOLDER of trained modules")
    parser.add_argument(
        "--samplings",
        nargs="*",
        default=list(SAMPLINGS),
        choices=list(SAMPLINGS),
        metavar="NAME",
        help=f"some of {', '.join(SAMPLINGS)}",
    )
    parser.add_argument("--json", type=Path, help="file for the rows, written as they come")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one launch of ranks")
    arguments = parser.parse_args(argv)
    try:
        rows = compare(arguments, Console(stderr=True))
    except SpdError as error:
        Console(stderr=True).print(f"compare_with_transformers: {error}", highlight=False)
        return error.exit_code
    Console().print(table_of(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
