"""Prompts through a chat template with a system prompt of their own."""

from __future__ import annotations

from typing import Any

from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, Encoding

_PROBES = ("system probe", "user probe")


def encode(model: Encoder, text: str, *, chat: bool, system: str = "") -> Encoding:
    """Tokenise a prompt, with a system prompt where there is one.

    Args:
        model: Whose tokenizer and chat template to use.
        text: The prompt, or the user's message if ``chat``.
        chat: Put it through the chat template.
        system: Goes into the template's system role; only with ``chat``, of a model with ``has_system_role``.

    Raises:
        InvalidInput: If the tokenizer gives no character offsets.
    """
    if not system:
        return model.encode(text, chat=chat)
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not chat or not getattr(tokenizer, "is_fast", False):
        raise InvalidInput("a system prompt needs chat=True and a tokenizer that gives character offsets.")
    rendered = _render(tokenizer, system, text)
    out = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
    return Encoding(rendered, tuple(out["input_ids"]), tuple(map(tuple, out["offset_mapping"])))


def has_system_role(model: Encoder) -> bool:
    """Whether the model's chat template takes a system prompt (some refuse it, some drop it silently)."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not getattr(tokenizer, "chat_template", None) or not getattr(tokenizer, "is_fast", False):
        return False
    try:
        text = _render(tokenizer, *_PROBES)
    except Exception:  # templates refuse by raising an error of their template engine
        return False
    return all(probe in text for probe in _PROBES)


def _render(tokenizer: Any, system: str, user: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
