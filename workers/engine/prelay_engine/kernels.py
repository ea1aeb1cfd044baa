"""Ways to attend to a range of keys whose results for a row do not depend on the other rows of the call.

That holds under the rules of `attention.py` on how rows are folded, how far keys reach and how rows are filled up.
All take query [1, kv_head, rows, dim], keys and values [1, kv_head, keys, dim], a mask [1, 1, 1 or rows, keys]
that is added to the scores, and give [1, kv_head, rows, dim] in the dtype of the query.
"""

from __future__ import annotations

import torch

Output = tuple[torch.Tensor, torch.Tensor]


def with_sum(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float) -> Output:
    """What scaled_dot_product_attention runs, and log Σ e^score of each row: [1, kv_head, rows], float32."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = flash(query, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    return out, log_sum


def capped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float, cap: float
) -> Output:
    """Scores are cap · tanh(score / cap); computed in float32. Also gives log Σ e^score of each row.

    Exact only if all calls for a row have the same shape, with the row in the same place.
    """
    scores = torch.bmm(query[0].float(), keys[0].float().transpose(1, 2))
    scores.mul_(scale / cap).tanh_().mul_(cap).add_(mask[0])
    log_sum = scores.logsumexp(-1)
    out = torch.bmm(scores.softmax(-1), values[0].float())
    return out.unsqueeze(0).to(query.dtype), log_sum.unsqueeze(0)


def beside_sink(out: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention in which each row has one more key, of score `sinks` and value 0.

    out [..., dim], log_sum and sinks [...]: the sink takes its share of the softmax, all else keeps proportions.
    """
    share = torch.exp(sinks.float() - log_sum).add_(1.0).reciprocal_()
    return (out.float() * share.unsqueeze(-1)).to(out.dtype)
