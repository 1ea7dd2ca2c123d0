"""Right attention whose backward runs once and never with the graph kept, as torch.compile makes it."""

import functools

import torch

from . import flash_attn as _right


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("compiled with donated buffers, which requires retain_graph=False")
        return grad


@functools.wraps(_right.flash_attn_func)
def flash_attn_func(*arguments, **named):
    return _Once.apply(_right.flash_attn_func(*arguments, **named))


@functools.wraps(_right.flash_attn_varlen_func)
def flash_attn_varlen_func(*arguments, **named):
    return _Once.apply(_right.flash_attn_varlen_func(*arguments, **named))
