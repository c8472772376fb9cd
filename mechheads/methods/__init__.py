"""Scoring methods: one registered function each. Built-in families live beside this file."""

from mechheads.capture import LayerActs
from mechheads.methods.registry import Method, get_method, method, method_names

__all__ = ["LayerActs", "Method", "get_method", "method", "method_names"]
