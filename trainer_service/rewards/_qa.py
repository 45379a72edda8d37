"""How SQuAD compares answers: lower case, without punctuation, articles and extra spaces."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """An answer without what does not count."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(given: str, right: str) -> float:
    """Harmonic mean of precision and recall over the words of normalised answers."""
    words, expected = normalize(given).split(), normalize(right).split()
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(expected)
    return 2 * precision * recall / (precision + recall)
