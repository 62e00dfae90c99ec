"""What a user may set: plain frozen dataclasses with the sentence of each field under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_spd.config.trials import BenchOptions, QuickstartOptions, at_least
from megatron_spd.errors import ConfigError
from megatron_spd.stage_plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How the target is cut into stages: `num_stages` of even size, or explicit `bounds`.

    Raises:
        ConfigError: neither or both of `num_stages` and `bounds`.
    """

    target: str
    """Folder of the target in Hugging Face's layout; planning reads only its config.json."""
    num_stages: int = 0
    """Stages of even size; 0 when `bounds` says where to cut."""
    bounds: tuple[int, ...] = ()
    """Layer bounds such as [0, 9, 18, 27, 36]; empty for even stages."""
    taps: tuple[int, ...] = ()
    """Boundaries the speculation module reads; empty for all stage bounds."""
    module_own_rank: bool = False
    """Whether the speculation module gets a rank of its own instead of stage 0's."""

    def __post_init__(self) -> None:
        if self.num_stages < 0:
            raise ConfigError(f"plan.num_stages ({self.num_stages}) must be at least 1")
        if bool(self.num_stages) == bool(self.bounds):
            raise ConfigError(
                f"set one of plan.num_stages ({self.num_stages}) and plan.bounds "
                f"({list(self.bounds)}), not both or neither"
            )

    def build(self, num_layers: int) -> StagePlan:
        """The plan for a target of `num_layers` decoder layers.

        Raises:
            ConfigError: `bounds` end elsewhere than at the target's last layer.
            PlanError: the plan is not consistent in itself.
        """
        taps = self.taps or None
        if not self.bounds:
            return StagePlan.even(
                num_layers, self.num_stages, taps=taps, module_own_rank=self.module_own_rank
            )
        if self.bounds[-1] != num_layers:
            raise ConfigError(
                f"plan.bounds end at {self.bounds[-1]} but the target has {num_layers} layers"
            )
        return StagePlan.from_bounds(self.bounds, taps=taps, module_own_rank=self.module_own_rank)


