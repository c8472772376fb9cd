"""Train nano from scratch: ``python -m mechheads.nano.train nano --out runs/nano``, or ``nano-logic``.

Every batch is drawn from the seed and the step's number alone, so a run that was stopped goes on from its last
checkpoint as if it had not been. Loss and accuracies on held-out worlds are printed as it goes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mechheads.errors import InvalidInput
from mechheads.nano.evaluate import accuracies
from mechheads.nano.export import export
from mechheads.nano.language import vocabulary
from mechheads.nano.rows import LEVELS, Row, logic_row, memory_row, retrieval_row, warmup_row
from mechheads.nano.start import hopping_start, structured_start
from mechheads.result_files import write_atomically
from mechheads.stats import check_count


@dataclass(frozen=True)
class Recipe:
    """What a training run is made of; kept in the checkpoint and in the model's card.

    Attributes:
        seed: Seed of the weights and, with the step's number, of every batch.
        steps: Optimiser steps.
        layers, d_model, heads, kv_heads, d_head, d_mlp: Shape of the model.
        learning_rate: Peak, after a linear rise over ``warmup`` steps; falls to a twentieth, as a cosine or, with a
            ``cooldown``, in a straight line over so many last steps.
        retrieval, logic, memory, pairs: Rows of each task in a batch; ``pairs`` (random pairs asked back) fade out.
        prose: Weight of a word that is merely read, where an answer counts 1.
        easing: Share of the run over which pairs fade out and contexts grow to full length.
        reach: Heads of the first layer that start by looking back, the n-th at the n-th token before its own; without
            ``hops``.
        hops: Layers that start with heads which follow a rule one step (``hopping_start``); 0 for none.
        memory_head_dropout: Probability with which a head's output is dropped for a row of memory questions, so that
            remembering rests on no single head.
    """

    seed: int = 0
    steps: int = 2600
    layers: int = 6
    d_model: int = 128
    heads: int = 4
    kv_heads: int = 2
    d_head: int = 32
    d_mlp: int = 384
    learning_rate: float = 1.5e-3
    warmup: int = 200
    cooldown: int = 0
    retrieval: int = 0
    logic: int = 0
    memory: int = 0
    pairs: int = 0
    prose: float = 0.05
    easing: float = 0.4
    reach: int = 1
    hops: int = 0
    memory_head_dropout: float = 0.0

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model is to be able to do."""
        return tuple(task for task in ("retrieval", "memory", "logic") if getattr(self, task))


RECIPES = {
    "nano": Recipe(retrieval=16, memory=12, pairs=12, memory_head_dropout=0.25),
    "nano-logic": Recipe(
        logic=16,
        steps=7000,
        cooldown=1000,
        layers=6,
        heads=8,
        kv_heads=4,
        learning_rate=2e-3,
        warmup=100,
        reach=5,
        hops=4,
    ),
}


@dataclass
class Progress:
    """What a run has come to: the level of its logic rows, and running means of right answers and losses."""

    level: int = 0
    right: float = 0.5
    losses: dict[str, float] = field(default_factory=dict)


