"""nano's tokenizer: one token a word or mark, lower case, with a start token."""

from __future__ import annotations

from typing import Any

from mechheads.nano.language import vocabulary

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"


def build_tokenizer() -> Any:
    """A Hugging Face tokenizer over the language's vocabulary.

    Text is put in lower case and split into words, numbers and single marks, as ``language.pieces`` does; words the
    language does not have become ``<unk>``.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(vocabulary())}
    inner = Tokenizer(models.WordLevel(words, unk_token=UNK))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[a-z0-9]+"), behavior="isolated"),
         pre_tokenizers.Split(Regex(r"[^a-z0-9]"), behavior="isolated")]
    )  # fmt: skip
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, words[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, model_max_length=512,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
