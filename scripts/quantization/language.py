"""Whether a text is in a given language: by its script and, in Latin script, by its commonest words."""

from __future__ import annotations

import re
import unicodedata

# The words that make up a quarter of any running text, and that the other languages here don't share.
_WORDS = {
    "en": "the of and to is that it for was with as be are this you have not i or an by from they we what which a in",
    "de": "der die und das ist nicht ein eine zu den mit von dem auf sich des auch es wie oder im ich sie wir für",
    "fr": "le la les des et est une un que qui dans pour pas sur avec du il elle nous vous ce cette au ou sont",
    "es": "el la los las de que y en un una es no con por para su del se lo como más pero al son o está",
}
_SCRIPTS = {"zh": ("CJK",), "ja": ("HIRAGANA", "KATAKANA", "CJK"), "ko": ("HANGUL",), "ru": ("CYRILLIC",)}
LANGUAGES = tuple(sorted({*_WORDS, *_SCRIPTS}))
_ENOUGH_WORDS = 5  # an answer of a word or two has no grammar to tell a language by


def speaks(text: str, language: str) -> bool:
    """False for another script, for running text without the language's common words, and for text without letters."""
    letters = [char for char in text if char.isalpha()]
    if not letters:
        return bool(re.search(r"\d", text))  # "4" is an answer in any language
    wanted = _SCRIPTS.get(language, ("LATIN",))
    share = sum(unicodedata.name(char, "").startswith(wanted) for char in letters) / len(letters)
    if share < (0.3 if language in _SCRIPTS else 0.9):  # a Chinese text may quote a lot of English, seldom the reverse
        return False
    words = re.findall(r"[^\W\d_]+", text.casefold())
    if language in _SCRIPTS or len(words) < _ENOUGH_WORDS:
        return True
    common = set(_WORDS[language].split())
    hits = sum(word in common for word in words) / len(words)
    others = max(
        sum(word in set(listed.split()) - common for word in words) / len(words)
        for other, listed in _WORDS.items()
        if other != language
    )
    return hits >= 0.08 and hits > others
