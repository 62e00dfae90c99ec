"""`megatron-spd quickstart`: the whole job on this machine, from text to a report.

Text and tokenizer, a target with random weights, joint training over 2 ranks, text that the target
writes, a module for the stages, decoding over all of them, plain decoding beside it, the report.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from megatron_spd import __version__
from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.checkpoint.provenance import RECORDED
from megatron_spd.config import QuickstartOptions
from megatron_spd.quickstart.corpus import make_corpus, standard_library
from megatron_spd.quickstart.pictures import draw_timeline, draw_training
from megatron_spd.quickstart.report import Report, compare, curves_of, read_metrics
from megatron_spd.quickstart.steps import Job, Step, StepRecord, ending_on_signals
from megatron_spd.target_spec import RopeSpec, TargetSpec

JOINT_STAGES = 2
HEAD_DIM = 32
MAX_POSITIONS = 512
TOKENIZER_TEXT_BYTES = 1_000_000
WRITTEN_TOKENS = 128
WRITTEN_TEMPERATURE = 0.6


@dataclass(frozen=True, kw_only=True)
class Names:
    """Files and folders of a run, relative to its folder."""

    text: str = "text"
    start: str = "start"
    joint: str = "joint"
    written: str = "written"
    distill: str = "distill"
    evaluation: str = "eval.json"
    plain: str = "plain.json"

    @property
    def prompts(self) -> str:
        return f"{self.text}/prompts.jsonl"

    @property
    def openings(self) -> str:
        return f"{self.text}/openings.jsonl"

    @property
    def train(self) -> str:
        return f"{self.text}/train.jsonl"

    @property
    def written_text(self) -> str:
        return f"{self.written}/text.jsonl"

    @property
    def target(self) -> str:
        return f"{self.joint}/target"

    @property
    def module(self) -> str:
        return f"{self.distill}/module"


NAMES = Names()


def quickstart(options: QuickstartOptions, console: Console) -> Report:
    """Runs the steps that are not done yet, then writes the report and the pictures.

    Raises:
        SpdError: a step failed; the message names it and has the end of its log.
        ConfigError: the folder holds files of another origin.
    """
    folder = Path(options.output)
    job = Job(folder, console)
    with ending_on_signals():
        records = tuple(job.run(step) for step in make_steps(options))
        report = read_report(folder, records)
        report.write(folder)
        draw(folder)
    for name in ("report.md", "report.json", "training.png", "timeline.png"):
        job.say(str(folder / name))
    return report


def make_steps(options: QuickstartOptions) -> list[Step]:
    """The steps in their order."""
    folder = Path(options.output)
    shape = (options.vocab_size, options.num_layers, options.hidden_size, options.seed)
    sizes = (options.text_bytes, options.num_prompts, options.num_texts, options.seed)
    return [
        Step(
            name="text",
            makes=(NAMES.text,),
            work=lambda: write_text(folder, options),
            settings=(("sizes", sizes),),
        ),
        Step(
            name="start",
            makes=(NAMES.start,),
            reads=(NAMES.train,),
            work=lambda: write_start(folder, options),
            settings=(("shape", shape),),
        ),
        *_target_steps(folder, options),
        *_module_steps(folder, options),
        Step(
            name="plain",
            makes=(NAMES.plain,),
            reads=(NAMES.target, NAMES.prompts),
            work=lambda: write_plain(folder, options),
            settings=(("decoding", (options.max_new_tokens, options.temperature, options.seed)),),
        ),
    ]


def _target_steps(folder: Path, options: QuickstartOptions) -> list[Step]:
    """Training the target, and letting it write."""

    def at(name: str) -> str:
        return str(folder / name)

    joint = {
        "plan.target": at(NAMES.start),
        "plan.num_stages": JOINT_STAGES,
        "train.data": at(NAMES.train),
        "train.output": at(NAMES.joint),
        "train.joint": "true",
        "train.num_steps": options.num_joint_steps,
        "train.num_micro_batches": 2,
        "train.micro_batch_size": 4,
        "train.sequence_tokens": 128,
        "train.learning_rate": 3e-3,
        "train.seed": options.seed,
    }
    written = {
        "plan.target": at(NAMES.target),
        "plan.num_stages": 1,
        "regenerate.output": at(NAMES.written_text),
        "regenerate.prompts": at(NAMES.openings),
        "regenerate.num_texts": options.num_texts,
        "regenerate.max_new_tokens": WRITTEN_TOKENS,
        "regenerate.temperature": WRITTEN_TEMPERATURE,
        "regenerate.seed": options.seed,
    }
    return [
        Step(
            name="joint",
            makes=(NAMES.joint,),
            reads=(NAMES.start, NAMES.train),
            command=_command("train", joint),
        ),
        Step(
            name="written",
            makes=(NAMES.written,),
            reads=(NAMES.target, NAMES.openings),
            command=_command("regenerate", written),
        ),
    ]


def _module_steps(folder: Path, options: QuickstartOptions) -> list[Step]:
    """Training the module of the stages, and decoding over them."""

    def at(name: str) -> str:
        return str(folder / name)

    distill = {
        "plan.target": at(NAMES.target),
        "plan.num_stages": options.num_stages,
        "train.data": at(NAMES.written_text),
        "train.output": at(NAMES.distill),
        "train.num_steps": options.num_distill_steps,
        "train.micro_batch_size": 8,
        "train.sequence_tokens": 128,
        "train.learning_rate": 3e-3,
        "train.seed": options.seed,
    }
    evaluation = {
        "plan.target": at(NAMES.target),
        "plan.num_stages": options.num_stages,
        "eval.prompts": at(NAMES.prompts),
        "eval.module": at(NAMES.module),
        "eval.max_new_tokens": options.max_new_tokens,
        "eval.temperature": options.temperature,
        "eval.seed": options.seed,
    }
    module_and_target = (NAMES.target, NAMES.module, NAMES.prompts)
    return [
        Step(
            name="distill",
            makes=(NAMES.distill,),
            reads=(NAMES.target, NAMES.written_text),
            command=_command("train", distill),
        ),
        Step(
            name="eval",
            makes=(NAMES.evaluation,),
            reads=module_and_target,
            command=(*_command("eval", evaluation), "--json", at(NAMES.evaluation)),
        ),
    ]


def _command(subcommand: str, options: dict[str, object]) -> tuple[str, ...]:
    return (subcommand, *(f"--{name}={value}" for name, value in options.items()))


def write_text(folder: Path, options: QuickstartOptions) -> None:
    """The training text, openings out of it, and prompts of files that are held out."""
    corpus = make_corpus(
        standard_library(),
        num_bytes=options.text_bytes,
        num_held_out=options.num_prompts,
        num_openings=options.num_texts,
        seed=options.seed,
    )
    corpus.write(folder / NAMES.text)


def start_spec(options: QuickstartOptions) -> TargetSpec:
    """A Llama-shaped target: heads of 32, half as many key and value heads, untied."""
    heads = options.hidden_size // HEAD_DIM
    return TargetSpec(
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=HEAD_DIM,
        intermediate_size=options.hidden_size * 11 // 4,
        vocab_size=options.vocab_size,
        norm_eps=1e-5,
        rope=RopeSpec(rope_type="default", theta=10000.0),
        tied=False,
        max_positions=MAX_POSITIONS,
        dtype="float32",
        bos_id=1,
        eos_ids=(2,),
    )


def write_start(folder: Path, options: QuickstartOptions) -> None:
    """The tokenizer, and a target with random weights, as a Hugging Face folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron names the libraries it would use on a GPU
        import torch

        from megatron_spd.checkpoint.stage_weights import merge_index, save_stage
        from megatron_spd.checkpoint.tokenizer import train_sentencepiece
        from megatron_spd.model.parallel import init_single_rank
        from megatron_spd.model.stage import TargetStage
        from megatron_spd.stage_plan import StagePlan

        spec = start_spec(options)
        plan = StagePlan.even(spec.num_layers, 1)
        init_single_rank()
        torch.manual_seed(options.seed)
        stage = TargetStage(spec, plan, 0, torch.float32)
    root = folder / NAMES.start
    lines, size = [], 0
    for line in (folder / NAMES.train).open(encoding="utf-8"):
        if size < TOKENIZER_TEXT_BYTES:
            lines += json.loads(line)["text"].splitlines()
            size += len(line)
    train_sentencepiece(lines, root / "tokenizer.model", options.vocab_size)
    save_stage(root, spec, plan, 0, stage.state_dict())
    merge_index(root, spec, plan)


