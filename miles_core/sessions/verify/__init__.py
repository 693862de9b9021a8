"""Proof on the CPU that a chat family is append-only and token-exact."""
