"""Tokens of a text with the characters each covers, for every kind of tokenizer.

Fast tokenizers report offsets. Slow ones do not, so their tokens are laid along the text: a token spells its literal (special
tokens), its sentencepiece form (``▁`` is a space), one byte (``<0x0A>``) or a byte-level BPE string.
"""

from __future__ import annotations

import functools
import re

from mmkit.errors import InputError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def tokens_with_starts(tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Ids of ``text`` without added special tokens, and for each the index of its first character.

    A token without characters of its own starts where the next one does. ValueError where a slow tokenizer's pieces do not spell the text.
    """
    if not text:
        return [], []
    if getattr(tokenizer, "is_fast", False):
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    return ids, _align(tokenizer, ids, text)


def adds_bos(tokenizer) -> bool:
    """Whether the tokenizer puts its beginning-of-sequence token before a text by itself."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return False
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0] == bos


def _align(tokenizer, ids: list[int], text: str) -> list[int]:
    data = text.encode("utf8")
    starts, place, lost = [], 0, False
    for token in tokenizer.convert_ids_to_tokens(ids):
        spellings = _spellings(token)
        size = next((len(s) for s in spellings if data.startswith(s, place)), None)
        if size is None:
            size = next((len(s) - 1 for s in spellings if s[:1] == b" " and data.startswith(s[1:], place)), None)
        skipped = 0
        if size is None and lost:
            found = [(data.find(s, place), len(s)) for s in spellings if s and data.find(s, place) >= 0]
            skipped, size = min((at - place, length) for at, length in found) if found else (0, None)
        if size is None and token == getattr(tokenizer, "unk_token", None):
            starts.append(place)
            lost = True
            continue
        if size is None:
            raise InputError(
                f"{type(tokenizer).__name__} reports no offsets and its token {token!r} does not spell the text at "
                f"{data[place : place + 20].decode('utf8', 'replace')!r}; use the fast tokenizer of this model"
            )
        starts.append(place + skipped)
        place, lost = place + skipped + size, False
    character = _character_of_byte(text)
    return [character[min(start, len(data))] for start in starts]


def _character_of_byte(text: str) -> list[int]:
    """Index of the character each byte of the text belongs to, with one entry past the end."""
    places = [index for index, letter in enumerate(text) for _ in letter.encode("utf8")]
    return [*places, len(text)]


def _spellings(token: str) -> list[bytes]:
    if byte := _BYTE.fullmatch(token):
        return [bytes([int(byte[1], 16)])]
    forms = [token.encode("utf8"), token.replace("▁", " ").encode("utf8")]
    letters = _bytes_of_letters()
    if all(letter in letters for letter in token):
        forms.append(bytes(letters[letter] for letter in token))
    return forms


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """The printable stand-ins byte-level BPE uses for bytes: visible Latin-1 letters stand for themselves, others from U+0100 up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
