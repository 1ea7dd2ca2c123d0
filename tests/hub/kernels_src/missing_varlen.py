"""Attention for full rows only: padded and packed ones have no function."""

from .flash_attn import flash_attn_func as flash_attn_func
