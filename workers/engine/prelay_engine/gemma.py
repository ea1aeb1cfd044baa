"""What a GGUF file of a Gemma does not say, and whoever reads one has to know."""

from __future__ import annotations

from typing import Any

#: The models of 27 billion, by type and layers: they scale queries by width / heads, the smaller ones by 256.
_LARGE = {("gemma2", 46), ("gemma3_text", 62)}


def mend_scale(net: Any) -> bool:
    """Give a Gemma that was read from GGUF the scale of its queries; whether it was another one."""
    config = net.config.get_text_config(decoder=True)
    if (config.model_type, config.num_hidden_layers) not in _LARGE:
        return False
    config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    for module in net.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            module.scaling = config.query_pre_attn_scalar**-0.5
    return True
