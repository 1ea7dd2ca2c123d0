"""Attention in plain PyTorch with the call contract of flash-attn 2.8, forward and backward.

Scores and softmax are fp32 whatever the inputs are. There are no atomics: equal inputs and an equal number of
threads give equal bits. Grouped-query heads share their key and value head, as in flash-attn: head h reads h // group.
"""

import torch


def _visible(rows, columns, causal, window_size, device):
    # Aligned to the bottom right corner, as flash-attn is since 2.1.
    left, right = window_size
    right = 0 if causal else right
    if left < 0 and right < 0:
        return None
    row = torch.arange(rows, device=device)[:, None] + (columns - rows)
    column = torch.arange(columns, device=device)[None, :]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if right >= 0:
        visible &= column <= row + right
    if left >= 0:
        visible &= column >= row - left
    return visible


def _alibi(slopes, batch, heads, rows, columns):
    row = torch.arange(rows, device=slopes.device)[:, None] + (columns - rows)
    distance = (row - torch.arange(columns, device=slopes.device)[None, :]).abs()
    return -slopes.float().expand(batch, heads)[:, :, None, None] * distance


def _attend(q, *rest):
    """fp32 inside autocast too, as a compiled kernel would be."""
    with torch.autocast(q.device.type, enabled=False):
        return _attend_fp32(q, *rest)


def _attend_fp32(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes):
    """q (B, S, H, D), k and v (B, T, K, D), H a multiple of K: out (B, S, H, D), lse (B, H, S), probs (B, H, S, T)."""
    batch, rows, heads, width = q.shape
    columns, kv_heads = k.shape[1], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key and value heads")
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    # The group of query heads of one key head is folded into its rows: one matrix product for all of them.
    folded = q.float().transpose(1, 2).reshape(batch, kv_heads, heads // kv_heads * rows, width)
    keys, values = k.float().transpose(1, 2), v.float().transpose(1, 2)
    scores = (folded @ keys.transpose(-1, -2) * scale).view(batch, heads, rows, columns)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        scores = scores + _alibi(alibi_slopes, batch, heads, rows, columns)
    visible = _visible(rows, columns, causal, window_size, q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    probs = torch.softmax(scores, dim=-1)
    if visible is not None:
        # A row that sees nothing is zero, not NaN.
        probs = probs.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    dropped = torch.nn.functional.dropout(probs, dropout_p) if dropout_p else probs
    out = dropped.view(batch, kv_heads, heads // kv_heads * rows, columns) @ values
    return out.view(batch, heads, rows, -1).transpose(1, 2).to(q.dtype), lse, probs


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
    """Every row of the batch is one sequence: q (B, S, H, D), k and v (B, T, K, D)."""
    out, lse, probs = _attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return (out, lse, probs) if return_attn_probs else out


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
    """Sequences laid end to end: q (total, H, D), k and v (total, K, D); none attends to another."""
    if block_table is not None:
        raise ValueError("paged keys and values are not supported")
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(starts_q) != len(starts_k):
        raise ValueError("cu_seqlens_q and cu_seqlens_k name different numbers of sequences")
    outs, lses = [], []
    for index in range(len(starts_q) - 1):
        rows, columns = slice(*starts_q[index : index + 2]), slice(*starts_k[index : index + 2])
        slopes = (
            alibi_slopes[index : index + 1] if alibi_slopes is not None and alibi_slopes.dim() > 1 else alibi_slopes
        )
        out, lse, _ = _attend(
            q[rows][None],
            k[columns][None],
            v[columns][None],
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            slopes,
        )
        outs.append(out[0])
        lses.append(lse[0])
    out = torch.cat(outs)
    return (out, torch.cat(lses, dim=-1), None) if return_attn_probs else out
