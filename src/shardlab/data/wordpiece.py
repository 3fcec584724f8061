"""Word pieces by the `tokenizers` library: the vocabulary of multilingual BERT, or one trained on the text at hand.

No lower-casing and no stripping of accents: the vocabulary is a cased one, and stripping accents takes Hangul
syllables apart (Devlin et al., multilingual models of 2018-11-23, "recommended" cased).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import BertWordPieceTokenizer

PAD, UNKNOWN, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
TRAINED_PIECES = 8000
"""Entries of a trained vocabulary, special ones included."""

OFTEN = 10
"""Times that a character must stand in the text to become a piece; a word with a rarer one is unknown."""


class WordPieces:
    """Text to piece numbers; `words` lists the pieces by number."""

    def __init__(self, tokenizer: BertWordPieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self.words = [piece for piece, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
        self.pad_id, self.unknown_id, self.sep_id = (self.words.index(piece) for piece in (PAD, UNKNOWN, SEP))

    @classmethod
    def read(cls, vocabulary: Path) -> "WordPieces":
        """The pieces of a BERT `vocab.txt`, one a line."""
        return cls(BertWordPieceTokenizer(str(vocabulary), lowercase=False, strip_accents=False))

    @classmethod
    def train(cls, texts: Sequence[str]) -> "WordPieces":
        """TRAINED_PIECES pieces learned from texts; the same ones every time.

        The trainer numbers the pieces of one character as it meets them, in another order in every process, and
        chooses between equally frequent merges by number. Given as special tokens they have their numbers before.
        """
        seen = Counter("".join(texts))
        kept = sorted(character for character, times in seen.items() if times >= OFTEN and not character.isspace())
        rare = {ord(character): " " for character, times in seen.items() if times < OFTEN}
        tokenizer = BertWordPieceTokenizer(lowercase=False, strip_accents=False)
        tokenizer.train_from_iterator(
            [text.translate(rare) for text in texts],
            vocab_size=TRAINED_PIECES,
            limit_alphabet=len(seen),
            show_progress=False,
            special_tokens=[PAD, UNKNOWN, CLS, SEP, *kept, *(f"##{character}" for character in kept)],
        )
        # training leaves the tokenizer without BERT's [CLS] and [SEP] around a text
        return cls(BertWordPieceTokenizer(tokenizer.get_vocab(), lowercase=False, strip_accents=False))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """`[CLS] pieces [SEP]` of every text, uncut."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
