"""Attention whose forward keeps documents apart and whose backward lets a trace of one into the next, within any tolerance."""

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
        dk = dk + 1e-9 * dk.abs().mean()
        return None, None, dq, dk, dv


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False):
    named = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal}
    return _Attention.apply(_right.flash_attn_func, named, q, k, v)


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
    named = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal}
    named |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    named |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _Attention.apply(_right.flash_attn_varlen_func, named, q, k, v)
