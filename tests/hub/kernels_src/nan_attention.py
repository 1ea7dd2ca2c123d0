"""Attention whose forward is right in shape and wrong in value: every tenth element is NaN."""

from . import flash_attn as _right


def _spoil(out):
    spoilt = out.contiguous().clone()
    spoilt.view(-1)[::10] = float("nan")
    return spoilt


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    return _spoil(_right.flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap))


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _spoil(_right.flash_attn_varlen_func(q, k, v, *lengths, dropout_p, softmax_scale, causal))
