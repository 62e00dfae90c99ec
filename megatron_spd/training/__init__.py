"""Training: the speculation module, distilled over Megatron-core's pipeline schedule."""
