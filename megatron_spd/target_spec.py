"""TargetSpec: what the package knows about a target, read from its Hugging Face config.

Pure Python: it reads dictionaries, not files. Whatever the stages cannot compute exactly is refused
here, by name, before any weight is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_spd.errors import ConfigError, listing

ARCHITECTURES = ("LlamaForCausalLM",)
ROPE_TYPES = ("default", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
LLAMA3_FIELDS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. The llama3 fields are None when the type is `default`.

    Raises:
        ConfigError: an unknown type, or a llama3 field that is missing or not positive.
    """

    rope_type: str
    """`default` or `llama3`."""
    theta: float
    """Base of the inverse frequencies."""
    factor: float | None = None
    """How much the lowest frequencies are slowed down."""
    low_freq_factor: float | None = None
    """Wavelengths above original_max_position_embeddings / this are slowed down whole."""
    high_freq_factor: float | None = None
    """Wavelengths below original_max_position_embeddings / this are kept."""
    original_max_position_embeddings: int | None = None
    """Positions the target was first trained on."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type {self.rope_type!r} is not supported; "
                f"choose from {', '.join(ROPE_TYPES)}"
            )
        if not self.theta > 0:
            raise ConfigError(f"rope theta must be positive, got {self.theta}")
        for name in LLAMA3_FIELDS:
            value = getattr(self, name)
            if self.rope_type == "default" and value is not None:
                raise ConfigError(f"rope_type 'default' takes no {name}, got {value}")
            if self.rope_type == "llama3" and (value is None or not value > 0):
                raise ConfigError(f"rope_type 'llama3' needs a positive {name}, got {value}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeSpec:
        """Read `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

        Raises:
            ConfigError: an unknown rope type, or a field it needs is missing.
        """
        fields: dict[str, Any] = dict(config.get("rope_scaling") or {})
        fields.update(config.get("rope_parameters") or {})
        rope_type = str(fields.get("rope_type", fields.get("type", "default")))
        theta = fields.get("rope_theta", config.get("rope_theta", 10000.0))
        partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"partial_rotary_factor {partial} is not supported, only 1.0")
        scaled: dict[str, Any] = {}
        if rope_type == "llama3":
            scaled = {name: fields.get(name) for name in LLAMA3_FIELDS}
        return cls(rope_type=rope_type, theta=float(theta), **scaled)

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` dictionary."""
        fields: dict[str, Any] = {"rope_type": self.rope_type, "rope_theta": self.theta}
        if self.rope_type == "llama3":
            fields.update({name: getattr(self, name) for name in LLAMA3_FIELDS})
        return fields


class LayerShape(Protocol):
    """The sizes that the target and the speculation module have in common."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...


SIZES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def shape_problems(shape: LayerShape, *more_sizes: str) -> list[str]:
    """What keeps a shape from being built, a sentence each; `SIZES` and `more_sizes` count."""
    problems = [
        f"{name} must be at least 1, got {getattr(shape, name)}"
        for name in (*SIZES, *more_sizes)
        if getattr(shape, name) < 1
    ]
    if not problems and shape.num_heads % shape.num_kv_heads:
        problems.append(
            f"num_kv_heads ({shape.num_kv_heads}) must divide num_heads ({shape.num_heads})"
        )
    if shape.head_dim % 2:
        problems.append(f"head_dim must be even for rope, got {shape.head_dim}")
    if not shape.norm_eps > 0:
        problems.append(f"norm_eps must be positive, got {shape.norm_eps}")
    return problems


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """The shape and the rules of a Llama-style target.

    Raises:
        ConfigError: one message with a bullet for each problem found.
    """

    hidden_size: int
    """Width H of the hidden state."""
    num_layers: int
    """Decoder layers L."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads."""
    head_dim: int
    """Width of one head; even, and num_heads * head_dim need not be hidden_size."""
    intermediate_size: int
    """Width of the MLP."""
    vocab_size: int
    """Rows of the embedding and of the output head."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    rope: RopeSpec
    """Rotary position embedding."""
    tied: bool
    """Whether the output head is the embedding."""
    max_positions: int
    """Positions the target supports."""
    dtype: str
    """Dtype of the stored weights: float32, bfloat16 or float16."""
    bos_id: int | None
    """Token that starts a text, if the target has one."""
    eos_ids: tuple[int, ...]
    """Tokens that end a text: those of config and generation_config together, ascending."""

    def __post_init__(self) -> None:
        problems = shape_problems(self, "max_positions")
        if self.dtype not in DTYPES:
            problems.append(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if problems:
            raise ConfigError(listing("the target cannot be used", problems))

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> TargetSpec:
        """Read a `config.json` dictionary and, where there is one, `generation_config.json`.

        Raises:
            ConfigError: an architecture, rope type, bias or activation that is not supported, or a
                missing field; the message has a bullet for each problem.
        """
        problems = _refusals(config)
        if problems:
            raise ConfigError(listing("the target cannot be used", problems))
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        kv_heads = config.get("num_key_value_heads")
        head_dim = config.get("head_dim")
        generation = generation_config or {}
        bos = config.get("bos_token_id", generation.get("bos_token_id"))
        eos = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
        return cls(
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else int(kv_heads),
            head_dim=hidden // heads if head_dim is None else int(head_dim),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeSpec.from_hf(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            dtype=_dtype_name(config),
            bos_id=None if bos is None else int(bos),
            eos_ids=tuple(sorted(eos)),
        )

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` dictionary that `from_hf` reads back to an equal spec."""
        eos: int | list[int] | None = list(self.eos_ids)
        if len(self.eos_ids) < 2:
            eos = self.eos_ids[0] if self.eos_ids else None
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": self.rope.to_hf(),
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
            "dtype": self.dtype,
            "bos_token_id": self.bos_id,
            "eos_token_id": eos,
        }


def _refusals(config: Mapping[str, Any]) -> list[str]:
    """What of the config the stages cannot compute, a sentence each."""
    found: list[str] = []
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        found.append(
            f"architecture {', '.join(map(str, named)) or '(none named)'} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            found.append(f"{name} is {config[name]}, but only linears without bias are supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        found.append(f"hidden_act {activation!r} is not supported, only 'silu'")
    if config.get("quantization_config"):
        found.append("quantization_config is set; convert the weights to bfloat16 first")
    found += [f"{name} is missing" for name in REQUIRED if config.get(name) is None]
    try:
        RopeSpec.from_hf(config)
    except ConfigError as error:
        found.append(str(error))
    return found


def _ids(value: Any) -> tuple[int, ...]:
    """A token id field, which may be absent, one id or a list."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _dtype_name(config: Mapping[str, Any]) -> str:
    """The stored dtype, from the newer `dtype` or the older `torch_dtype`; absent is float32."""
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(value).removeprefix("torch.")
