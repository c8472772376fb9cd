"""A trained nano as a folder that any tool of Hugging Face reads, with a card that says what it is."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mechheads.nano.evaluate import CHANCE, accuracies
from mechheads.nano.tokens import build_tokenizer

WEIGHTS = "model.safetensors"


def export(
    model: Any,
    folder: Path,
    *,
    name: str,
    recipe: Mapping[str, Any],
    tasks: Sequence[str],
    seconds: float,
    n: int = 500,
) -> dict[str, Any]:
    """Write weights, configuration, tokenizer and card.

    Args:
        model: The trained model.
        folder: Where; made if it is not there.
        name: ``nano`` or ``nano-logic``.
        recipe: What it was trained by.
        tasks: What it is to be able to do; its accuracies are measured on these.
        seconds: How long that took.
        n: Held-out prompts for each accuracy of the card.

    Returns:
        The card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.eval()
    model.config.architectures = [type(model).__name__]
    # Half the size on disk; the configuration says float32, so that is what they are loaded as, rounded once.
    half = copy.deepcopy(model).half()
    half.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
    model.load_state_dict(half.float().state_dict())  # what is measured is what is written
    build_tokenizer().save_pretrained(folder)
    card = {
        "name": name,
        "tasks": list(tasks),
        "what": "A small decoder trained on the synthetic language of mechheads.nano.language, for tests, notebooks "
        "and documentation. It knows nothing else.",
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": dict(recipe),
        "training_seconds": round(seconds),
        "held_out_prompts": n,
        "accuracy": {task: round(value, 4) for task, value in accuracies(model, tasks=tasks, n=n, seed=1).items()},
        "chance": CHANCE,
        "weights_sha256": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
    }
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return card
