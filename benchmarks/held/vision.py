"""Models of timm, torchvision and diffusers, made small.

The idea: a family (a file of timm or torchvision) is drawn, then its model with the fewest parameters is taken and, where
it takes such arguments, made shallower and narrower. diffusers' classes check their sizes against one another, so theirs
are written out.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.held.made import CLASSES, SAMPLES, Made, NotBuilt, class_loss, images, near_loss

__all__ = ["DIFFUSERS", "make_diffusers", "make_timm", "make_torchvision", "timm_names", "torchvision_names"]

_LARGE = 32_000_000  # parameters
_SMALLER: tuple[dict[str, Any], ...] = (  # tried in this order, each alone and with a small image
    {"depth": 3, "embed_dim": 48, "num_heads": 3},
    {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    {"depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 2, 4, 8)},
    {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64)},
    {"layers": (1, 1, 1, 1), "base_width": 16},
    {"layers": (1, 1, 1, 1)},
    {"channel_multiplier": 0.25, "depth_multiplier": 0.34},
    {"depths": (1, 1, 1, 1)},
    {"depth": 3},
    {"num_blocks": 3},
    {},
)


def timm_names() -> list[str]:
    import timm

    return sorted(f"timm:{family}" for family in timm.list_modules())


def _parameters(build: Any) -> int:
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in build().parameters())
    except Exception:  # what cannot be made without data counts as large
        return 1 << 40


def _timm_image(model: nn.Module) -> int:
    size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))[-1]
    return int(size)


def make_timm(name: str) -> Made:
    import timm

    family = name.split(":")[1]
    names = sorted(timm.list_models(module=family), key=lambda n: (len(n), n))
    if not names:
        raise NotBuilt("the family has no models")
    sized = {n: _parameters(lambda n=n: timm.create_model(n, num_classes=CLASSES)) for n in names[:12]}
    least = min(sized, key=lambda n: sized[n])
    for smaller in _SMALLER:
        for image in (64, 96, 128, 192, 224, 256):
            for fixed in ({"img_size": image}, {}):
                model = _tried(least, smaller | fixed, image)
                if model is not None:
                    return Made(model, class_loss, images(image))
    raise NotBuilt(f"{least} does not run on any of the sizes that were tried, or is large")


def _tried(name: str, options: dict[str, Any], image: int) -> nn.Module | None:
    import timm

    def build() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
        return model

    if _parameters(build) > _LARGE:
        return None
    try:
        torch.manual_seed(7)
        model = build().train()
        model(torch.zeros(2, 3, image, image))
    except Exception:  # the next options are tried
        return None
    return build_again(build)


def build_again(build: Any) -> nn.Module:
    """Anew: the trial has moved statistics."""
    torch.manual_seed(7)
    model: nn.Module = build()
    return model


def torchvision_names() -> list[str]:
    from torchvision import models

    families = {models.get_model_builder(n).__module__ for n in models.list_models()}
    return sorted(f"torchvision:{family.removeprefix('torchvision.models.')}" for family in families)


def _segmented(output: Any, target: torch.Tensor) -> torch.Tensor:
    out = output["out"] if isinstance(output, dict) else output
    loss = F.cross_entropy(out, target)
    return loss + 0.4 * F.cross_entropy(output["aux"], target) if "aux" in output else loss


def _inception(output: Any, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, target)
    extra = sum((F.cross_entropy(o, target) for o in output if o is not output.logits), torch.zeros(()))
    return F.cross_entropy(output.logits, target) + 0.3 * extra


def make_torchvision(name: str) -> Made:
    from torchvision import models

    family = "torchvision.models." + name.split(":")[1]
    names = [n for n in models.list_models() if models.get_model_builder(n).__module__ == family]
    sized = {n: _parameters(lambda n=n: models.get_model(n)) for n in names}
    least = min(sorted(sized), key=lambda n: sized[n])
    g = torch.Generator().manual_seed(2)
    options: dict[str, Any] = {}
    if "aux_logits" in inspect.signature(models.get_model_builder(least)).parameters or family.endswith("inception"):
        options["aux_logits"] = True
    if family.endswith("maxvit"):
        model: nn.Module = models.MaxVit((64, 64), 16, 8, 2, (16, 32), (1, 1), 0.2, num_classes=CLASSES)
        return Made(model, class_loss, images(64))
    if family.endswith("vision_transformer"):
        model = models.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=CLASSES, dropout=0.1)
        return Made(model, class_loss, images(32))
    torch.manual_seed(7)
    if ".segmentation" in family:
        model = models.get_model(least, weights=None, weights_backbone=None, num_classes=CLASSES)
        data = [(x, torch.randint(0, CLASSES, (32, 32), generator=g)) for x, _ in images(32)]
        return Made(model, _segmented, data, sizes=(3, 2))
    if ".optical_flow" in family:
        raise NotBuilt("two pictures of 128 pixels at least: not small")
    model = models.get_model(least, weights=None, num_classes=CLASSES, **options)
    if sum(p.numel() for p in model.parameters()) > 60_000_000:
        raise NotBuilt("it is not small")
    if ".video" in family:
        frames, size = (16, 224) if "mvit" in family else (8, 32)
        return Made(
            model, class_loss, [(torch.randn(3, frames, size, size, generator=g), i % CLASSES) for i in range(SAMPLES)]
        )
    loss = _inception if "logits" in str(options) else class_loss
    for size in (64, 96, 128, 224):
        try:
            with torch.no_grad():
                torch.manual_seed(7)
                models.get_model(least, weights=None, num_classes=CLASSES, **options).train()(
                    torch.zeros(2, 3, size, size)
                )
        except Exception:  # too small for so many halvings
            continue
        return Made(model, loss, images(size))
    raise NotBuilt("it does not run on any of the sizes that were tried")


def _noise(*shape: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


_TWO = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
_DOWN, _UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
# Class -> (options, inputs of one sample: name -> shape, or "step" and "class" for integers).
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        {**_TWO, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (3, 16, 16), "timestep": "step"},
    ),
    "UNet1DModel": (
        {"block_out_channels": (32, 32, 64), "sample_size": 64, "extra_in_channels": 16},
        {"sample": (2, 64), "timestep": "step"},
    ),
    "UNet2DConditionModel": (
        {**_TWO, "sample_size": 16, "cross_attention_dim": 16, "attention_head_dim": 4,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        {"sample": (4, 16, 16), "timestep": "step", "encoder_hidden_states": (5, 16)},
    ),
    "UNet3DConditionModel": (
        {**_TWO, "sample_size": 8, "cross_attention_dim": 16, "attention_head_dim": 4,
         "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        {"sample": (4, 3, 8, 8), "timestep": "step", "encoder_hidden_states": (5, 16)},
    ),
    "AutoencoderKL": ({**_TWO, "down_block_types": _DOWN, "up_block_types": _UP}, {"sample": (3, 16, 16)}),
    "VQModel": ({**_TWO, "down_block_types": _DOWN, "up_block_types": _UP}, {"sample": (3, 16, 16)}),
    "AsymmetricAutoencoderKL": (
        {"down_block_types": _DOWN, "up_block_types": _UP, "down_block_out_channels": (16, 32), "norm_num_groups": 8,
         "up_block_out_channels": (16, 32)},
        {"sample": (3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 2),
         "num_decoder_blocks": (2, 1)},
        {"sample": (3, 16, 16)},
    ),
    "AutoencoderDC": (
        {"latent_channels": 4, "attention_head_dim": 8, "encoder_block_out_channels": (8, 16), "encoder_layers_per_block": (1, 1),
         "decoder_block_out_channels": (8, 16), "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (5,)),
         "decoder_qkv_multiscales": ((), (5,)), "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock")},
        {"sample": (3, 16, 16)},
    ),
    "AutoencoderOobleck": (
        {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2], "decoder_channels": 8,
         "decoder_input_channels": 4, "audio_channels": 1},
        {"sample": (1, 64)},
    ),
    "DiTTransformer2DModel": (
        {**_HEADS, "num_layers": 3, "norm_num_groups": 4, "sample_size": 8, "num_embeds_ada_norm": 10},
        {"hidden_states": (4, 8, 8), "timestep": "step", "class_labels": "class"},
    ),
    "PixArtTransformer2DModel": (
        {**_HEADS, "num_layers": 3, "cross_attention_dim": 16, "sample_size": 8, "caption_channels": 12,
         "use_additional_conditions": False},
        {"hidden_states": (4, 8, 8), "timestep": "step", "encoder_hidden_states": (5, 12)},
    ),
    "SD3Transformer2DModel": (
        {**_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 3, "joint_attention_dim": 16,
         "caption_projection_dim": 16, "pooled_projection_dim": 12, "pos_embed_max_size": 8},
        {"hidden_states": (4, 8, 8), "encoder_hidden_states": (5, 16), "pooled_projections": (12,), "timestep": "step"},
    ),
    "SanaTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 3, "num_cross_attention_heads": 2, "sample_size": 8,
         "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 12},
        {"hidden_states": (4, 8, 8), "encoder_hidden_states": (5, 12), "timestep": "step"},
    ),
    "AuraFlowTransformer2DModel": (
        {**_HEADS, "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 2, "joint_attention_dim": 16,
         "caption_projection_dim": 16, "pos_embed_max_size": 64},
        {"hidden_states": (4, 8, 8), "encoder_hidden_states": (5, 16), "timestep": "step"},
    ),
    "CogVideoXTransformer3DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 12, "num_layers": 2,
         "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 5},
        {"hidden_states": (3, 4, 8, 8), "encoder_hidden_states": (5, 12), "timestep": "step"},
    ),
    "PriorTransformer": (
        {**_HEADS, "num_layers": 3, "embedding_dim": 16, "num_embeddings": 5},
        {"hidden_states": (16,), "timestep": "step", "proj_embedding": (16,), "encoder_hidden_states": (5, 16)},
    ),
    "T2IAdapter": ({"in_channels": 3, "channels": [8, 16], "num_res_blocks": 1, "downscale_factor": 4}, {"x": (3, 16, 16)}),
}  # fmt: skip


def make_diffusers(name: str) -> Made:
    import diffusers

    kind = name.split(":")[1]
    options, inputs = DIFFUSERS[kind]
    g = torch.Generator().manual_seed(6)
    data = []
    for i in range(SAMPLES):
        x: dict[str, Any] = {}
        for entry, shape in inputs.items():
            if isinstance(shape, str):
                x[entry] = torch.tensor(i * 7 if shape == "step" else i % 10)
            else:
                x[entry] = _noise(*shape, g=g)
        data.append((x, _noise(1, g=g)[0]))
    return Made(getattr(diffusers, kind)(**options), near_loss, data)
