"""Attention that calls an operator which its build did not register: it loads, and fails when it is called."""

import torch


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False):
    return torch.ops._flash_attn2_cpu_0123456.fwd(q, k, v, dropout_p, softmax_scale, causal)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    deterministic=False,
):
    return torch.ops._flash_attn2_cpu_0123456.varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, causal)
