"""`megatron-spd train`: a speculation module for one target and plan, over the plan's stages.

OUTPUT/
    step-00000100/     checkpoints; the same command goes on from the newest
    module/            the trained module, for `--generate.module` and `--eval.module`
    target/            joint mode: the trained target in Hugging Face's layout
    metrics.jsonl      a line a step
    run.toml, provenance.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_spd import comm
from megatron_spd.checkpoint.artifact import ArtifactMeta, save_artifact
from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.checkpoint.hf_folder import HfFolder
from megatron_spd.checkpoint.provenance import write_provenance, write_run
from megatron_spd.checkpoint.stage_weights import load_stage, merge_index, save_stage
from megatron_spd.cli.progress import Advance, progress
from megatron_spd.cli.target import Target, open_target
from megatron_spd.config import ModuleOptions, PlanConfig, TrainOptions
from megatron_spd.errors import ConfigError
from megatron_spd.launcher import run_under_torchrun
from megatron_spd.model.stage import TargetStage
from megatron_spd.speculation.config import ModuleConfig
from megatron_spd.speculation.draft_vocab import choose_draft_ids
from megatron_spd.speculation.module import SpeculationModule
from megatron_spd.stage_plan import StagePlan
from megatron_spd.training.data import PackedText
from megatron_spd.training.distill import Distillation, check_depth_weights, row_loss_of
from megatron_spd.training.joint import train_jointly
from megatron_spd.training.loop import StepReport, distill
from megatron_spd.training.pipeline import StreamedStage, start_pipeline

MODULE, TARGET, METRICS = "module", "target", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrainSummary:
    """What a run came to."""

    steps: int
    """Steps of the whole run."""
    module: Path
    """The artifact."""
    target: Path | None
    """The trained target, in joint mode."""
    agreement: float | None
    """Of the last step of this process; None when there was nothing left to do."""

    def __str__(self) -> str:
        done = "nothing was left to do" if self.agreement is None else f"{self.agreement:.3f}"
        lines = [f"steps {self.steps}, agreement of the last one: {done}", f"module: {self.module}"]
        return "\n".join([*lines, *([f"target: {self.target}"] if self.target else [])])


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything of a run that needs no weights, checked."""

    target: Target
    module: ModuleConfig
    options: TrainOptions
    text: PackedText
    cut: StagePlan
    """The plan's stages on ranks of their own, the module beside the last: Megatron's pipeline."""

    @property
    def output(self) -> Path:
        return Path(self.options.output)


def train(
    plan_config: PlanConfig,
    module_options: ModuleOptions,
    options: TrainOptions,
    argv: Sequence[str],
) -> TrainSummary | None:
    """Check everything that needs no weights, become the ranks, train, write the artifact.

    Training takes as many ranks as the plan has stages; the module lives beside the last one,
    wherever the plan puts it for decoding. Returns the summary there, None on the other ranks.

    Raises:
        ConfigError, PlanError, CheckpointError: the input cannot work.
        CommError: a rank was lost.
    """
    target = open_target(plan_config)
    check_depth_weights(options.depth_weights, target.plan.num_stages)
    if Path(options.output).exists() and not Path(options.output).is_dir():
        raise ConfigError(f"train.output ({options.output}) is a file; name a folder")
    job = Job(
        target=target,
        module=module_config(target, module_options),
        options=options,
        text=_read_text(target, options),
        cut=training_cut(target.plan),
    )
    run_under_torchrun(argv, job.cut.world_size, job.cut)
    comm.init_ranks()
    config = {
        "plan": asdict(plan_config),
        "module": asdict(module_options),
        "train": asdict(options),
    }
    record = RunRecord(
        job.output,
        config,
        ["megatron-spd", *argv],
    )
    with comm.reporting_failures():
        return _train_on_ranks(job, record)


def training_cut(plan: StagePlan) -> StagePlan:
    """The plan that training runs over: n ranks, whatever ranks the plan decodes on."""
    stages = tuple(range(plan.num_stages))
    return StagePlan(bounds=plan.bounds, taps=plan.taps, stage_ranks=stages, module_rank=stages[-1])


def module_config(target: Target, options: ModuleOptions) -> ModuleConfig:
    """The shape of a new module for a target: its widths are the target's.

    Raises:
        ConfigError: a draft vocabulary larger than the target's, or too small for what it must
            hold.
    """
    spec = target.folder.spec
    size = options.draft_vocab_size or spec.vocab_size
    needed = len(_must_have(target))
    if size < needed:
        raise ConfigError(
            f"module.draft_vocab_size ({size}) is below the {needed} end, special and byte tokens "
            "that a draft vocabulary must hold; raise it"
        )
    return ModuleConfig.for_target(
        spec,
        target.plan,
        num_layers=options.num_layers,
        aggregator=options.aggregator,
        head=options.head,
        draft_vocab_size=size,
    )


