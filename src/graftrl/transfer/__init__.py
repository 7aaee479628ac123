"""Proxy pairs as assets that are saved, listed and reused, and the transfer of what they learnt to other models."""