def write_plain(folder: Path, options: QuickstartOptions) -> None:
    """The prompts decoded a token at a time in this process, on one thread as each rank has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in write_start
        import torch

        from megatron_spd.checkpoint.hf_folder import HfFolder
        from megatron_spd.checkpoint.tokenizer import Tokenizer
        from megatron_spd.inference.engine import EngineOptions, build_stage
        from megatron_spd.inference.reference import decode_plain
        from megatron_spd.inference.requests import Request
        from megatron_spd.model.parallel import init_single_rank
        from megatron_spd.sampling import SamplingParams
        from megatron_spd.stage_plan import StagePlan

        init_single_rank()
        target = HfFolder(folder / NAMES.target)
        plan = StagePlan.even(target.spec.num_layers, 1)
        stage = build_stage(target, plan, 0, EngineOptions())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
    tokenizer = Tokenizer(target.path)
    results = []
    try:
        lines = (folder / NAMES.prompts).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            request = Request(
                prompt_ids=tuple(tokenizer.encode(json.loads(line)["turns"][0])),
                max_new_tokens=options.max_new_tokens,
                sampling=SamplingParams(temperature=options.temperature, seed=options.seed),
                eos_ids=frozenset(target.spec.eos_ids),
            )
            result = decode_plain(
                [stage],
                request,
                request_id=number,
                max_positions=target.spec.max_positions,
                decode=tokenizer.decode,
            )
            results.append({"ids": list(result.ids), "seconds": result.seconds})
    finally:
        torch.set_num_threads(threads)
    record = {"results": results, "threads": 1}
    write_atomic(folder / NAMES.plain, (json.dumps(record) + "\n").encode())


def read_report(folder: Path, records: tuple[StepRecord, ...]) -> Report:
    """The report of a folder whose steps are all done."""
    evaluation = json.loads((folder / NAMES.evaluation).read_text(encoding="utf-8"))
    plain = json.loads((folder / NAMES.plain).read_text(encoding="utf-8"))
    return Report(
        comparison=compare(evaluation["results"], plain["results"]),
        evaluation=evaluation,
        plain=plain,
        curves=curves_of(*_metrics(folder)),
        machine={
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "versions": {
                "megatron-spd": __version__,
                **{name: version(name) for name in RECORDED},
            },
        },
        steps=records,
    )


def draw(folder: Path) -> None:
    """Both pictures."""
    evaluation = json.loads((folder / NAMES.evaluation).read_text(encoding="utf-8"))
    joint, distil = _metrics(folder)
    draw_training(joint, distil, folder / "training.png")
    if evaluation.get("timeline"):
        draw_timeline(evaluation["timeline"], folder / "timeline.png")


def _metrics(folder: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    joint, distil = (
        read_metrics(folder / name / "metrics.jsonl") for name in (NAMES.joint, NAMES.distill)
    )
    return joint, distil
