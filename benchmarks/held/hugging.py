"""Models of transformers from its own mappings, shrunken by the names of their configurations' fields; PEFT over some.

The idea: a configuration is asked for its defaults, and every field whose name says size, layers, heads or vocabulary is
made small. No model is known by name here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.held.made import CLASSES, SAMPLES, Made, NotBuilt, class_loss, near_loss, own_loss

__all__ = ["KINDS", "config_of", "hf_names", "make_hf", "make_peft", "peft_names"]

VOCABULARY, LENGTH, IMAGE = 99, 10, 32
KINDS = {  # mapping -> how many of its classes are drawn
    "CAUSAL_LM": 36, "MASKED_LM": 14, "SEQ_TO_SEQ_CAUSAL_LM": 12, "SEQUENCE_CLASSIFICATION": 14, "QUESTION_ANSWERING": 8,
    "TOKEN_CLASSIFICATION": 8, "MULTIPLE_CHOICE": 4, "NEXT_SENTENCE_PREDICTION": 2, "IMAGE_CLASSIFICATION": 22,
    "SEMANTIC_SEGMENTATION": 4, "DEPTH_ESTIMATION": 2, "MASKED_IMAGE_MODELING": 2, "VIDEO_CLASSIFICATION": 3, "BACKBONE": 6,
    "AUDIO_CLASSIFICATION": 5, "CTC": 5, "TEXT_ENCODING": 6, "ZERO_SHOT_IMAGE_CLASSIFICATION": 4,
}  # fmt: skip

# Names of fields -> a small value. The first pattern that matches the whole name counts.
_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"(?:.*_)?vocab_size(?:_.*)?|n_vocab", VOCABULARY),
    (r".*(?:key_value_heads|kv_heads|key_value_groups|num_kv.*)", 2),
    (r"(?:.*_)?(?:experts_per_tok(?:en)?|num_selected_experts|moe_k|top_k|num_experts_per_topk|moe_topk|router_top_k)", 2),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"(?:.*_)?(?:num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_experts)", 4),
    (r"(?:.*_)?(?:head_dim|d_kv|head_size|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|attention_head_dim|d_head)", 8),
    (r"(?:.*_)?(?:num_attention_heads|attention_heads|n_heads?|num_heads|linear_num_\w+_heads)", 4),
    (r"(?:.*_)?(?:ffn_dim|d_ff|n_inner|d_inner|intermediate_size|intermediate_dim|ffn_hidden_size|mlp_dim|feedforward_dim)", 64),
    (r"(?:.*_)?(?:mtp|nextn_predict)_?(?:num_)?layers", 0),
    (r"(?:encoder|decoder)_layers|num_(?:encoder|decoder)_layers", 2),
    (r"(?:.*_)?(?:num_hidden_layers|n_layers?|num_layers|depth|num_blocks)", 3),
    (r"(?:.*_)?(?:lora_rank|time_step_rank|dt_rank|projection_rank|low_rank_dim)", 8),
    (r"(?:.*_)?(?:state_size|d_state|ssm_state_size)", 8),
    (r"(?:.*_)?window_size", 2),
    (r"(?:.*_)?(?:sliding_window|attention_window|chunk_size|block_size|attention_chunk_size)", 8),
    (r"(?:.*_)?(?:max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length|max_.*_positions)", 64),
    (r"(?:.*_)?(?:image_size|img_size|input_size|crop_size)", IMAGE),
    (r"(?:.*_)?patch_size", 8),
    (r"(?:.*_)?(?:num_frames|num_mel_bins|max_length|max_source_positions)", 16),
    (r"(?:.*_)?(?:hidden_size(?:_.*)?|d_model|n_embd|n_embed|dim|embed_dim|embedding_size|embedding_dim|hidden_dim|emb_dim|"
     r"projection_dim|width|channels|decoder_hidden_size|encoder_hidden_size|d_embed|rnn_width|lru_width|model_dim|"
     r"neck_hidden_size\w*|projection_size|bottleneck_size|cross_attention_dim|output_dim|out_channels)", 32),
)  # fmt: skip
_KEPT = re.compile(
    r"num_channels|type_vocab_size|.*_token_id|.*_token_index|num_labels|chunk_size_feed_forward|in_chans|pretraining_tp"
)


def _small(name: str, value: Any) -> Any:
    """The value that a field of this name gets, or the value itself."""
    if isinstance(value, bool) or value is None:
        return value
    if re.fullmatch(r".*_token_id|.*_token_index|.*_token_idx", name) and isinstance(value, int):
        return value if 0 <= value < 4 else 3
    if _KEPT.fullmatch(name):
        return value
    if isinstance(value, int):
        found = next((v for pattern, v in _NUMBERS if re.fullmatch(pattern, name)), None)
        if found is not None:
            return min(value, found) if value > 0 else value
        return 32 if value >= 256 and re.search(r"size|dim|width|channels|units", name) else value
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        if re.search(r"depths|num_blocks|layers_per|^layers$|num_layers", name):
            return type(value)([1] * len(value))
        if re.search(r"heads", name):
            return type(value)([min(v, 2) for v in value])
        if re.search(r"image_size|img_size|input_size", name):
            return type(value)([IMAGE] * len(value))
        if (
            re.search(r"sizes|dims?$|channels|widths?|embed", name)
            and max(value) >= 32
            and not re.search(r"patch", name)
        ):
            return type(value)([8 * (i + 1) for i in range(len(value))])
    return value


def config_of(kind: type, depth: int = 0) -> Any:
    """A small configuration of this class; its parts are made small in the same way."""
    base = kind()
    known = set(inspect.signature(kind.__init__).parameters)
    chosen: dict[str, Any] = {}
    for name, value in vars(base).items():
        if name not in known:
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and depth < 3:
            chosen[name] = config_of(type(value), depth + 1)
        elif (small := _small(name, value)) != value:
            chosen[name] = small
    if "num_labels" in known or depth == 0:
        chosen["num_labels"] = CLASSES
    if "pad_token_id" in known and getattr(base, "pad_token_id", None) is None:
        chosen["pad_token_id"] = 0
    try:
        return kind(**chosen)
    except Exception:  # a configuration that checks its fields against each other: each for itself, as far as it goes
        kept: dict[str, Any] = {}
        for name, value in chosen.items():
            try:
                kind(**kept, **{name: value})
            except Exception:
                continue
            kept[name] = value
        return kind(**kept)


def hf_names() -> dict[str, list[str]]:
    """For each kind, its names: "hf:KIND:model_type"."""
    from transformers.models.auto import modeling_auto

    return {
        kind: sorted(f"hf:{kind}:{t}" for t in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES"))
        for kind in KINDS
    }


def _model(kind: str, model_type: str) -> tuple[nn.Module, Any]:
    from transformers.models.auto import configuration_auto, modeling_auto

    config = config_of(configuration_auto.CONFIG_MAPPING[model_type])
    mapping = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING")
    model_class = mapping[type(config)]
    if isinstance(model_class, list | tuple):
        model_class = model_class[0]
    if hasattr(config, "is_decoder") and kind == "CAUSAL_LM":
        config.is_decoder = True
    model = model_class(config)
    if sum(p.numel() for p in model.parameters()) > 20_000_000:
        raise NotBuilt("it is not small: more than 20 million parameters")
    return model, config


def _ids(g: torch.Generator) -> torch.Tensor:
    return torch.randint(4, VOCABULARY - 1, (LENGTH,), generator=g)


def _fed(model: nn.Module, x: dict[str, Any]) -> dict[str, Any]:
    """Those entries that the forward pass knows."""
    known = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return x
    return {k: v for k, v in x.items() if k in known}


def _text(kind: str, g: torch.Generator, i: int) -> tuple[dict[str, Any], Any]:
    ids = _ids(g)
    mask = (torch.arange(LENGTH) < 5 + i % 6).long()
    if kind == "CAUSAL_LM":
        return {"input_ids": ids, "labels": ids}, 0
    if kind == "MASKED_LM":
        labels = torch.where(torch.rand(LENGTH, generator=g) < 0.5, ids, -100)
        labels[0] = ids[0]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}, 0
    if kind == "SEQ_TO_SEQ_CAUSAL_LM":
        return {"input_ids": ids, "attention_mask": torch.ones(LENGTH).long(), "labels": _ids(g)}, 0
    if kind == "QUESTION_ANSWERING":
        return {"input_ids": ids, "start_positions": i % 4, "end_positions": 4 + i % 4}, 0
    if kind == "TOKEN_CLASSIFICATION":
        return {"input_ids": ids, "attention_mask": mask, "labels": ids % CLASSES}, 0
    if kind == "MULTIPLE_CHOICE":
        return {"input_ids": torch.stack([ids, _ids(g), _ids(g)]), "labels": i % 3}, 0
    if kind == "NEXT_SENTENCE_PREDICTION":
        return {"input_ids": ids, "labels": i % 2}, 0
    if kind == "TEXT_ENCODING":
        return {"input_ids": ids}, torch.randn((), generator=g)
    return {
        "input_ids": torch.cat([ids[:-1], torch.tensor([2])]),
        "attention_mask": torch.ones(LENGTH).long(),
    }, i % CLASSES


def _sight(kind: str, config: Any, g: torch.Generator, i: int) -> tuple[dict[str, Any], Any]:
    size = getattr(config, "image_size", None) or IMAGE
    size = size if isinstance(size, int) else int(max(size))
    channels = getattr(config, "num_channels", 3)
    picture = torch.randn(channels if isinstance(channels, int) else 3, size, size, generator=g)
    if kind == "IMAGE_CLASSIFICATION":
        return {"pixel_values": picture}, i % CLASSES
    if kind == "SEMANTIC_SEGMENTATION":
        return {"pixel_values": picture, "labels": torch.randint(0, CLASSES, (size, size), generator=g)}, 0
    if kind == "MASKED_IMAGE_MODELING":
        patches = (size // getattr(config, "patch_size", 8)) ** 2
        return {"pixel_values": picture, "bool_masked_pos": torch.arange(patches) % 3 == i % 3}, 0
    if kind == "VIDEO_CLASSIFICATION":
        frames = picture.expand(getattr(config, "num_frames", 8), -1, -1, -1).clone()
        return {"pixel_values": frames, "pixel_values_videos": frames}, i % CLASSES
    if kind == "ZERO_SHOT_IMAGE_CLASSIFICATION":
        size = config.vision_config.image_size
        return {"input_ids": _ids(g), "pixel_values": torch.randn(3, size, size, generator=g)}, torch.randn(
            (), generator=g
        )
    return {"pixel_values": picture}, torch.randn((), generator=g)  # BACKBONE, DEPTH_ESTIMATION


def _sound(kind: str, model: nn.Module, config: Any, g: torch.Generator, i: int) -> tuple[dict[str, Any], Any]:
    if "input_features" in inspect.signature(model.forward).parameters:
        x = {"input_features": torch.randn(40, getattr(config, "feature_projection_input_dim", 80), generator=g)}
    else:
        x = {"input_values": torch.randn(6400, generator=g)}
    return (x | {"labels": torch.randint(4, 20, (2,), generator=g)}, 0) if kind == "CTC" else (x, i % CLASSES)


_IMAGES = ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "MASKED_IMAGE_MODELING", "VIDEO_CLASSIFICATION",
           "BACKBONE", "ZERO_SHOT_IMAGE_CLASSIFICATION")  # fmt: skip


def make_hf(name: str) -> Made:
    _, kind, model_type = name.split(":")
    model, config = _model(kind, model_type)
    g = torch.Generator().manual_seed(5)
    data: list[tuple[Any, Any]] = []
    for i in range(SAMPLES):
        if kind in _IMAGES:
            x, y = _sight(kind, config, g, i)
        elif kind in ("AUDIO_CLASSIFICATION", "CTC"):
            x, y = _sound(kind, model, config, g, i)
        else:
            x, y = _text(kind, g, i)
        data.append((_fed(model, x), y))
    loss: Callable[[Any, Any], torch.Tensor] = own_loss
    if kind in ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION"):
        loss = class_loss
    elif kind in ("TEXT_ENCODING", "BACKBONE", "DEPTH_ESTIMATION", "ZERO_SHOT_IMAGE_CLASSIFICATION"):
        loss = near_loss
    return Made(model, loss, data)


_BASES = ("llama", "gpt2", "opt", "qwen3")


def peft_names() -> list[str]:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return sorted(f"peft:{t.value}:{base}" for t in PEFT_TYPE_TO_CONFIG_MAPPING for base in _BASES)


def make_peft(name: str) -> Made:
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    _, kind, base = name.split(":")
    made = make_hf(f"hf:CAUSAL_LM:{base}")
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind.partition("+")[0])]
    known = set(inspect.signature(config_class.__init__).parameters)
    small = {"num_virtual_tokens": 3, "r": 4, "total_step": 10, "adapter_len": 3, "adapter_layers": 2, "token_indices": [5, 6],
             "num_vectors": 16, "vector_length": 8, "topk": 2, "n_frequency": 8, "init_r": 4, "target_r": 2, "prompt_length": 3,
             "num_tasks": 2, "rank": 4}  # fmt: skip
    options: dict[str, Any] = {k: v for k, v in small.items() if k in known}
    if "task_type" in known:
        options["task_type"] = "CAUSAL_LM"
    if kind == "OFT":
        options |= {"r": 0, "oft_block_size": 8}
    model = peft.get_peft_model(made.model, config_class(**options))
    return Made(model, made.loss, made.data)