class RunRecord:
    """What is written beside a run's checkpoints, by the last stage's rank."""

    def __init__(
        self, output: Path, config: Mapping[str, Mapping[str, Any]], command: Sequence[str]
    ) -> None:
        self.output, self.config, self.command = output, config, command
        self.advance: Advance | None = None
        self.last: StepReport | None = None
        self._started = time.monotonic()

    def __call__(self, report: StepReport) -> None:
        """Adds a step; the first one also writes what the run is."""
        path = self.output / METRICS
        if self.last is None:
            # Only now is it known that the checkpoint, if there is one, belongs to this run.
            write_run(self.output, self.config)
            write_provenance(self.output, command=self.command)
            # A resumed run does the steps after its checkpoint again.
            kept = [line for line in _lines(path) if json.loads(line)["step"] < report.step]
            write_atomic(path, "".join(kept).encode())
        self.last = report
        seconds = round(time.monotonic() - self._started, 3)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(report), "seconds": seconds}) + "\n")
        if self.advance is not None:
            own = "" if report.target_loss is None else f"target loss {report.target_loss:.3f}, "
            self.advance(
                report.step, f"{own}loss {report.loss:.3f}, agreement {report.agreement:.3f}"
            )


def _train_on_ranks(job: Job, record: RunRecord) -> TrainSummary | None:
    """This rank's part, once the ranks have met."""
    options, cut = job.options, job.cut
    comm.name_stages(cut)
    comm.exchange_fingerprints(cut.fingerprint)
    start_pipeline(cut)
    stage = _load(job)
    hidden_size = job.target.folder.spec.hidden_size
    streamed = StreamedStage(stage, cut, stage.stage, hidden_size, trainable=options.joint)
    learn = partial(
        train_jointly if options.joint else distill,
        plan=job.target.plan,
        target_hash=job.target.folder.weights_hash(),
    )
    module = _new_module(job, stage) if stage.is_last else None
    if module is None:
        learn(streamed, None, job.text, options)
    else:
        learned = Distillation(
            module,
            row_loss_of(module, stage.logits, options.loss),
            num_stages=cut.num_stages,
            depth_weights=options.depth_weights,
        )
        with progress("joint" if options.joint else "distil", options.num_steps) as advance:
            record.advance = advance
            learn(streamed, learned, job.text, options, on_step=record)
    trained = _export_target(job, stage) if options.joint else job.target.folder
    if module is None or trained is None:
        return None
    meta = ArtifactMeta.of(
        trained, job.target.plan, module=job.module.to_dict(), draft_ids=module.draft_ids.tolist()
    )
    save_artifact(job.output / MODULE, meta, module.state_dict())
    return TrainSummary(
        steps=options.num_steps,
        module=job.output / MODULE,
        target=job.output / TARGET if options.joint else None,
        agreement=record.last.agreement if record.last else None,
    )


def _read_text(target: Target, options: TrainOptions) -> PackedText:
    """The training text; a text gets its beginning and, where there is one, its end token."""
    tokenizer, spec = target.tokenizer, target.folder.spec
    if options.sequence_tokens > spec.max_positions:
        raise ConfigError(
            f"train.sequence_tokens ({options.sequence_tokens}) exceeds the target's context of "
            f"{spec.max_positions} tokens; lower it"
        )
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return PackedText.from_file(
        options.data,
        lambda text: [*tokenizer.encode(text), *end],
        vocab_size=spec.vocab_size,
        sequence_tokens=options.sequence_tokens,
        seed=options.seed,
    )


def _load(job: Job) -> TargetStage:
    """This rank's stage; only its tensors are opened. A target that learns is held in float32."""
    index, spec = comm.current_world().rank, job.target.folder.spec
    dtype: torch.dtype = torch.float32 if job.options.joint else getattr(torch, spec.dtype)
    stage = TargetStage(spec, job.cut, index, dtype, trainable=job.options.joint, initialize=False)
    stage.load_state_dict(load_stage(job.target.folder, job.cut, index, dtype))
    return stage


def _new_module(job: Job, stage: TargetStage) -> SpeculationModule:
    """A module in float32 with the seed's weights, its head copied from the target's."""
    torch.manual_seed(job.options.seed)
    spec, size = job.target.folder.spec, job.module.draft_vocab_size
    draft_ids = torch.arange(size)
    if size < spec.vocab_size:
        counts = job.text.token_counts(spec.vocab_size)
        draft_ids = choose_draft_ids(counts, size, _must_have(job.target), spec.vocab_size)
    module = SpeculationModule(job.module, job.target.plan, draft_ids)
    module.init_from_target(stage.output.weight.float(), stage.final_norm.weight.float())
    return module


def _must_have(target: Target) -> set[int]:
    return {*target.tokenizer.indispensable_ids(), *target.folder.spec.eos_ids}


def _export_target(job: Job, stage: TargetStage) -> HfFolder | None:
    """Every rank writes its shard, the last one completes the folder and returns it."""
    folder, root = job.target.folder, job.output / TARGET
    tensors = {name: part.to(folder.dtype) for name, part in stage.state_dict().items()}
    save_stage(root, folder.spec, job.cut, stage.stage, tensors)
    comm.barrier()
    return merge_index(root, folder.spec, job.cut, source=folder) if stage.is_last else None


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; a last one that was cut off is left out."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [line for line in file if line.endswith("\n")]
