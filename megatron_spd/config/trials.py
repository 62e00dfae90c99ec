"""Options of what needs no target of the user's: the quickstart and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_spd.errors import ConfigError


def at_least(section: str, options: object, **limits: float) -> None:
    """Refuses a number below its limit.

    Raises:
        ConfigError: naming the option, what came and the limit.
    """
    for name, least in limits.items():
        if getattr(options, name) < least:
            raise ConfigError(
                f"{section}.{name} ({getattr(options, name)}) must be at least {least}"
            )


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions:
    """The main job on this machine, with nothing to download.

    Raises:
        ConfigError: a number is out of its range.
    """

    output: str = "spd-quickstart"
    """Folder for the tokenizer, the target, the module, the report and the pictures."""
    text_bytes: int = 3_000_000
    """Python sources of the standard library to learn from."""
    vocab_size: int = 1024
    """Tokens of the tokenizer."""
    num_layers: int = 8
    """Decoder layers of the target."""
    hidden_size: int = 128
    """Width of the target; a multiple of 64."""
    num_stages: int = 4
    """Stages, and ranks, that decode."""
    num_joint_steps: int = 320
    """Steps that train the target together with a module, over 2 ranks."""
    num_texts: int = 192
    """Texts that the trained target writes for its module to learn from."""
    num_distill_steps: int = 150
    """Steps that train the module of the stages on text the target wrote."""
    num_prompts: int = 8
    """Held-out prompts to decode."""
    max_new_tokens: int = 96
    """Tokens to write for each."""
    temperature: float = 0.7
    """Of the decoding; 0 is greedy, where a target this small repeats itself."""
    seed: int = 0
    """Seed of everything."""

    def __post_init__(self) -> None:
        at_least(
            "quickstart",
            self,
            text_bytes=100_000,
            vocab_size=300,
            num_layers=2,
            hidden_size=64,
            num_stages=1,
            num_joint_steps=1,
            num_texts=1,
            num_distill_steps=1,
            num_prompts=1,
            max_new_tokens=2,
            temperature=0,
            seed=0,
        )
        if self.hidden_size % 64:
            raise ConfigError(f"quickstart.hidden_size ({self.hidden_size}) must be 64, 128, ...")
        if self.num_stages > self.num_layers:
            raise ConfigError(
                f"quickstart.num_stages ({self.num_stages}) exceeds quickstart.num_layers "
                f"({self.num_layers}); lower it"
            )


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The engine over stages that sleep: no target, the plan's shape is given here.

    Raises:
        ConfigError: a number is out of its range.
    """

    num_stages: int = 4
    """Stages, a rank each."""
    stage_ms: float = 20.0
    """Milliseconds a stage takes for a wave."""
    agreement: tuple[float, ...] = (0.8,)
    """Share of positions whose draft is right."""
    num_tokens: int = 80
    """Tokens to write with drafts, after the first one."""
    num_plain_tokens: int = 12
    """Tokens to write without drafts, once before and once after those with drafts."""
    num_hops: int = 30
    """Times a bare message goes round all ranks, once before and once after."""
    hidden_size: int = 2560
    """Width of the hidden states that travel, in bfloat16."""
    vocab_size: int = 32_000
    """Tokens there are."""
    module_own_rank: bool = True
    """Whether the driver has its own rank; beside stage 0 it cannot draft while that sleeps."""
    seed: int = 0
    """Seed of the text and of which drafts are right."""

    def __post_init__(self) -> None:
        at_least(
            "bench",
            self,
            num_stages=1,
            stage_ms=0,
            num_tokens=2,
            num_plain_tokens=1,
            num_hops=1,
            hidden_size=1,
            vocab_size=2,
            seed=0,
        )
        if len(self.agreement) != 1 or not 0 <= self.agreement[0] <= 1:
            raise ConfigError(
                f"bench.agreement ({list(self.agreement)}) must be one share between 0 and 1: "
                "the engine drafts one candidate a cycle"
            )
