"""A run's weights as Hugging Face's libraries keep them: a model for transformers, an adapter for PEFT.

The idea: the libraries write and read their own files. A run notes what it trains; an export has the library write a folder,
loads that folder back, and compares. Only what comes back as it was trained is put in its place.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshcee.errors import MeshceeError, UsageError
from meshcee.files import disk
from meshcee.files.strict_json import dumps, loads
from meshcee.files.tensor_files import save

__all__ = ["described", "write"]

OTHERWISE = "use --out FILE.safetensors, which `load_state_dict` of the job's own model takes"


def described(model: Any) -> dict[str, Any]:
    """What a run notes of its model, in JSON: its config, and of an adapter how its parameters are named when saved."""
    peft = sys.modules.get("peft")  # who has an adapter has imported it
    if peft is None or not isinstance(model, peft.PeftModel):
        return {"config": _config(model), "adapter": None}
    try:
        return {"config": _config(model.get_base_model()), "adapter": _adapter(peft, model)}
    except Exception as error:  # of the library: it shall not keep the run from training
        return {"config": None, "adapter": {"unknown": f"{type(error).__name__}: {error}"}}


def _config(model: Any) -> dict[str, Any] | None:
    """Of a model of transformers."""
    config = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return None
    assert config is not None
    return {**loads(config.to_json_string()), "architectures": [type(model).__name__]}


def _adapter(peft: Any, model: Any) -> dict[str, Any]:
    """The active adapter: its config as PEFT writes it, and for each tensor of its file the name in the model.

    `prompt` are likewise the tensors of a module of which PEFT writes what it computes: a prompt.
    """
    adapter = model.active_adapter
    state = model.state_dict()
    # Not "auto", which asks the hub; embeddings that are trained beside the adapter are refused by name.
    saved = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter, save_embedding_layers=False)
    own = {id(tensor): name for name, tensor in state.items()}
    config, base = copy.copy(model.peft_config[adapter]), model.get_base_model()
    computed = [name for name, tensor in saved.items() if id(tensor) not in own]
    if computed and not config.is_prompt_learning:
        return {"unknown": f"PEFT computes {computed[0]!r} when it saves"}
    encoder = f"prompt_encoder.{adapter}."
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
        written = loads((Path(folder) / "adapter_config.json").read_text())
    return {
        "config": written,
        "names": {name: own[id(tensor)] for name, tensor in saved.items() if id(tensor) in own},
        "prompt": {name.removeprefix(encoder): name for name in state if name.startswith(encoder)},
    }


def write(
    place: Path, manifest: Mapping[str, Any], state: Mapping[str, torch.Tensor], changed: Iterable[str]
) -> tuple[str, int]:
    """Make the folder `place` for `from_pretrained`; returns of which class, and how many tensors. `state` has every tensor
    once; `changed` are the names that training may have changed. UsageError, and nothing in its place, where that cannot be."""
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise UsageError(f"{place} exists already: name a new folder, or remove that one")
    try:
        place.absolute().parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=place.absolute().parent, prefix=f".{place.name}."))
    except OSError as error:
        raise disk.kind_of(error)(f"{place} cannot be made: {error.strerror}; {disk.remedy(error)}") from error
    try:
        with _quiet():
            done = _write(made, manifest, state, set(changed))
        made.chmod(0o755)
        os.replace(made, place)
    except MeshceeError:
        raise
    except Exception as error:
        if (refused := _refused(error)) is not None:
            raise disk.kind_of(refused)(
                f"{place} cannot be written: {refused.strerror}; {disk.remedy(refused)}"
            ) from error
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"Hugging Face's library failed: {type(error).__name__}: {reason}; {OTHERWISE}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return done


def _refused(error: Exception) -> OSError | None:
    """What the disk has said, which some libraries tell in their own error; None where it was not the disk."""
    if isinstance(error, OSError):
        return error if error.strerror else None
    told = re.search(r"\(os error (\d+)\)", str(error))  # as those that are written in Rust
    return OSError(int(told[1]), os.strerror(int(told[1]))) if told else None


def _write(
    folder: Path, manifest: Mapping[str, Any], state: Mapping[str, torch.Tensor], changed: set[str]
) -> tuple[str, int]:
    aliases: Mapping[str, str] = manifest["aliases"]  # other names of tied tensors
    config, adapter = manifest.get("config"), manifest.get("adapter")
    if adapter is not None and "unknown" in adapter:
        raise UsageError(f"this adapter cannot be exported ({adapter['unknown']}); {OTHERWISE}")
    if config is None:
        raise UsageError(
            "the job's model is not one of Hugging Face's (an adapter's base has to be one, and a function that makes the "
            f"model does not count as one); {OTHERWISE}"
        )
    kind = _class_of(config)
    if adapter is None:
        found = {name: state[name] for name in state}
        _model(folder, kind, config, found | {other: found[name] for other, name in aliases.items() if name in found})
        return kind.__name__, len(found)
    names, prompt = (
        {name: aliases.get(own, own) for name, own in adapter.get(kept, {}).items()} for kept in ("names", "prompt")
    )
    if left := changed - {*names.values(), *prompt.values()}:
        raise UsageError(
            f"the run has also trained {min(left)!r} ({len(left)} in all), which an adapter's folder does not hold; {OTHERWISE}"
        )
    held, encoder = ({name: state[own] for name, own in kept.items()} for kept in (names, prompt))
    return "PeftModel", _peft(folder, kind, config, adapter["config"], held, encoder)


def _class_of(config: Mapping[str, Any]) -> Any:
    name = config["architectures"][0]
    kind = getattr(_library("transformers"), name, None)
    if kind is None:
        raise UsageError(f"transformers has no class {name}, so nothing could load the folder; {OTHERWISE}")
    return kind


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"--hf needs {name}, to write its files and read them back: install it, or {OTHERWISE}"
        ) from error


def _model(folder: Path, kind: Any, config: Mapping[str, Any], state: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):  # no second model in memory
        model = kind(kind.config_class.from_dict(dict(config)))
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        what = str(error).strip().splitlines()[1:2]
        raise UsageError(
            f"a {kind.__name__} of this config has other tensors: {''.join(what).strip()} {OTHERWISE}"
        ) from error
    model.tie_weights()
    model.save_pretrained(folder)
    _compare(kind.__name__, state, kind.from_pretrained(folder, local_files_only=True).state_dict())


def _peft(
    folder: Path,
    kind: Any,
    config: Mapping[str, Any],
    adapter: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    encoder: Mapping[str, torch.Tensor],
) -> int:
    """How many tensors the adapter's file has. `encoder` has those of the module that computes a prompt, if any."""
    peft = _library("peft")
    (folder / "adapter_config.json").write_text(dumps(adapter, indent=2))
    with torch.device("meta"):
        base = kind(kind.config_class.from_dict(dict(config)))
    if encoder:
        tensors = {**_prompts(peft, copy.deepcopy(base), folder, encoder), **tensors}
    save(folder / "adapter_model.safetensors", tensors)
    base.to_empty(device="cpu")  # the run has not changed it, so its values do not matter here
    loaded = peft.PeftModel.from_pretrained(base, folder, local_files_only=True)
    read = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    _compare("PeftModel", tensors, read)
    if more := read.keys() - tensors.keys():
        raise UsageError(f"PeftModel.from_pretrained wants {min(more)!r} too, which the run has not; {OTHERWISE}")
    return len(tensors)


def _prompts(peft: Any, base: Any, folder: Path, encoder: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What PEFT computes when it saves, by its own module with the trained tensors; only that module lies in memory."""
    config = peft.PeftConfig.from_pretrained(folder)
    config.inference_mode = False  # with all parts that were trained
    if hasattr(config, "prompt_tuning_init"):
        config.prompt_tuning_init = "RANDOM"  # the trained values come next, so no tokenizer is asked for
    model = peft.get_peft_model(base, config)
    model.prompt_encoder["default"].load_state_dict(dict(encoder), assign=True)
    found = peft.get_peft_model_state_dict(model.eval(), save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in found.items() if not tensor.is_meta}


def _compare(kind: str, trained: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in trained.items():
        other = loaded.get(name)
        if other is None or other.shape != tensor.shape or not torch.equal(other.to(tensor.dtype), tensor):
            raise UsageError(
                f"{kind}.from_pretrained does not give back {name!r} as it was trained, so nothing was written; {OTHERWISE}"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' bars and advice."""
    quiet = importlib.import_module("transformers.utils.logging") if "transformers" in sys.modules else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if quiet is not None:
            quiet.disable_progress_bar()
        yield
