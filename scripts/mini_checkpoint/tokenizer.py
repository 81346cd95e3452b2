"""A byte-level BPE tokenizer of any size, with DeepSeek's special tokens."""

from __future__ import annotations

from pathlib import Path

from .files import write_json

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
CHAT_TOKENS = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"]
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def byte_symbols() -> list[str]:
    """The printable stand-ins of byte-level BPE for bytes 0..255."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, extra = {}, 256
    for b in range(256):
        if b in keep:
            symbols[b] = chr(b)
        else:
            symbols[b] = chr(extra)
            extra += 1
    return [symbols[b] for b in range(256)]


def bpe_vocabulary(size: int, special: dict[int, str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, letter pairs and triples in order of English letter frequency, with their merges; place holders then.

    Special tokens, by their ids, are in place holders' places.
    """
    symbols = byte_symbols()
    space = symbols[32]
    tokens = [BOS, EOS, PAD, *symbols]
    merges: list[tuple[str, str]] = []
    rank = {c: i for i, c in enumerate(LETTERS)}

    def by_rank(items: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        return sorted(items, key=lambda t: (sum(rank[c] + 1 for c in t), t))

    pairs = [a + b for a, b in by_rank([(a, b) for a in LETTERS for b in LETTERS])]
    triples = by_rank([(a, b, c) for a in LETTERS for b in LETTERS for c in LETTERS])
    wanted: list[tuple[str, str]] = [(p[0], p[1]) for p in pairs]
    wanted += [(space, c) for c in LETTERS]
    wanted += [(space, p) for p in pairs]
    for a, b, c in triples:
        wanted += [(a + b, c), (space, a + b + c)]
    for left, right in wanted:
        if len(tokens) == size:
            break
        tokens.append(left + right)
        merges.append((left, right))
    for i in range(len(tokens), size):
        tokens.append(special.get(i, f"<｜place▁holder▁no▁{i}｜>"))
    if len(tokens) != size or not set(special.values()) <= set(tokens):
        raise ValueError(f"cannot make {size} tokens")
    return {t: i for i, t in enumerate(tokens)}, merges


def write_tokenizer(out: Path, vocab_size: int, special: dict[int, str] | None = None) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = special or {}
    vocab, merges = bpe_vocabulary(vocab_size - len(CHAT_TOKENS), special)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    names = (BOS, EOS, PAD, *special.values())
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in names])
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in CHAT_TOKENS])
    tok.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
            ),
        ]
    )
    if tok.get_vocab_size() != vocab_size:
        raise AssertionError(f"tokenizer has {tok.get_vocab_size()} tokens, not {vocab_size}")
    tok.save(str(out / "tokenizer.json"))
    chat = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "<｜Assistant｜></think>{{ m['content'] }}{{ eos_token }}"
        "{% else %}<｜User｜>{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1048576,
            "chat_template": chat,
        },
    )
