"""Programs of others read the folder that an export writes for Hugging Face: lm-eval, and llama.cpp's converter.

The idea: each runs as its user types it, in a process of its own. Task, words and model are made here, as nothing is fetched.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshcee.files.hugging_face import write
from tests.hf.tiny import WORDS, llama, noted, tokenizer_of_words

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries

CHOICES = 4


def needs(*modules: str, what: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{what} is not installed: {module}")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """As `meshcee checkpoint export last --hf FOLDER` leaves it; what was trained."""
    manifest, state, changed = noted(llama())
    draw = torch.Generator().manual_seed(5)
    state = {name: torch.randn(tensor.shape, generator=draw) for name, tensor in state.items()}
    write(folder, manifest, state, changed)
    return state


def run(folder: Path, module: str, *arguments: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def questions() -> list[dict[str, Any]]:
    """Some words, and several that may come next; none begins with the word w1, which is cut out of others."""
    draw = torch.Generator().manual_seed(3)
    words = [(20 + torch.randperm(WORDS - 20, generator=draw)[: 6 + CHOICES]).tolist() for _ in range(30)]
    return [
        {"before": " ".join(f"w{i}" for i in row[:6]), "after": [f" w{i}" for i in row[6:]], "answer": k % CHOICES}
        for k, row in enumerate(words)
    ]


def test_lm_eval_finds_the_accuracy_of_what_was_trained(tmp_path: Path) -> None:
    needs("lm_eval", what="lm-eval[hf]")
    state, words = exported(tmp_path / "folder"), tokenizer_of_words()
    words.eos_token = "w0"  # lm-eval wants one
    words.save_pretrained(tmp_path / "folder")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))
    task = {
        "task": "next_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{before}}",
        "doc_to_choice": "{{after}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "next_word.yaml").write_text(json.dumps(task))  # JSON is YAML
    what = ("--model", "hf", "--model_args", "pretrained=folder,dtype=float32", "--device", "cpu")
    run(tmp_path, "lm_eval", *what, "--tasks", "next_word", "--include_path", "tasks", "--output_path", "found")
    (found,) = (tmp_path / "found").rglob("results_*.json")

    model, right = llama().eval(), 0
    model.load_state_dict(state)
    for row in questions():
        with torch.no_grad():
            scores = model(torch.tensor([words(row["before"])["input_ids"]])).logits[0, -1]
        right += int(scores[words("".join(row["after"]))["input_ids"]].argmax()) == row["answer"]
    assert json.loads(found.read_text())["results"]["next_word"]["acc,none"] == pytest.approx(right / len(questions()))
    assert 0 < right < len(questions())


def test_llama_cpps_converter_gives_back_every_weight(tmp_path: Path) -> None:
    """The words are those of a Llama, made of a text; transformers reads the file back."""
    needs("convert_hf_to_gguf", "gguf", "sentencepiece", what="llama.cpp's converter (convert-hf-to-gguf and gguf)")
    import transformers

    sentencepiece: Any = importlib.import_module("sentencepiece")
    state, words = exported(tmp_path / "folder"), io.BytesIO()
    text = ["the stages of a mesh hold the layers of a model and send one another what they compute"] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=words, vocab_size=WORDS, model_type="bpe", minloglevel=2
    )
    (tmp_path / "folder" / "tokenizer.model").write_bytes(words.getvalue())
    run(tmp_path, "convert_hf_to_gguf", "folder", "--outfile", "model.gguf", "--outtype", "f32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())
