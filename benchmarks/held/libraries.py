"""Imports the libraries; without torchvision's compiled operators, which need its own build of torch.

The idea: PyPI has torchvision for CUDA's torch only. With the schemas of its operators declared, its models in Python work
on any torch; those that call the operators (detection) do not, and count as not built.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch

__all__ = ["load"]

_kept: list[torch.library.Library] = []


def load() -> None:
    """To be called before any of the libraries is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    if not _kept:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