def build(recipe: Recipe) -> Any:
    """An untrained model: a Hugging Face Qwen3 (grouped queries, rotary positions, RMSNorm, QK-norm)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary()),
        hidden_size=recipe.d_model,
        intermediate_size=recipe.d_mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.d_head,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    shape = {"heads": recipe.heads, "kv_heads": recipe.kv_heads, "d_head": recipe.d_head, "theta": 10000.0}
    if recipe.hops:
        hopping_start(model, **shape, seed=recipe.seed, hops=recipe.hops)
    else:
        structured_start(model, **shape, seed=recipe.seed, reach=recipe.reach)
    return model


def batches(recipe: Recipe, step: int, level: int) -> dict[str, list[Row]]:
    """The rows of one step, by task."""
    rng = random.Random(f"{recipe.seed}:{step}")
    done = min(1.0, step / (recipe.easing * recipe.steps))
    length = int(48 + (244 - 48) * done)
    fewest = 2 + round(2 * done)
    made = {
        "retrieval": [
            retrieval_row(
                rng,
                facts=rng.randint(fewest, 4 + round(4 * done)),
                length=rng.randint(40, length),
                questions=8,
                prose=recipe.prose,
            )
            for _ in range(recipe.retrieval)
        ],
        "logic": [logic_row(rng, LEVELS[level], prose=recipe.prose) for _ in range(recipe.logic * LEVELS[level].share)],
        "memory": [memory_row(rng, questions=5, prose=recipe.prose) for _ in range(recipe.memory)],
        "pairs": [warmup_row(rng, length=80) for _ in range(round(recipe.pairs * (1 - done)))],
    }
    return {task: rows for task, rows in made.items() if rows}


def tensors(rows: Sequence[Row], *, multiple: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, targets and weights, padded on the right."""
    width = -(-max(len(row.tokens) for row in rows) // multiple) * multiple
    pad = [[0] * (width - len(row.tokens)) for row in rows]
    tokens = torch.tensor([row.tokens + p for row, p in zip(rows, pad, strict=True)])
    targets = torch.tensor([row.targets + p for row, p in zip(rows, pad, strict=True)])
    weights = torch.tensor([row.weights + p for row, p in zip(rows, pad, strict=True)], dtype=torch.float32)
    return tokens, targets, weights


def loss_of(model: Any, rows: Sequence[Row]) -> tuple[Tensor, float]:
    """Weighted mean cross-entropy of what is taught (nats), and the share of full-weight answers that are right."""
    tokens, targets, weights = tensors(rows)
    logits = model(input_ids=tokens, use_cache=False).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    asked = weights >= 1.0
    right = (logits.argmax(-1)[asked] == targets[asked]).float().mean().item()
    return (each * weights.flatten()).sum() / weights.sum(), right


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear rise, then down to a twentieth of the peak; see ``Recipe``."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    if recipe.cooldown:
        return recipe.learning_rate * min(1.0, 0.05 + 0.95 * (recipe.steps - step) / recipe.cooldown)
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def optimiser_of(model: Any, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; norms and embeddings do not decay."""
    plain = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    decayed = [p for name, p in model.named_parameters() if not (p.ndim < 2 or "embed" in name)]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


@contextmanager
def heads_dropped(model: Any, recipe: Recipe, probability: float) -> Iterator[None]:
    """Drop whole heads, each for a row, for the time of a ``with`` block."""

    def drop(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        (z,) = args
        keep = torch.rand(z.shape[0], 1, recipe.heads, 1) >= probability
        return ((z.unflatten(-1, (recipe.heads, recipe.d_head)) * keep).flatten(-2),)

    handles = []
    try:
        if probability:
            handles = [layer.self_attn.o_proj.register_forward_pre_hook(drop) for layer in model.model.layers]
        yield
    finally:
        for handle in handles:
            handle.remove()


def train(recipe: Recipe, out: Path, *, every: int = 250, say: Callable[[str], Any] = print) -> tuple[Any, float]:
    """Train to the end, from the last checkpoint if there is one; returns the model and the seconds it took.

    Raises:
        InvalidInput: If ``every`` is no number of steps, or the checkpoint belongs to another recipe.
    """
    check_count("every", every)
    out.mkdir(parents=True, exist_ok=True)
    model = build(recipe)
    optimiser = optimiser_of(model, recipe)
    checkpoint = out / "checkpoint.pt"
    start, spent, progress = _resumed(checkpoint, recipe, model, optimiser)
    if start:
        say(f"going on from step {start}")
    began = time.perf_counter() - spent
    for step in range(start, recipe.steps):
        _one_step(model, optimiser, recipe, step, progress)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            spent = time.perf_counter() - began
            _keep(checkpoint, recipe, model, optimiser, step + 1, spent, progress)
            found = accuracies(model, tasks=recipe.tasks, n=64)
            shown = " ".join(f"{task} {value:.2f}" for task, value in found.items())
            lost = " ".join(f"{task} {value:.3f}" for task, value in progress.losses.items())
            level = f"level {progress.level} | " if recipe.logic else ""
            say(f"{step + 1:6d} {spent / 60:6.1f} min | {level}loss {lost} | {shown}")
            entry = {"step": step + 1, "seconds": spent, **asdict(progress), "accuracy": found}
            with (out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
    return model, spent


def _one_step(model: Any, optimiser: Any, recipe: Recipe, step: int, progress: Progress) -> None:
    """One optimiser step; every random draw of it comes from the seed and the step."""
    model.train()
    torch.manual_seed(recipe.seed * 1_000_003 + step)
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(recipe, step)
    for task, rows in batches(recipe, step, progress.level).items():
        with heads_dropped(model, recipe, recipe.memory_head_dropout if task == "memory" else 0.0):
            loss, right = loss_of(model, rows)
            loss.backward()
        progress.losses[task] = 0.95 * progress.losses.get(task, loss.item()) + 0.05 * loss.item()
        if task == "logic":
            progress.right = 0.97 * progress.right + 0.03 * right
    if progress.right > LEVELS[progress.level].mastery and progress.level + 1 < len(LEVELS):
        progress.level, progress.right = progress.level + 1, 0.5
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def _resumed(checkpoint: Path, recipe: Recipe, model: Any, optimiser: Any) -> tuple[int, float, Progress]:
    """Step, seconds and progress of a checkpoint, read into model and optimiser; a beginning without one."""
    if not checkpoint.is_file():
        return 0, 0.0, Progress()
    saved = torch.load(checkpoint, weights_only=True)
    if saved["recipe"] != asdict(recipe):
        raise InvalidInput(f"{checkpoint} belongs to another recipe: {saved['recipe']}; choose another --out.")
    model.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    return saved["step"], saved["spent"], Progress(**saved["progress"])


def _keep(
    checkpoint: Path, recipe: Recipe, model: Any, optimiser: Any, step: int, spent: float, progress: Progress
) -> None:
    """Write a checkpoint, whole or not at all."""
    state = {
        "recipe": asdict(recipe),
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
        "spent": spent,
        "progress": asdict(progress),
    }
    write_atomically(checkpoint, lambda target: torch.save(state, target))


def main() -> None:
    """Read a recipe from the command line, train it, and write the finished model with its card."""
    parser = argparse.ArgumentParser(description="Train nano or nano-logic from scratch.")
    parser.add_argument("model", choices=sorted(RECIPES), help="which recipe")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint, log and finished model")
    parser.add_argument("--threads", type=int, default=2, help="processor cores to use")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    defaults: dict[str, Any] = asdict(Recipe())
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help="instead of the recipe's own")
    given: dict[str, Any] = vars(parser.parse_args())
    name, out, threads, every = (given.pop(key) for key in ("model", "out", "threads", "every"))
    torch.set_num_threads(threads)
    recipe = replace(RECIPES[name], **{key: value for key, value in given.items() if value is not None})
    model, spent = train(recipe, out, every=every)
    card = export(model, out / "model", name=name, recipe=asdict(recipe), tasks=recipe.tasks, seconds=spent)
    print(json.dumps(card, indent=1))


if __name__ == "__main__":
    main()
