"""Speculative pipeline decoding over Megatron-core stages."""

__version__ = "0.1.0"
