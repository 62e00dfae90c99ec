"""Decoding over a stage plan: the driver, the stages, their links, and the plain reference."""
