"""Wraps a right forward in a backward that fails for grouped-query shapes, as flash-attn2 v3's builds did.

https://github.com/huggingface/kernels-community/issues/1085
"""

import torch

from . import flash_attn as _right


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, arguments, q, k, v):
        ctx.function, ctx.arguments = function, arguments
        ctx.save_for_backward(q, k, v)
        return function(q, k, v, **arguments)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = ctx.function(q, k, v, **ctx.arguments)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        if q.shape[-2] != k.shape[-2]:
            dk = torch.ops.aten.sum(dk, "group")
        return None, None, dq, dk, dv


def _named(function, arguments):
    return {name: value for name, value in arguments.items() if name not in ("function", "q", "k", "v")}


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return _Attention.apply(_right.flash_attn_func, _named(None, locals()), q, k, v)


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
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    return _Attention.apply(_right.flash_attn_varlen_func, _named(None, locals()), q, k, v)
