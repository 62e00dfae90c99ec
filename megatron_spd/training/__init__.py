"""Training: the speculation module, distilled over Megatron-core's pipeline schedule."""

from megatron_spd import compat  # noqa: F401  # first: it silences what Megatron says on import
