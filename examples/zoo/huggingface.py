"""Hugging Face's architectures, each with a configuration of two narrow layers and random weights; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchvision_shim import import_torchvision

if TYPE_CHECKING:
    from zoo.sources import Made

# of these, what a configuration has: architectures call the same size by different names
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "embedding_size", "max_position_embeddings", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "image_size": 32, "patch_size": 8,
}  # fmt: skip


def tiny(name: str, task: str) -> Made:
    """The model of an architecture by its `model_type`, for a task (CAUSAL_LM, MASKED_LM, SEQ_TO_SEQ_CAUSAL_LM, IMAGE_CLASSIFICATION), with inputs for that."""
    import_torchvision()  # transformers imports it, which beside a CPU build of torch wants its shim first
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from zoo.sources import Made, images

    known = CONFIG_MAPPING[name]()
    config = CONFIG_MAPPING[name](**{k: v for k, v in SIZES.items() if _is_size(getattr(known, k, ""))})
    kind = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[name]
    model = getattr(transformers, kind if isinstance(kind, str) else kind[0])(config)
    if task == "IMAGE_CLASSIFICATION":
        side = getattr(config, "image_size", 64)
        side = side if isinstance(side, int) else side[0]
        return Made(model, kwargs={"pixel_values": images(model, 3, side, side)}, note="tiny configuration")
    tokens = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    more: dict[str, Any] = {"SEQ_TO_SEQ_CAUSAL_LM": {"decoder_input_ids": tokens[:, :5]}}.get(task, {})
    if hasattr(config, "use_cache"):
        more["use_cache"] = False
    return Made(model, kwargs={"input_ids": tokens, **more}, note="tiny configuration")


def _is_size(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))
