"""Word pieces by the `tokenizers` library: the vocabulary of multilingual BERT, or one trained on the text at hand.

No lower-casing and no stripping of accents: the vocabulary is a cased one, and stripping accents takes Hangul
syllables apart (Devlin et al., multilingual models of 2018-11-23, "recommended" cased).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tokenizers import BertWordPieceTokenizer

from shardlab.errors import ShardlabError

PAD, UNKNOWN, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
TRAINED_PIECES = 8000
"""Entries of a trained vocabulary, special ones included."""

EVERY_CHARACTER = 1 << 20
"""The trainer's default keeps the 1,000 most frequent characters only, and equals at that cut in no fixed order."""


class WordPieces:
    """Text to piece numbers; `words` lists the pieces by number."""

    def __init__(self, tokenizer: BertWordPieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self.words = [piece for piece, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
        self.pad_id, self.unknown_id, self.sep_id = (self._number(piece) for piece in (PAD, UNKNOWN, SEP))
        self._number(CLS)

    @classmethod
    def read(cls, vocabulary: Path) -> "WordPieces":
        """The pieces of a BERT `vocab.txt`, one a line."""
        return cls(BertWordPieceTokenizer(str(vocabulary), lowercase=False, strip_accents=False))

    @classmethod
    def train(cls, texts: Sequence[str]) -> "WordPieces":
        """TRAINED_PIECES pieces learned from texts; the same ones every time."""
        tokenizer = BertWordPieceTokenizer(lowercase=False, strip_accents=False)
        tokenizer.train_from_iterator(
            texts,
            vocab_size=TRAINED_PIECES,
            limit_alphabet=EVERY_CHARACTER,
            show_progress=False,
            special_tokens=[PAD, UNKNOWN, CLS, SEP],
        )
        # training leaves the tokenizer without BERT's [CLS] and [SEP] around a text
        return cls(BertWordPieceTokenizer(tokenizer.get_vocab(), lowercase=False, strip_accents=False))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """`[CLS] pieces [SEP]` of every text, uncut."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def _number(self, piece: str) -> int:
        number = self._tokenizer.token_to_id(piece)
        if number is None:
            raise ShardlabError(f"the word-piece vocabulary lacks {piece}; expected the vocab.txt of a BERT model")
        return cast(int, number)
