"""What makes two tokenizers the same, as hashes: where they differ, ids mean different things."""

import hashlib

from transformers import PreTrainedTokenizerBase

from compress.manifest import canonical_json

__all__ = ["tokenizer_parts"]

# Cases where tokenizers of one vocabulary differ: case, accents, digits, spaces, line breaks, code, emoji.
SAMPLE_TEXT = "The  Café's 1,234.50 totals:\n\tdef f(x): return x**2  # naïve 漢字 🙂 </s> <|im_end|>"


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What two tokenizers must have in common, each as a hash."""
    parts = {
        "vocabulary": tokenizer.get_vocab(),
        "special tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "encoding of a sample text": tokenizer(SAMPLE_TEXT)["input_ids"],
        "chat template": tokenizer.chat_template,
    }
    return {name: hashlib.sha256(canonical_json(part)).hexdigest() for name, part in parts.items()}