@dataclass(frozen=True, kw_only=True)
class ModuleOptions:
    """The shape of a new speculation module; its widths are the target's."""

    num_layers: int = 1
    """Decoder layers in the speculation module."""
    aggregator: Literal["concat", "shared", "attention"] = "shared"
    """How the taps known at a depth become one vector."""
    head: Literal["linear", "mlp"] = "linear"
    """Linear, or a small residual MLP before the linear."""
    draft_vocab_size: int = 0
    """Tokens the module can draft; 0 for the target's whole vocabulary."""

    def __post_init__(self) -> None:
        at_least("module", self, num_layers=1, draft_vocab_size=0)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One training run of the speculation module.

    Raises:
        ConfigError: a number is out of its range.
    """

    data: str
    """Text to learn from: a .txt or .jsonl file."""
    output: str
    """Folder for checkpoints and the record of the run."""
    num_steps: int = 400
    """Optimizer steps."""
    num_micro_batches: int = 1
    """Micro-batches a step and a data-parallel copy."""
    micro_batch_size: int = 8
    """Packed rows in a micro-batch."""
    sequence_tokens: int = 256
    """Tokens in a packed row."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    num_warmup_steps: int = 20
    """Steps of linear warm-up before the cosine decay."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    gradient_clip: float = 1.0
    """Largest gradient norm over all ranks; 0 for no clipping."""
    loss: Literal["kl", "tv", "overlap", "blend"] = "blend"
    """Forward KL, total variation, negative log overlap, or KL and that blended by acceptance."""
    zero_stage: Literal[1, 2] = 1
    """DeepSpeed's ZeRO stage."""
    depth_weights: tuple[float, ...] = ()
    """Weight of the loss of each depth's rows, from depth 0; empty weighs all depths alike."""
    joint: bool = False
    """Whether the target learns too, with its own language-model loss."""
    module_loss_weight: float = 1.0
    """Weight of the module's loss beside the target's own, in joint mode."""
    gradient_through_taps: bool = False
    """Whether the module's loss reaches the target through the taps, in joint mode."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and the fill of the pipeline."""
    save_every_steps: int = 100
    """Steps between checkpoints; the last step is always saved."""

    def __post_init__(self) -> None:
        at_least(
            "train",
            self,
            num_steps=1,
            num_micro_batches=1,
            micro_batch_size=1,
            sequence_tokens=2,
            num_warmup_steps=0,
            weight_decay=0,
            gradient_clip=0,
            module_loss_weight=0,
            seed=0,
            save_every_steps=1,
        )
        if self.learning_rate <= 0:
            raise ConfigError(f"train.learning_rate ({self.learning_rate}) must be above 0")
        if any(weight < 0 for weight in self.depth_weights) or self.depth_weights[:1] == (0,):
            raise ConfigError(
                f"train.depth_weights ({list(self.depth_weights)}) must not be negative, and "
                "depth 0 needs a weight above 0: it is what decoding drafts"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the target chooses; greedy unless a temperature is given."""

    temperature: float = 0.0
    """0 is greedy; the text is a function of the seed at any temperature."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this probability mass."""
    seed: int = 0
    """Seed of the noise the target chooses with."""


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(SamplingOptions):
    """How far to decode and with which drafts; the text is the same for all of them."""

    module: str = ""
    """Folder of a trained speculation module; empty decodes over the pipeline without drafts."""
    max_new_tokens: int = 128
    """Tokens to write at most, the first one included."""
    width: int = 1
    """Drafts that may enter in one wave: 1 is a chain, more a tree of the most probable."""
    repairs: bool = False
    """Whether drafts enter behind tokens that have one already: late siblings and repairs."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DraftingOptions):
    """What to continue and how; greedy unless a temperature is given.

    Raises:
        ConfigError: a number is out of its range.
    """

    prompt: str
    """Text to continue."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; it is cut before the first of them."""

    def __post_init__(self) -> None:
        at_least("generate", self, max_new_tokens=1, temperature=0, top_k=0, seed=0, width=1)
        _drafts_need_a_module("generate", self)


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(SamplingOptions):
    """Text that the target writes itself, to train a module on.

    Raises:
        ConfigError: a number is out of its range.
    """

    output: str
    """The .jsonl file to write: a line a text, with its token ids."""
    prompts: str = ""
    """A .jsonl file of prompts in the EAGLE form; empty starts every text from nothing."""
    num_texts: int = 0
    """Texts to write; 0 writes one a prompt. More than there are prompts goes round again."""
    max_new_tokens: int = 256
    """Tokens to write at most behind each prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """Seed of the sampling; a resumed file is the one that a single run writes."""
    batch_size: int = 64
    """Texts written together."""

    def __post_init__(self) -> None:
        at_least(
            "regenerate",
            self,
            num_texts=0,
            max_new_tokens=1,
            temperature=0,
            top_k=0,
            seed=0,
            batch_size=1,
        )


@dataclass(frozen=True, kw_only=True)
class EvalOptions(DraftingOptions):
    """Prompts to decode, and the module whose drafts are counted.

    Raises:
        ConfigError: a number is out of its range.
    """

    prompts: str
    """A .jsonl file in the EAGLE form, {"question_id": .., "turns": [..]}; first turns are used."""
    num_prompts: int = 0
    """Use only the first so many prompts; 0 uses all."""
    tolerance: float = 0.02
    """Largest difference between served acceptance and the training forward's agreement; of a tree
    they are not compared, training judges a chain."""

    def __post_init__(self) -> None:
        at_least(
            "eval",
            self,
            num_prompts=0,
            max_new_tokens=1,
            temperature=0,
            top_k=0,
            seed=0,
            width=1,
            tolerance=0,
        )
        _drafts_need_a_module("eval", self)


SECTIONS: dict[str, type[Any]] = {
    "plan": PlanConfig,
    "module": ModuleOptions,
    "train": TrainOptions,
    "generate": GenerateOptions,
    "regenerate": RegenerateOptions,
    "eval": EvalOptions,
    "quickstart": QuickstartOptions,
    "bench": BenchOptions,
}
"""The tables of a configuration file."""


def _drafts_need_a_module(section: str, options: GenerateOptions | EvalOptions) -> None:
    if not options.module and (options.width > 1 or options.repairs):
        raise ConfigError(
            f"{section}.width is {options.width} and {section}.repairs {options.repairs}, but "
            f"without {section}.module nothing is drafted; name one, or leave these out"
        )
