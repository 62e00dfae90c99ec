"""Text to token ids and back, from the files beside a target."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.errors import CheckpointError

_HEX_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """The tokenizer of a Hugging Face folder: `tokenizer.model` if there is one, else its JSON.

    Raises:
        CheckpointError: the folder has neither file, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        root = Path(path)
        model = root / "tokenizer.model" if root.is_dir() else root
        self._pieces: Any = None
        self._auto: Any = None
        if model.is_file() and model.suffix == ".model":
            self._pieces = _read_pieces(model)
            self.vocab_size = int(self._pieces.get_piece_size())
            self.bos_id = _id_or_none(self._pieces.bos_id())
            self.eos_id = _id_or_none(self._pieces.eos_id())
        elif (root / "tokenizer.json").is_file():
            from transformers import AutoTokenizer

            self._auto = AutoTokenizer.from_pretrained(root, local_files_only=True)
            self.vocab_size = len(self._auto)
            self.bos_id = self._auto.bos_token_id
            self.eos_id = self._auto.eos_token_id
        else:
            raise CheckpointError(f"{root} has neither tokenizer.model nor tokenizer.json")

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids, behind the beginning-of-text token if `bos` and the tokenizer has one."""
        if self._pieces is not None:
            ids = [int(token) for token in self._pieces.encode(text)]
        else:
            ids = [int(token) for token in self._auto.encode(text, add_special_tokens=False)]
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def indispensable_ids(self) -> list[int]:
        """Ids that every draft vocabulary must hold: specials, and the tokens of single bytes."""
        if self._pieces is not None:
            kinds = ("is_control", "is_unknown", "is_byte")
            tests = [getattr(self._pieces, kind) for kind in kinds]
            return [token for token in range(self.vocab_size) if any(test(token) for test in tests)]
        tokens = self._auto.convert_ids_to_tokens(list(range(self.vocab_size)))
        spelled = [token for token, piece in enumerate(tokens) if _HEX_BYTE.fullmatch(piece or "")]
        # a byte-level vocabulary spells each byte as one character of an alphabet of its own
        bytes_ = spelled or [token for token, piece in enumerate(tokens) if len(piece or "") == 1]
        return sorted({*self._auto.all_special_ids, *bytes_})

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; control tokens give nothing.

        A target's vocabulary may be padded beyond its tokenizer's: such ids give nothing either.
        """
        known = [int(token) for token in ids if token < self.vocab_size]
        if self._pieces is not None:
            return str(self._pieces.decode(known))
        return str(self._auto.decode(known, skip_special_tokens=True))


def train_sentencepiece(texts: Iterable[str], path: str | Path, vocab_size: int) -> None:
    """Train a BPE tokenizer with byte fallback and write `path` atomically.

    Ids: 0 unknown, 1 beginning of text, 2 end of text.

    Raises:
        CheckpointError: the texts cannot give a vocabulary of this size.
    """
    import sentencepiece

    sink = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=sink,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise CheckpointError(
            f"cannot train a tokenizer of {vocab_size} tokens: {error}"
        ) from error
    write_atomic(Path(path), sink.getvalue())


def _read_pieces(model: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{model} is not a sentencepiece model: {error}") from error


def _id_or_none(token: int) -> int | None:
    return int(token) if token >= 0 else None
